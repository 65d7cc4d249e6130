"""The whole engine over a FlashAttention backend's stand-in, launched and replayed, against transformers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.attention import contracts
from tests.end_to_end.conftest import TinyModels
from tests.models import VOCAB_SIZE
from tests.workers.recording import Recorder


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_flash on CPU and in fp32, with what its kernels document in their place."""
    import torch

    from attention import torch_flash

    kernel = torch_flash.TorchKernel(contracts.varlen_attn)
    capabilities = replace(torch_flash._capabilities(kernel), dtypes=(torch.float32,))
    monkeypatch.setattr(torch_flash, "unusable_device", lambda device: None)
    monkeypatch.setattr(torch_flash, "find_kernel", lambda: kernel)
    monkeypatch.setattr(torch_flash, "_capabilities", lambda kernel: capabilities)


@pytest.mark.parametrize(("calls", "captured"), [("one", False), ("two", False), ("auto", True)])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_tokens_are_those_of_transformers(
    tiny: TinyModels, stand_ins: None, monkeypatch: pytest.MonkeyPatch, kind: str, calls: str, captured: bool
) -> None:
    """Prompts across a page border, in chunks, beside decodes."""
    from quadriga import LLM, SamplingParams
    from workers.runner import ModelRunner

    recorder = Recorder()
    if captured:
        monkeypatch.setattr(ModelRunner, "_cuda_graphs", lambda self, enforce_eager, transport: recorder)
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (5, 270, 40)]
    settings = {"attention_backend": "torch_flash", "attention_calls": calls, "max_num_batched_tokens": 48}
    with LLM(
        str(tiny.folder(kind)),
        executor="inline",
        device="cpu",
        dtype="float32",
        num_kv_blocks=8,
        max_num_seqs=4,
        **settings,
    ) as llm:
        assert (llm.workers[0].backend, llm.workers[0].block_size) == ("torch_flash", 256)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        results = llm.generate(prompts, params, use_tqdm=False)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.output_token_ids == tiny.greedy(kind, prompt, 8)
    assert bool(recorder.graphs) == captured


def test_a_block_size_that_the_backend_cannot_take_is_refused_with_the_reason(
    tiny: TinyModels, stand_ins: None
) -> None:
    from attention.backend import BackendError
    from quadriga import LLM

    with pytest.raises(
        BackendError, match="torch_flash: block_size 16 is not a multiple of 256: FlashAttention 2 reads"
    ):
        LLM(
            str(tiny.folder("llama")),
            executor="inline",
            device="cpu",
            dtype="float32",
            attention_backend="torch_flash",
            block_size=16,
        )
