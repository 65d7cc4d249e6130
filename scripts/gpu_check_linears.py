"""The part of gpu_check.py about quantised linears: torch's kernels against the numbers that the codes stand for."""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from parallel.layers import Matrix, Products
from parallel.quantization import Float8, Quantization, to_float8, to_int8
from tests.workers import kernel_contracts
from workers import fp8, integers

INT8 = Quantization(8, activations=True)
ROWS = (1, 5, 17, 300)
# Outputs, all inputs of a row, and those that this rank holds: a whole row, and a part that begins and ends in groups.
SHAPES = ((1024, 4096, range(4096)), (1000, 14336, range(4779, 9558)), (56, 300, range(300)))


def check_linears(settings: Any) -> dict[str, Any]:
    """Errors relative to the largest result; and, on a GPU, how long products of some rows take, beside plain bf16."""
    kinds: dict[str, tuple[Any, Products, tuple[int, int]]] = {
        f"int4 in groups of {group}": (Quantization(4, group), integers.Int4Products(), integers.LEAST_CAPABILITY)
        for group in (32, 64, 128)
    }
    kinds["int8"] = (INT8, integers.Int8Products(), integers.LEAST_CAPABILITY)
    kinds["fp8"] = (Float8(), fp8.Fp8Products(), fp8.LEAST_CAPABILITY)
    problems, errors, absent, microseconds = [], {}, [], {}
    with nullcontext() if settings.full else kernel_contracts.on_cpu():
        for name, (quantization, products, least) in kinds.items():
            if settings.full and torch.cuda.get_device_capability(settings.device) < least:
                absent.append(name)
                continue
            for shape, rows in itertools.product(SHAPES if settings.full else SHAPES[2:], ROWS):
                error = _error(quantization, products, shape, rows, settings.device)
                errors[name] = max(errors.get(name, 0.0), error)
                if not error <= 2e-2:
                    problems.append(f"{name}: off by {error:.3g} of the largest result, {rows} rows of {shape}")
            if settings.full:
                microseconds[name] = _microseconds(quantization, products, settings.device)
    return {"problems": problems, "largest_error": errors, "absent": absent, "microseconds": microseconds}


def _matrix(quantization: Any, shape: tuple[int, int, range], device: torch.device) -> Matrix:
    return kernel_contracts.random_matrix(quantization, *shape, torch.bfloat16, device, seed=0)


def _error(
    quantization: Any, products: Products, shape: tuple[int, int, range], rows: int, device: torch.device
) -> float:
    matrix = _matrix(quantization, shape, device)
    x = torch.randn(rows, matrix.inputs, generator=torch.Generator().manual_seed(rows)).to(device, torch.bfloat16)
    scales, taken = matrix.scales, x.float()
    if isinstance(quantization, Quantization) and quantization.group:
        scales = scales.bfloat16()  # as the kernel has them
    else:
        codes, scale = (to_int8 if quantization == INT8 else to_float8)(x)
        taken = codes.float() * scale[:, None]
    numbers = quantization.dequantize(matrix.weight, scales, matrix.begun)
    expected = taken.double() @ numbers.double().T
    matrix.adopt(products)
    found = matrix(x)
    return float((found.double() - expected).abs().max() / expected.abs().max())


def _microseconds(quantization: Any, products: Products, device: torch.device) -> dict[str, dict[str, float]]:
    matrix = _matrix(quantization, (4096, 4096, range(4096)), device)
    plain = matrix.plain()
    matrix.adopt(products)
    found = {}
    for rows in (1, 16, 256, 2048):
        x = torch.ones(rows, 4096, device=device, dtype=torch.bfloat16)
        times = {}
        for way, run in (("quantised", lambda x=x: matrix(x)), ("bf16", lambda x=x: F.linear(x, plain))):
            for count in (3, 20):  # the first few to warm up
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(count):
                    run()
                torch.cuda.synchronize()
                times[way] = (time.perf_counter() - began) / count * 1e6
        found[f"{rows} rows"] = times
    return found
