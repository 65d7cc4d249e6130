"""Which backend is taken where, what it says, and what it refuses by name."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from attention import flash, ragged, torch_flash
from attention.backend import BackendError, make_backend
from attention.capabilities import Demand, HeadLayout
from tests.attention import contracts

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LAYOUT = HeadLayout(8, 2, 64)
BF16 = Demand(dtype=torch.bfloat16)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine that says it has a GPU; `capability` can be changed. Nothing runs on it."""
    fake = SimpleNamespace(capability=(8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: fake.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretender")
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    return fake


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    module = ModuleType(name)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def install_flash_2(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {name: getattr(contracts, name) for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache")}
    install(monkeypatch, "flash_attn", **functions)


def test_auto_takes_the_package_where_it_is_installed(gpu, monkeypatch, caplog) -> None:
    install_flash_2(monkeypatch)
    with caplog.at_level("INFO"):
        backend = make_backend("auto", LAYOUT, 0.125, CUDA, BF16)
    assert backend.name == "flash_attn"
    assert backend.capabilities.preferred_block == 256
    assert "attention backend: flash_attn: the first choice on cuda" in caplog.text


def test_auto_takes_torchs_own_where_the_package_is_missing_and_says_so(gpu, caplog) -> None:
    with caplog.at_level("INFO"):
        backend = make_backend("auto", LAYOUT, 0.125, CUDA, BF16)
    assert backend.name == "torch_flash"
    assert "attention backend: torch_flash: attention backend flash_attn: the flash-attn package cannot" in caplog.text


@pytest.mark.parametrize(
    ("demand", "capability", "reason"),
    [
        (Demand(dtype=torch.float32), (8, 0), "it computes in bfloat16, float16, the model runs in float32"),
        (BF16, (7, 5), r"compute capability 8.0 (Ampere) or newer, Pretender has 7.5"),
        (Demand(dtype=torch.bfloat16, block_size=16), (8, 0), "block_size 16 is not a multiple of 256: FlashAttention"),
    ],
)
def test_auto_never_falls_back_on_reference_silently(gpu, caplog, demand, capability, reason) -> None:
    gpu.capability = capability
    with caplog.at_level("INFO"):
        assert make_backend("auto", LAYOUT, 0.125, CUDA, demand).name == "reference"
    warning = next(record for record in caplog.records if record.levelname == "WARNING")
    assert "attention backend: reference" in warning.getMessage()
    assert reason in warning.getMessage()


def test_on_cpu_no_gpu_backend_is_tried(caplog) -> None:
    with caplog.at_level("INFO"):
        backend = make_backend("auto", LAYOUT, 0.125, CPU)
    assert backend.name not in ("flash_attn", "torch_flash")
    assert "flash" not in caplog.text


@pytest.mark.parametrize("name", ["flash_attn", "torch_flash"])
def test_a_gpu_backend_on_cpu_is_refused(name: str) -> None:
    with pytest.raises(BackendError, match=f"attention backend {name}: its kernels run on CUDA devices, not on cpu"):
        make_backend(name, LAYOUT, 0.125, CPU, BF16)


@pytest.mark.parametrize(
    ("layout", "demand", "message"),
    [
        (LAYOUT, Demand(dtype=torch.bfloat16, block_size=128), "block_size 128 is not a multiple of 256: FlashAtt"),
        (LAYOUT, Demand(), "it computes in bfloat16, float16, the model runs in float32"),
        (HeadLayout(8, 2, 320), BF16, "its heads have at most 256 dimensions, the model's have 320"),
        (HeadLayout(8, 2, 36), BF16, "its head dimensions are multiples of 8, the model's heads have 36"),
        (HeadLayout(8, 2, 64, soft_cap=50.0), BF16, "it has no soft caps on scores, which the model needs"),
        (HeadLayout(2, 2, 64, alibi_slopes=(0.5, 0.25)), BF16, "it has no ALiBi slopes, which the model needs"),
    ],
)
def test_what_a_backend_lacks_is_refused_by_name(gpu, layout, demand, message) -> None:
    with pytest.raises(BackendError, match=f"^attention backend torch_flash: {message}"):
        make_backend("torch_flash", layout, 0.125, CUDA, demand)


def test_the_package_has_soft_caps_and_slopes(gpu, monkeypatch) -> None:
    install_flash_2(monkeypatch)
    layout = HeadLayout(2, 2, 64, soft_cap=50.0, alibi_slopes=(0.5, 0.25))
    assert make_backend("flash_attn", layout, 0.125, CUDA, BF16).name == "flash_attn"


def test_version_3_is_taken_on_hopper_and_pages_as_one_likes(gpu, monkeypatch) -> None:
    install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=contracts.flash_attn_3_with_kvcache)
    with pytest.raises(BackendError, match="the flash-attn package cannot be imported"):
        make_backend("flash_attn", LAYOUT, 0.125, CUDA, BF16)
    gpu.capability = (9, 0)
    backend = make_backend("flash_attn", LAYOUT, 0.125, CUDA, Demand(dtype=torch.bfloat16, block_size=16))
    assert backend._kernels.version == 3
    with pytest.raises(BackendError, match="it has no ALiBi slopes"):
        make_backend("flash_attn", HeadLayout(2, 2, 64, alibi_slopes=(0.5, 0.25)), 0.125, CUDA, BF16)


FP8 = replace(BF16, cache_dtype=torch.float8_e4m3fn)


def test_an_fp8_cache_is_served_by_version_3_and_refused_by_name_elsewhere(gpu, monkeypatch, caplog) -> None:
    install_flash_2(monkeypatch)
    refused = "attention backend {}: its caches are in the model's dtype, not in float8_e4m3fn"
    for name in ("flash_attn", "torch_flash"):
        with pytest.raises(BackendError, match=refused.format(name)):
            make_backend(name, LAYOUT, 0.125, CUDA, FP8)
    with caplog.at_level("INFO"):
        assert make_backend("auto", LAYOUT, 0.125, CUDA, FP8).name == "reference"
    assert refused.format("flash_attn") in caplog.text
    install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=contracts.flash_attn_3_with_kvcache)
    gpu.capability = (9, 0)
    assert make_backend("auto", LAYOUT, 0.125, CUDA, FP8).name == "flash_attn"
    with pytest.raises(BackendError, match="not in float8_e5m2"):
        make_backend("flash_attn", LAYOUT, 0.125, CUDA, replace(FP8, cache_dtype=torch.float8_e5m2))
    with pytest.raises(BackendError, match="multiples of 16 with caches in float8_e4m3fn, the model's heads have 40"):
        make_backend("flash_attn", HeadLayout(8, 2, 40), 0.125, CUDA, FP8)
    assert make_backend("flash_attn", HeadLayout(8, 2, 40), 0.125, CUDA, BF16).name == "flash_attn"


def test_on_cpu_an_fp8_cache_is_for_reference(caplog) -> None:
    with pytest.raises(BackendError, match="attention backend cpu: its caches are in the model's dtype, not in float8"):
        make_backend("cpu", LAYOUT, 0.125, CPU, FP8)
    assert make_backend("auto", LAYOUT, 0.125, CPU, FP8).name == "reference"
    assert "exact but slow" in caplog.text


def test_an_old_package_is_refused_with_what_it_lacks(gpu, monkeypatch) -> None:
    old = lambda q, k, v, softmax_scale=None, causal=False, block_table=None: q  # noqa: E731
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=old, flash_attn_with_kvcache=old)
    with pytest.raises(BackendError, match=r"has no alibi_slopes, softcap, window_size; it needs 2\.6 or newer"):
        make_backend("flash_attn", LAYOUT, 0.125, CUDA, BF16)


def test_an_old_torch_is_refused_with_what_it_lacks(gpu, monkeypatch) -> None:
    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value, is_causal=False: query)
    with pytest.raises(BackendError, match=r"has a varlen_attn without scale, window_size; 2\.13 or newer"):
        make_backend("torch_flash", LAYOUT, 0.125, CUDA, BF16)


