"""A KV cache in fp8 against transformers with a cache that rounds keys and values in the same way.

What differs by the last bit of fp32 may be rounded to another number of fp8, so logits are compared loosely, and every
comparison shows that the rounding itself, and each scale, matters more than that.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from driver.cluster import Cluster
from parallel.group import TensorParallelGroup
from parallel.loader import SINGLE_FILE, CheckpointError
from quadriga import LLM, SamplingParams
from tests.end_to_end.chunked import NUM_BLOCKS, last_logits_of
from tests.models import greedy, load_reference, make_tiny_model
from tests.ranks import run_ranks
from tests.workers.test_graphs import spec
from workers.architecture import read_architecture
from workers.runner import ModelRunner
from workers.worker import Worker

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PROMPT = random.Random(4).choices(range(300), k=37)
SCALES = [
    (0.004, 0.006),
    (0.01, 0.008),
    (0.005, 0.012),
]  # keys and values up to 1.8 and 2.7 in layer 0, the rest saturates
TOKENS = 12


class Rounding(transformers.DynamicCache):
    """scales: of each layer's keys and values; in multiples of them they are kept."""

    def __init__(self, scales: Sequence[tuple[float, float]], dtype: torch.dtype) -> None:
        super().__init__()
        self.scales, self.dtype_ = scales, dtype

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: object, **kwargs: object) -> tuple:
        most = torch.finfo(self.dtype_).max
        rounded = [
            (x / scale).clamp(-most, most).to(self.dtype_).float() * scale
            for x, scale in zip((keys, values), self.scales[layer], strict=True)
        ]
        return super().update(*rounded, layer, *args, **kwargs)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("plain"))


def add_tensors(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    save_file({**load_file(source / SINGLE_FILE), **tensors}, target / SINGLE_FILE, {"format": "pt"})
    return target


@pytest.fixture(scope="module", params=["{0}_scale", "{0}_proj.{0}_scale"])
def scaled(request: pytest.FixtureRequest, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {}
    for layer, pair in enumerate(SCALES):
        for kind, scale in zip("kv", pair, strict=True):
            name = request.param.format(kind)
            # As both scalars and vectors of one are found.
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale if kind == "k" else [scale])
    return add_tensors(plain, tmp_path_factory.mktemp("scaled"), tensors)


def wanted_logits(plain: Path, scales: Sequence[tuple[float, float]], dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode():
        model = load_reference(plain)
        return model(torch.tensor([PROMPT]), cache=Rounding(scales, dtype)).logits[0, -1]


def logits(folder: Path, group: TensorParallelGroup, name: str, chunk: int) -> torch.Tensor:
    one = spec(folder, rank=group.rank, size=group.size, attention_backend="auto", block_size=4, kv_cache_dtype=name)
    one = replace(one, num_kv_blocks=NUM_BLOCKS)
    runner = ModelRunner(read_architecture(folder), one, group, torch.device("cpu"))
    return last_logits_of(runner, folder, PROMPT, chunk)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_logits_with_the_scales_of_the_checkpoint(scaled: Path, plain: Path, size: int, chunk: int) -> None:
    wanted = wanted_logits(plain, SCALES, E4M3)
    for wrong in ([(1.0, 1.0)] * 3, [(v, k) for k, v in SCALES], SCALES[::-1]):
        assert (wanted - wanted_logits(plain, wrong, E4M3)).abs().max() > 0.3
    for found in run_ranks(size, lambda group: logits(scaled, group, "fp8", chunk)):
        assert_close(found, wanted)


@pytest.mark.parametrize(("name", "dtype"), [("fp8", E4M3), ("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2)])
def test_without_scales_they_are_1_and_the_log_says_so(
    plain: Path, name: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = wanted_logits(plain, [(1.0, 1.0)] * 3, dtype)
    other = wanted_logits(plain, [(1.0, 1.0)] * 3, E4M3 if dtype is E5M2 else E5M2)
    assert (wanted - other).abs().max() > 0.3
    with caplog.at_level(logging.INFO):
        assert_close(logits(plain, TensorParallelGroup(), name, 64), wanted)
    assert "scales for the fp8 KV cache of 0 of 3 layers" in caplog.text


def test_without_fp8_the_scales_of_a_checkpoint_change_nothing(scaled: Path, plain: Path) -> None:
    found = logits(scaled, TensorParallelGroup(), "auto", 64)
    assert torch.equal(found, logits(plain, TensorParallelGroup(), "auto", 64))


def wanted_tokens(plain: Path) -> list[int]:
    model, cache, ids = load_reference(plain), Rounding(SCALES, E4M3), torch.tensor([PROMPT])
    tokens: list[int] = []
    with torch.inference_mode():
        while len(tokens) < TOKENS:
            tokens.append(int(model(ids, cache=cache).logits[0, -1].argmax()))
            ids = torch.tensor([[tokens[-1]]])
    return tokens


@pytest.mark.parametrize("size", [1, 2])
def test_tokens_of_the_whole_engine(scaled: Path, plain: Path, ray_cluster: Cluster, size: int) -> None:
    wanted = wanted_tokens(plain)
    assert wanted != greedy(plain, PROMPT, TOKENS)
    with LLM(
        str(scaled),
        tensor_parallel_size=size,
        device="cpu",
        dtype="float32",
        kv_cache_dtype="fp8",
        max_num_batched_tokens=16,
        max_num_seqs=4,
        num_kv_blocks=40,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        assert llm.generate([PROMPT], params, use_tqdm=False)[0].output_token_ids == wanted


@pytest.mark.parametrize(("name", "item_bytes"), [("auto", 4), ("fp8", 1), ("fp8_e5m2", 1)])
def test_blocks_are_counted_in_the_dtype_of_the_cache(plain: Path, name: str, item_bytes: int) -> None:
    per_block = 2 * 3 * 4 * 3 * 8 * item_bytes  # keys and values, layers, tokens, heads, their dimensions
    changes = {"block_size": 4, "num_kv_blocks": None, "kv_cache_bytes": 100 * per_block + 1, "kv_cache_dtype": name}
    worker = Worker(spec(plain, **changes))
    ready = worker.start(None, "127.0.0.1", 1)
    assert (ready.num_blocks, ready.cache_bytes) == (100, 100 * per_block)
    assert {pages.nbytes for layer in worker.runner.cache.layers for pages in layer} == {100 * per_block // 6}


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(2)])
def test_a_scale_that_is_none_is_refused(plain: Path, tmp_path: Path, scale: torch.Tensor) -> None:
    folder = add_tensors(plain, tmp_path, {"model.layers.1.self_attn.k_scale": scale})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_scale.*(positive|single) number"):
        logits(folder, TensorParallelGroup(), "fp8", 64)
