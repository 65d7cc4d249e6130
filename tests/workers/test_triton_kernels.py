"""The Triton kernels in Triton's interpreter, on CPU, against what they stand for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is installed with the test extra")

from attention.backend import HeadLayout
from attention.cache import Scales
from attention.reference import ReferenceBackend
from scripts.gpu_check_parts import TINY, RandomWeights, generate, make_runner
from workers import triton_kernels as kernels
from workers.noise import gumbel_noise
from workers.ops import TorchOps
from workers.triton_ops import TritonOps

CPU = torch.device("cpu")
FUSED, PLAIN = TritonOps(), TorchOps()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of sums, and for bf16, to which the interpreter cuts off where the device rounds."""
    assert found.dtype == expected.dtype
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 0.03, torch.float16: 1e-3}[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 48, 64, 100])
def test_rms_norm_with_and_without_a_residual(dtype: torch.dtype, size: int) -> None:
    x, residual, weight = (
        randn(5, size, dtype=dtype),
        randn(5, size, dtype=dtype, seed=1),
        randn(size, dtype=dtype, seed=2),
    )
    for delta in (None, residual):
        found, expected = FUSED.add_norm(x, delta, weight, 1e-5), PLAIN.add_norm(x, delta, weight, 1e-5)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)


def test_rms_norm_of_heads_that_lie_apart() -> None:
    """As query and key heads do, which are views of one product."""
    x = randn(4, 100)[:, 20:68].unflatten(-1, (3, 16))
    assert not x.is_contiguous()
    weight = randn(16, seed=1)
    assert_close(FUSED.norm(x, weight, 1e-6), PLAIN.norm(x, weight, 1e-6))


@pytest.mark.parametrize("scales", [None, Scales(0.5, 0.01)])
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 3, 8), (4, 1, 48), (1, 1, 2)])
def test_rotation_of_strided_queries_and_keys_with_the_cache_write(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, rotates: bool, scales: Scales | None
) -> None:
    """Keys and values land in their slots, and what lies beside them stays."""
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    fused = 2 * randn(5, sum(widths), dtype=dtype)
    fused[2, -1] = float("nan")
    q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in fused.split(widths, dim=-1))
    angles = randn(5, 2, 1, head_dim // 2, seed=3).repeat(1, 1, 1, 2)
    rotary = (angles[:, 0].cos().to(dtype), angles[:, 0].sin().to(dtype)) if rotates else None
    slots, backend = torch.tensor([11, 0, 7, 2, 8]), ReferenceBackend(HeadLayout(heads, kv_heads, head_dim), 1.0)
    results, stored = [], torch.float8_e4m3fn if scales else dtype
    for ops in (FUSED, PLAIN):
        pages = tuple(torch.full((3, 4, kv_heads, head_dim), float("nan")).to(stored) for _ in range(2))
        results.append((ops.store(q, k, v, rotary, pages, slots, backend, scales), *pages))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        found, expected = found.float(), expected.float()
        assert torch.equal(found.isnan(), expected.isnan())
        assert_close(found.nan_to_num().to(dtype), expected.nan_to_num().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 80, 1500])
def test_silu_multiply(dtype: torch.dtype, size: int) -> None:
    x = 4 * randn(3, 2 * size, dtype=dtype)
    assert_close(FUSED.gate(x), PLAIN.gate(x))


def test_noise_is_the_samplers_to_the_bit() -> None:
    """Else a request's tokens would depend on where it runs."""
    high = torch.tensor([0, 1, 2**32 - 1, 12345])
    low = torch.tensor([7, 2**32 - 1, 0, 2**31])
    for first, stop in ((0, 301), (100_000, 102_100)):
        ids = torch.arange(first, stop)
        assert torch.equal(kernels.gumbel_noise(high, low, ids), gumbel_noise(high, low, ids))


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5)[0],
        lambda: kernels.rotate_and_store(
            *[torch.empty(0, 1, 8)] * 3,
            (torch.empty(0, 1, 8),) * 2,
            (torch.empty(1, 1, 1, 8),) * 2,
            torch.empty(0, dtype=torch.int64),
        ),
        lambda: kernels.silu_multiply(torch.empty(0, 8)),
        lambda: kernels.gumbel_noise(*[torch.empty(0, dtype=torch.int64)] * 2, torch.arange(8)),
    ],
)
def test_nothing_is_launched_for_nothing(call: Callable[[], torch.Tensor]) -> None:
    assert call().shape[0] == 0


def test_a_model_of_fused_kernels_gives_the_tokens_of_one_without() -> None:
    found = []
    for fused in (False, True):
        runner = make_runner(TINY, CPU, "float32", fused_kernels=fused)
        assert isinstance(runner.ops, TritonOps) == fused
        with torch.inference_mode():
            runner.model.load(RandomWeights())
        runner.make_cache(24)
        found.append(generate(runner, (5, 30, 1), max_tokens=4))
    assert found[0] == found[1]


def test_every_kernel_compiles_for_ampere_and_hopper(tmp_path: Path) -> None:
    """The interpreter runs Python; what only the compiler refuses shows here."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, "-m", "tests.workers.compile_kernels"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    launched = re.findall(r"^\s+(_\w+)\[", Path(kernels.__file__).read_text(), re.MULTILINE)
    assert {name for name, *_ in made} == set(launched)
    assert all(size > 1000 for _, _, size, _ in made)
    # Signed or wider arithmetic would make another hash.
    for ptx in (ptx for name, _, _, ptx in made if name == "_gumbel"):
        assert "cvt.rn.f64.u32" in ptx
        assert "mul.lo.s32" in ptx
        assert not re.search(r"shr\.(s|u64)|mul.*2073254261.*64", ptx)
