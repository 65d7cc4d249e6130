#!/usr/bin/env python3
"""Where a step's time goes on CPU, beside what the machine's limits leave: one rank, all cores.

    python scripts/profile_step.py --model smollm2 [--plot docs/profile.png]

Steps of several kinds are computed in one go, as they are in service, and in turn with that kernel by kernel, each
timed by itself. The limit of linears is the time to read their weights, or that of their products at the measured
matrix speed if it is longer; that of attention likewise, with the contexts' keys and values. `outside` is what a step
takes besides its kernels: the plan, inputs, sampling. Prints one JSON object a kind of step, in milliseconds; medians
of --repeats.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from bench_cpu import count_parameters, matrix_speed, memory_speed
from tqdm import tqdm

from attention.native import Recording, call
from driver.config import EngineConfig
from driver.executor import InlineExecutor
from driver.setup import read_model, worker_specs
from scheduler.blocks import BlockPool
from scheduler.budget import TokenBudget
from scheduler.frame import StepResult, decode_plan, encode_plan, tokens_crc
from scheduler.params import SamplingParams
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from workers.replay import Replay
from workers.worker import Worker

CONTEXT, PROMPT = 300, 1024  # tokens behind each stream; of the prompt whose chunks are computed
KINDS = {  # streams that decode, tokens of a prompt's chunk
    "1 decode": (1, 0),
    "8 decodes": (8, 0),
    "32 decodes": (32, 0),
    "8 decodes + 56 of a prompt": (8, 56),
    "8 decodes + 120 of a prompt": (8, 120),
    "8 decodes + 504 of a prompt": (8, 504),
}
GROUPS = {"multiply": "linears", "norm": "small", "rotate": "small", "gate": "small", "gather": "small"}
PARTS = ("linears", "attention", "small", "outside")


class TimedReplay(Replay):
    """Carries out a step kernel by kernel while `times` is set, and adds up there what each group of them takes."""

    times: dict[str, float] | None = None

    def _carry_out(self, recording: Recording, arrays: tuple[ctypes.Array, ctypes.Array]) -> int:
        began = time.perf_counter()
        try:
            return super()._carry_out(recording, arrays) if self.times is None else self._one_by_one(*arrays)
        finally:
            self.seconds = time.perf_counter() - began

    def _one_by_one(self, kernels: ctypes.Array, arguments: ctypes.Array) -> int:
        names = {ctypes.cast(kernel, ctypes.c_void_p).value: name for name, kernel in vars(self._kernels).items()}
        for at, kernel in enumerate(kernels):
            places = (ctypes.addressof(array) + at * ctypes.sizeof(ctypes.c_int64) for array in (kernels, arguments))
            began = time.perf_counter()
            status = call(self._kernels.replay, torch.get_num_threads(), 1, *places)
            self.times[GROUPS.get(names.get(kernel, ""), "attention")] += time.perf_counter() - began
            if status:
                return status
        return 0


class Steps:
    """Runs steps of a wanted kind on one rank."""

    def __init__(self, config: EngineConfig) -> None:
        model = read_model(config)
        self.arch, self.limits = model.arch, config.limits("cpu", model.max_model_len)
        worker = Worker(worker_specs(config, model, self.limits, InlineExecutor("cpu"))[0])
        self.ready = worker.start(None, "127.0.0.1", ranks_here=1)
        self._runner, self._epoch = worker.runner, 0
        if self._runner.replay is None:
            raise SystemExit("steps are not recorded here, so that there is nothing to time one by one")
        self._runner.replay = TimedReplay(self._runner.kernels, self._runner.rows.max_blocks)

    def time(self, decodes: int, chunk: int, repeats: int) -> dict[str, float]:
        """Seconds by group; `step` is the whole of it."""
        self._epoch += 1
        pool = BlockPool(self.ready.num_blocks, self.ready.block_size)
        self._budget = TokenBudget(self.limits.max_num_batched_tokens)
        self._scheduler = Scheduler(self.limits, pool, self._epoch, prefix_caching=False, budget=self._budget)
        streams = [self._add(CONTEXT, 4 * repeats + 60) for _ in range(decodes)]
        while any(request.scheduled < request.num_prompt for request in streams):
            self._step()
        self._budget.max_tokens = decodes + chunk
        found: dict[str, list[float]] = defaultdict(list)
        replay = self._runner.replay
        for warm in [True, *[False] * repeats]:
            for one_by_one in (False, True):
                if chunk and not any(request.scheduled < request.num_prompt for request in self._scheduler.running):
                    self._add(prompt_length(chunk), 1)
                replay.times = defaultdict(float) if one_by_one else None
                step = self._step()
                if one_by_one and not warm:
                    for name, seconds in replay.times.items():
                        found[name].append(seconds)
                elif not warm:
                    found["step"].append(step)
                    found["kernels"].append(replay.seconds)
        return {name: statistics.median(seconds) for name, seconds in found.items()}

    def _add(self, length: int, max_tokens: int) -> Request:
        tokens = [100 + (7919 * i + length) % 40_000 for i in range(length)]
        request = Request(f"{time.monotonic()}", tokens, SamplingParams(temperature=0), max_tokens, frozenset(), 0)
        self._scheduler.add(request)
        return request

    def _step(self) -> float:
        """Seconds, of the worker alone."""
        frame = encode_plan(self._scheduler.schedule())
        began = time.perf_counter()
        plan = decode_plan(frame)
        tokens = self._runner.launch(plan, began).tokens()
        seconds = time.perf_counter() - began
        self._scheduler.update(StepResult(plan.epoch, plan.step, tokens, seconds), tokens_crc(tokens))
        return seconds


def prompt_length(chunk: int) -> int:
    """About PROMPT, in an odd number of chunks, so that steps in one go and one by one get the same mix."""
    return chunk * (PROMPT // chunk | 1)


def limits_of(steps: Steps, decodes: int, chunk: int, bytes_per_s: float, flop_per_s: float) -> dict[str, float]:
    """Seconds that each group takes at least."""
    arch, rows = steps.arch, decodes + chunk
    head = arch.vocab_size * arch.hidden_size
    sampled = decodes + (1 if chunk else 0)
    products = 2 * ((count_parameters(arch) - head) * rows + head * sampled)
    cached = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * 2
    pairs = decodes * CONTEXT + (chunk * prompt_length(chunk) / 2 if chunk else 0)
    scored = 4 * arch.num_layers * arch.num_q_heads * arch.head_dim * pairs
    return {
        "linears": max(steps.ready.weight_bytes / bytes_per_s, products / flop_per_s),
        "attention": max(
            (decodes * CONTEXT + (PROMPT / 2 if chunk else 0)) * cached / bytes_per_s, scored / flop_per_s
        ),
    }


def draw(results: list[dict[str, Any]], path: str) -> None:
    """For every kind of step a bar of what it takes beside one of its limit, in shares of the step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = {"linears": "#2b6cb0", "attention": "#e67e22", "small": "#27ae60", "outside": "#7f8c8d"}
    figure, axes = plt.subplots(figsize=(9, 4.2))
    for at, result in enumerate(results):
        for offset, what, alpha in ((0.2, "ms", 1.0), (-0.2, "limit_ms", 0.55)):
            left = 0.0
            for part in PARTS:
                width = result[what].get(part, 0.0) / result["step_ms"]
                axes.barh(at + offset, width, 0.38, left, color=colors[part], alpha=alpha)
                left += width
        axes.text(1.01, at + 0.2, f"{result['step_ms']:.1f} ms", va="center", fontsize=8)
        axes.text(left + 0.01, at - 0.2, f"limit {sum(result['limit_ms'].values()):.1f} ms", va="center", fontsize=8)
    for part in PARTS:
        axes.barh(0, 0, color=colors[part], label=part)
    axes.set_yticks(range(len(results)), [result["kind"] for result in results])
    axes.set_xlim(0, 1.12)
    axes.set_xlabel("share of the step's time; below each what the limits leave")
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--plot", metavar="FILE", help="draw the bars here")
    args = parser.parse_args()
    bytes_per_s, flop_per_s = memory_speed() * 1e9, matrix_speed(getattr(torch, args.dtype)) * 1e12
    steps = Steps(EngineConfig(model=args.model, dtype=args.dtype, executor="inline", max_num_batched_tokens=512))
    results = []
    for kind, (decodes, chunk) in tqdm(KINDS.items(), unit="kind"):
        times = steps.time(decodes, chunk, args.repeats)
        # Alone a kernel takes a little longer than among others; what counts is what they take together.
        parts = {part: times.get(part, 0.0) for part in PARTS[:3]}
        scale = times["kernels"] / sum(parts.values())
        spent = {part: seconds * scale for part, seconds in parts.items()}
        spent["outside"] = times["step"] - times["kernels"]
        limit = limits_of(steps, decodes, chunk, bytes_per_s, flop_per_s)
        in_ms = lambda values: {name: round(1e3 * value, 2) for name, value in values.items()}  # noqa: E731
        results.append(
            {
                "kind": kind,
                "step_ms": round(1e3 * times["step"], 2),
                "ms": in_ms(spent),
                "limit_ms": in_ms(limit),
                "of_limit": round(sum(limit.values()) / times["step"], 2),
                "one_by_one": round(1 / scale, 2),
            }
        )
    print(
        json.dumps({"memory_gb_per_s": round(bytes_per_s / 1e9, 1), "matrix_tflop_per_s": round(flop_per_s / 1e12, 3)})
    )
    for result in results:
        print(json.dumps(result))
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    main()
