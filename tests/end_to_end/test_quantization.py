"""Integer weights end to end: the tokens of a model of the numbers that they stand for, on any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.native import load_library
from driver.cluster import Cluster
from driver.config import ConfigError
from driver.llm import LLM
from parallel.loader import CheckpointError
from scheduler.params import SamplingParams
from tests.end_to_end.conftest import TinyModels
from tests.end_to_end.running import UNLIMITED, Ranks, outputs
from tests.end_to_end.test_tiny_models import GREEDY, MAX_TOKENS, PROMPTS
from tests.models import greedy
from tests.workers.test_architecture import stored
from workers.products import QUANTIZATIONS

Expected = list[tuple[list[int], list[int]]]
TIED = "qwen2"


def dequantized(folder: Path, kind: str, to: Path) -> Path:
    """A checkpoint of the numbers that the integers stand for."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    tied = json.loads((to / "config.json").read_text())["tie_word_embeddings"]
    for name, weight in tensors.items():
        if "proj.weight" in name:
            one = QUANTIZATIONS[kind]
        elif name == ("model.embed_tokens.weight" if tied else "lm_head.weight"):
            one = QUANTIZATIONS["int8"]
        else:
            continue
        tensors[name] = one.dequantize(*one.quantize(weight))
        assert not torch.equal(tensors[name], weight)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize(
    ("model", "size"), [("llama", 1), (TIED, 1), ("smollm3", 1), ("llama", 2), (TIED, 3)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_tokens_are_those_of_the_dequantised_model(
    kind: str, model: str, size: int, tiny: TinyModels, ray_cluster: Cluster, tmp_path: Path
) -> None:
    plain = dequantized(tiny.folder(model), kind, tmp_path / "plain")
    expected = [greedy(plain, prompt, MAX_TOKENS) for prompt in PROMPTS]
    if kind == "int4":
        assert expected != [tiny.greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    ranks = Ranks(tiny.folder(model), size, quantization=kind)
    try:
        file_bytes = (tiny.folder(model) / "model.safetensors").stat().st_size
        assert sum(ready.weight_bytes for ready in ranks.ready) < 0.8 * file_bytes
        for budget, depth, staggered in ((UNLIMITED, 0, False), (7, 2, True)):
            with ranks.llm(budget, depth) as llm:
                assert outputs(llm, PROMPTS, GREEDY, staggered) == expected
    finally:
        ranks.close()


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_without_kernels_the_tokens_are_the_same(
    kind: str, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUADRIGA_KERNELS", "off")
    load_library.cache_clear()
    expected = [greedy(dequantized(tiny.folder(TIED), kind, tmp_path / "plain"), PROMPTS[2], MAX_TOKENS)]
    ranks = Ranks(tiny.folder(TIED), quantization=kind, attention_backend="reference")
    try:
        with ranks.llm() as llm:
            assert outputs(llm, PROMPTS[2:3], GREEDY) == expected
    finally:
        ranks.close()
        load_library.cache_clear()


def stored_as_int8(folder: Path, to: Path, plain: str = "") -> Path:
    """The checkpoint as compressed-tensors saves it with int8 weights. plain: a linear that stays as it is."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    for name, weight in list(tensors.items()):
        if "proj.weight" in name and not (plain and name.endswith(plain)):
            tensors[name], scale = QUANTIZATIONS["int8"].quantize(weight)
            tensors[f"{name}_scale"] = scale[:, None]
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "quantization_config": stored()}))
    return to


@pytest.mark.parametrize(("model", "size", "left"), [("llama", 1, ""), (TIED, 1, "down_proj.weight"), ("llama", 2, "")])
def test_checkpoints_that_hold_int8_give_the_tokens_of_their_numbers(
    model: str, size: int, left: str, tiny: TinyModels, ray_cluster: Cluster, tmp_path: Path
) -> None:
    folder = stored_as_int8(tiny.folder(model), tmp_path / "stored", left)
    shutil.copytree(tiny.folder(model), tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale")}
    plain = {n: w.float() * scales[f"{n}_scale"] if f"{n}_scale" in scales else w for n, w in tensors.items()}
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    expected = [greedy(tmp_path / "plain", prompt, MAX_TOKENS) for prompt in PROMPTS]
    ranks = Ranks(folder, size)
    try:
        with ranks.llm(7) as llm:
            assert outputs(llm, PROMPTS, GREEDY) == expected
    finally:
        ranks.close()


def test_what_such_checkpoints_cannot_be_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    folder = stored_as_int8(tiny.folder(TIED), tmp_path / "mixed", "v_proj.weight")
    with pytest.raises(CheckpointError, match=r"v_proj\.weight.* not all quantised"):
        LLM(str(folder))
    with pytest.raises(ConfigError, match=r"quantization int4 needs plain weights, .* has int8"):
        LLM(str(folder), quantization="int4")
    (folder / "config.json").write_bytes((tiny.folder(TIED) / "config.json").read_bytes())
    tensors = {n: w for n, w in load_file(folder / "model.safetensors").items() if not n.endswith("_scale")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"is torch\.int8, and none of the quantised linears"):
        LLM(str(folder))


def test_smollm2_in_int8_agrees_with_fp32_on_nearly_every_token(smollm2: Path, smollm2_expected: Expected) -> None:
    """Along transformers' own greedy text, the likeliest token is the same but for close choices.

    How many of those there are is chance here, among 144 places; of 6,138 in scripts/opticks.txt 95.0 % agree.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with LLM(str(smollm2), quantization="int8", dtype="bfloat16", prefix_caching=False) as llm:
        results = llm.generate([prompt + tokens for prompt, tokens in smollm2_expected], params, use_tqdm=False)
        assert llm.workers[0].weight_bytes < 1.05 * 134.5e6  # of 134.5 million parameters
    places = agreed = 0
    for (prompt, tokens), result in zip(smollm2_expected, results, strict=True):
        for token, found in zip(tokens, result.prompt_logprobs[len(prompt) :], strict=True):
            likeliest, logprob = found.top[0]
            places, agreed = places + 1, agreed + (likeliest == token)
            assert found.token_id == token
            assert logprob - found.logprob < 0.15, "no close choice"
    assert agreed / places >= 0.9


def test_integer_weights_are_refused_where_there_are_no_kernels_for_them(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driver.executor._pick_device", lambda device: "cuda")
    with pytest.raises(ConfigError, match="int8 has no kernels on cuda; leave it out, or take fp8"):
        LLM(str(tiny.folder(TIED)), quantization="int8")
    with pytest.raises(ConfigError, match="fp8 computes in bfloat16, not in float32"):
        LLM(str(tiny.folder(TIED)), quantization="fp8")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="fp8 has no kernels on cpu; leave it out, or take int8 or int4"):
        LLM(str(tiny.folder(TIED)), quantization="fp8")