def test_a_torch_that_reads_no_pages_is_taken_with_a_note(gpu, monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    with caplog.at_level("INFO"):
        backend = make_backend("auto", LAYOUT, 0.125, CUDA, Demand(dtype=torch.bfloat16, block_size=16))
    assert (backend.name, backend.capabilities.graphs) == ("torch_flash", "none")
    assert "Note: keys are copied out of their pages in every layer, since torch 2.12.1" in caplog.text


def test_an_implementation_activated_in_torch_lifts_the_page_rule(gpu, monkeypatch) -> None:
    seen = {}

    def varlen_attn(*args: object, **kwargs: object) -> torch.Tensor:
        seen.update(kwargs, cu_seq_k=args[4])
        return args[0]

    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert torch_flash.TorchFlashBackend.on(CUDA).block_multiple == 1
    kernel = replace(torch_flash.find_kernel(), varlen_attn=varlen_attn)
    backend = torch_flash.TorchFlashBackend(LAYOUT, 0.125, kernel=kernel)
    rows = ragged.RaggedRows(slice(0, 1), *[torch.zeros(2, dtype=torch.int32)] * 4, 1, 1, True)
    backend._call(torch.zeros(1, 8, 64), (None, None), rows, None, None)
    assert seen["cu_seq_k"] is None
    assert seen["num_splits"] is None


def test_one_call_is_refused_by_a_backend_that_makes_two() -> None:
    with pytest.raises(BackendError, match="attention backend reference: it attends to prefill and decode rows in two"):
        make_backend("reference", LAYOUT, 0.125, CPU, calls="one")


def test_on_cuda_the_package_is_looked_for_on_the_given_device(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="torch sees no CUDA device"):
        flash.find_kernels(CUDA)
