"""The part of gpu_check.py about serving: streams that decode while prompts come in, and where a step's time goes."""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch

from scheduler.blocks import BlockPool
from scheduler.frame import StepResult, tokens_crc
from scheduler.limits import Limits
from scheduler.params import SamplingParams
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scripts.gpu_check_parts import TINY
from scripts.gpu_check_timings import LLAMA_3_8B, random_runner
from workers.runner import LaunchedStep, ModelRunner

IN_FLIGHT = 2  # as the engine has them
OPENING = 16  # tokens of a stream's prompt
PROMPTS_AT_ONCE = 4


@dataclass(frozen=True)
class Load:
    """`streams` requests decode `tokens` tokens each; a prompt of `prompt` tokens comes every `every` steps."""

    streams: int
    tokens: int
    prompt: int
    every: int
    budget: int
    block: int


FULL = Load(streams=32, tokens=160, prompt=4096, every=40, budget=512, block=256)
REDUCED = Load(streams=2, tokens=12, prompt=40, every=4, budget=8, block=16)


def serve(settings: Any) -> dict[str, Any]:
    """Time between tokens of the streams, in ms, and medians of a step's parts, with and without chunked prefill."""
    load = FULL if settings.full else REDUCED
    arch = LLAMA_3_8B if settings.full else TINY
    gc.collect()  # a model that was measured before
    if settings.full:
        torch.cuda.empty_cache()
    held = [load.streams * (OPENING + load.tokens), PROMPTS_AT_ONCE * (load.prompt + 2)]
    blocks = sum(held) // load.block + load.streams + PROMPTS_AT_ONCE
    dtype = "bfloat16" if settings.full else "float32"
    rows = load.streams + PROMPTS_AT_ONCE
    runner = random_runner(arch, settings.device, dtype, rows, load.prompt, blocks, load.block, settings.full)
    found: dict[str, Any] = {"load": vars(load), "tbt_ms": {}, "steps_ms": {}, "gaps_ms": {}, "problems": []}
    for name, chunked in (("chunked prefill", True), ("whole prompts", False)):
        _run(runner, load, chunked, blocks, found, name, warm=True)
        gaps = _run(runner, load, chunked, blocks, found, name, warm=False)
        ordered = sorted(gaps)
        found["gaps_ms"][name] = ordered
        found["tbt_ms"][name] = {
            "p50": statistics.median(ordered),
            "p99": ordered[int(0.99 * (len(ordered) - 1))],
            "longest": ordered[-1],
        }
    return found


def _run(
    runner: ModelRunner, load: Load, chunked: bool, blocks: int, found: dict[str, Any], name: str, warm: bool
) -> list[float]:
    """Serves the load once. Returns the streams' gaps in ms; notes the steps' parts unless it is to warm up."""
    limits = Limits(
        load.budget if chunked else load.prompt + 2, load.streams + PROMPTS_AT_ONCE, chunked_prefill=chunked
    )
    scheduler = Scheduler(limits, BlockPool(blocks, load.block), epoch=next(_epochs), prefix_caching=False)
    streams = [_request(f"stream {i}", OPENING, load.tokens, seed=i) for i in range(load.streams)]
    for stream in streams:
        scheduler.add(stream)
    parts: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    flying: deque[tuple[LaunchedStep, tuple[float, float], list[Any]]] = deque()
    said, came, gaps, steps, prompts = [0] * len(streams), [0.0] * len(streams), [], 0, 0
    last = time.perf_counter()
    while any(stream.finish_reason is None for stream in streams):
        while len(flying) < IN_FLIGHT:
            if steps and steps % load.every == 0 and prompts < steps // load.every:
                prompts += 1
                scheduler.add(_request(f"prompt {prompts}", load.prompt, 2, seed=1000 + prompts))
            began = time.perf_counter()
            plan = scheduler.schedule()
            planned = time.perf_counter()
            if plan is None:
                break
            marks = _marks(runner.device)
            _mark(marks, 0)
            step = runner.launch(plan, planned)
            _mark(marks, 1)
            flying.append((step, (planned - began, time.perf_counter() - planned), marks))
            steps += 1
        step, host, marks = flying.popleft()
        tokens = step.tokens()
        now = time.perf_counter()
        scheduler.update(StepResult(step.plan.epoch, step.plan.step, tokens, 0.0), tokens_crc(tokens))
        kind = "mixed" if step.plan.chunks else "decode"
        parts[kind].append((now - last, _device_seconds(marks), *host, time.perf_counter() - now))
        last = now
        for at, stream in enumerate(streams):
            if len(stream.output_token_ids) > said[at]:
                if said[at]:
                    gaps.append((now - came[at]) * 1e3)
                said[at], came[at] = len(stream.output_token_ids), now
    if scheduler.not_finite:
        found["problems"].append(f"{name}: logits were not finite")
    while flying:
        flying.popleft()[0].tokens()
    if not warm:
        titles = ("step", "device", "planning", "launching", "taking in")
        found["steps_ms"][name] = {
            kind: {"steps": len(rows)}
            | {title: statistics.median(x) * 1e3 for title, x in zip(titles, zip(*rows, strict=True), strict=True)}
            for kind, rows in parts.items()
        }
    return gaps


_epochs = iter(range(1, 1 << 20))


def _request(name: str, length: int, max_tokens: int, seed: int) -> Request:
    tokens = torch.randint(0, 301, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Request(name, tokens, SamplingParams(temperature=0.0), max_tokens, frozenset(), seed=seed)


def _marks(device: torch.device) -> list[Any]:
    if device.type == "cuda":
        return [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    return [0.0, 0.0]


def _mark(marks: list[Any], at: int) -> None:
    if isinstance(marks[at], float):
        marks[at] = time.perf_counter()
    else:
        marks[at].record()


def _device_seconds(marks: list[Any]) -> float:
    """Between the first and the last kernel of a step; where the device is the CPU, of the launch."""
    if isinstance(marks[0], float):
        return marks[1] - marks[0]
    marks[1].synchronize()
    return marks[0].elapsed_time(marks[1]) / 1e3
