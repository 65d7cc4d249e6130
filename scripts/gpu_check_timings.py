"""The timings of gpu_check.py: what the device can do, and what a Llama-3-8B-shaped model does of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from attention.backend import BackendError, make_backend
from attention.capabilities import Demand, HeadLayout
from attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from attention.torch_flash import TorchFlashBackend
from parallel.layers import Matrix
from scripts.gpu_check_parts import TINY, architecture, make_runner
from workers.graphs import CudaGraphMaker
from workers.inputs import StepInputs
from workers.runner import ModelRunner

LLAMA_3_8B = architecture(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128_256)
CONTEXT, CHUNK = 1024, 2048


def measure(settings: Any) -> dict[str, Any]:
    """Decode step times by batch size and prefill tokens/s, with the roofline of the measured bandwidth and rate."""
    device = settings.device
    bandwidth, rate = _bandwidth(device, settings.full), _matrix_rate(device, settings.full)
    found: dict[str, Any] = {
        "bandwidth_gb_s": bandwidth / 1e9,
        "matrix_tflops": rate / 1e12,
        "decode": [],
        "prefill": [],
        "mixed": [],
    }
    arch, context, chunk = (LLAMA_3_8B, CONTEXT, CHUNK) if settings.full else (TINY, 40, 32)
    dtype = "bfloat16" if settings.full else "float32"
    rows = [1, 8, 32, 128] if settings.full else [1, 4]
    block = 256 if settings.full else 16
    per_row = -(-(context + 1) // block)
    rows = [count for count in rows if not settings.full or _fits(arch, count * per_row * block, device)]
    blocks = max(rows) * per_row + -(-2 * chunk // block)
    runner = random_runner(arch, device, dtype, rows[-1], chunk, blocks, block, settings.full)
    found["backend"] = runner.backend.name
    weights = sum(p.numel() * p.element_size() for p in runner.model.parameters())
    read = weights - runner.model.embed.matrix.weight.nbytes
    for count in rows:
        inputs = _decodes(count, context, per_row, block, device)
        kv_bytes = count * context * runner.cache_shape.bytes_per_block / block
        roofline = (read + kv_bytes) / bandwidth * 1e3
        ways = {"launched": lambda i=inputs: runner._forward(i.token_ids, i.positions, i.metadata)}
        if runner.graphs is not None:
            ways["replayed"] = lambda i=inputs: runner.graphs.run(i)
        for way, forward in ways.items():
            seconds = _time(lambda f=forward: runner.model.head(f()), device)
            found["decode"].append({"name": f"{count} rows {way}", "measured": seconds * 1e3, "roofline": roofline})
        found["decode"] += _other_ways(runner, inputs, count, roofline, device)
    found["mixed"] = _mixed(runner, rows[-1], context, min(chunk, 512), per_row, block, device, settings.full)
    head = runner.model.head.matrix.weight.numel()  # a chunk's tokens, but for the last, need no logits
    parameters = read / runner.dtype.itemsize - head
    metadata = _chunk(chunk, block, device)
    tokens = torch.arange(chunk, device=device) % arch.vocab_size
    seconds = _time(lambda: runner._forward(tokens, torch.arange(chunk, device=device), metadata), device)
    flops = 2 * parameters + 2 * arch.num_layers * arch.num_q_heads * arch.head_dim * chunk
    found["prefill"].append({"name": f"chunk of {chunk}", "measured": chunk / seconds, "roofline": rate / flops})
    return found


def _other_ways(
    runner: ModelRunner, inputs: StepInputs, count: int, roofline: float, device: torch.device
) -> list[dict[str, Any]]:
    """Splitting decodes where the backend leaves it off, with how far its results then lie from those without."""
    if not isinstance(runner.backend, TorchFlashBackend) or not runner.backend.capabilities.block_reason:
        return []
    plain = runner.backend
    forward = lambda: runner._forward(inputs.token_ids, inputs.positions, inputs.metadata)  # noqa: E731
    before = forward().float()
    runner.backend = TorchFlashBackend(plain.layout, plain.scale, split_decodes=True)
    off = float((forward().float() - before).abs().max() / before.abs().max())
    seconds = _time(lambda: runner.model.head(forward()), device)
    runner.backend = plain
    return [
        {"name": f"{count} rows split", "measured": seconds * 1e3, "roofline": roofline, "relative_difference": off}
    ]


def _mixed(
    runner: ModelRunner,
    count: int,
    context: int,
    chunk: int,
    per_row: int,
    block: int,
    device: torch.device,
    full: bool,
) -> list[dict[str, Any]]:
    """A step of `count` decodes and a chunk, launched: one call of the attention backend for all rows, and two."""
    decodes, prompt = _decodes(count, context, per_row, block, device), _chunk(chunk, block, device)
    decode = decodes.metadata.decode
    slots = torch.cat((prompt.slot_mapping, decodes.metadata.slot_mapping))
    metadata = AttentionMetadata(slots, block, prompt.prefill, decode)
    positions = torch.cat((torch.arange(chunk, device=device), decodes.positions))
    tokens = torch.arange(len(positions), device=device) % 301
    kept, rows = runner.backend, []
    for calls in ("one", "two"):
        try:
            if full:
                layout, demand = kept.layout, Demand(dtype=runner.dtype, block_size=block)
                runner.backend = make_backend(kept.name, layout, kept.scale, device, demand, calls)
            elif calls == "one":
                raise BackendError("the reduced form runs on reference, which makes two")
        except BackendError as error:
            rows.append({"name": f"{count} rows and a chunk of {chunk}, {calls}", "absent": str(error)})
            continue
        seconds = _time(lambda: runner._forward(tokens, positions, metadata), device)
        rows.append({"name": f"{count} rows and a chunk of {chunk}, {calls}", "measured": seconds * 1e3})
    runner.backend = kept
    return rows


def random_runner(
    arch: Any, device: torch.device, dtype: str, rows: int, chunk: int, blocks: int, block: int, full: bool
) -> ModelRunner:
    """A model of random weights and a cache of random keys; on a GPU with what `auto` takes, and captured."""
    sizes = {"num_rows": rows, "max_num_batched_tokens": chunk, "max_model_len": 2 * chunk, "block_size": block}
    name = "reference"
    if full:
        demand = Demand(dtype=getattr(torch, dtype), block_size=block)
        layout = HeadLayout(arch.num_q_heads, arch.num_kv_heads, arch.head_dim)
        name = make_backend("auto", layout, 1.0, device, demand).name
    runner = make_runner(arch, device, dtype, name, **sizes)
    if full and runner.backend.capabilities.graphs == "mixed":
        runner.graph_maker = CudaGraphMaker(device)
    for part in runner.model.modules():
        if isinstance(part, Matrix):
            part.fill(torch.zeros((), dtype=part.dtype))
    for parameter in runner.model.parameters():
        parameter.normal_(std=0.02)
    runner.make_cache(blocks)
    for pages in (pages for layer in runner.cache.layers for pages in layer):
        pages.normal_()
    return runner


def _fits(arch: Any, cached_tokens: int, device: torch.device) -> bool:
    """Whether bf16 weights of 8B parameters and so large a cache leave a fifth of the memory free."""
    cache = cached_tokens * 4 * arch.num_layers * arch.num_kv_heads * arch.head_dim
    return 17e9 + cache < 0.8 * torch.cuda.get_device_properties(device).total_memory


def _decodes(count: int, context: int, per_row: int, block: int, device: torch.device) -> StepInputs:
    """`count` rows that decode their token at position `context`, each in blocks of its own."""
    table = torch.arange(count * per_row, dtype=torch.int32, device=device).view(count, per_row)
    positions = torch.full((count,), context, device=device)
    slots = table[:, context // block].long() * block + context % block
    lens = torch.full((count,), context + 1, dtype=torch.int32, device=device)
    decode = DecodeMetadata(lens, table, context + 1)
    return StepInputs(
        token_ids=torch.arange(count, device=device),
        positions=positions,
        metadata=AttentionMetadata(slots, block, decode=decode),
        sampled_tokens=torch.arange(count, device=device),
        sampled_rows=np.arange(count),
        next_positions=np.full(count, context + 1),
    )


def _chunk(length: int, block: int, device: torch.device) -> AttentionMetadata:
    table = torch.arange(-(-length // block), dtype=torch.int32, device=device).unsqueeze(0)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, length], [length]))
    prefill = PrefillMetadata(starts, lens, table, [length], [length])
    return AttentionMetadata(torch.arange(length, device=device), block, prefill)


def _time(run: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of a call, the device's work included."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(13):
        wait()
        began = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def _bandwidth(device: torch.device, full: bool) -> float:
    """Bytes per second, read and written, of a copy."""
    source = torch.ones(2**30 if full else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _time(lambda: target.copy_(source), device)


def _matrix_rate(device: torch.device, full: bool) -> float:
    """Operations per second of a large matrix product on random numbers."""
    size, dtype = (8192, torch.bfloat16) if full else (256, torch.float32)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _time(lambda: left @ right, device)
