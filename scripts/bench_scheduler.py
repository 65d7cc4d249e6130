#!/usr/bin/env python3
"""What a step costs the driver: microseconds for schedule + encode + update, without model and workers.

    python scripts/bench_scheduler.py [--json FILE] [--peer-python VENV/bin/python --peer-bench SCRIPT --peer-model DIR]

decode: N requests, all past their prompt, one token each per step.
mixed: N requests, of which those that end (after 64 tokens) are replaced by ones with 512-token prompts, so that most
steps also carry prefill chunks. Medians over steps; two steps are in flight, as in the engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import time
from pathlib import Path

from scheduler.blocks import BlockPool
from scheduler.frame import StepResult, encode_plan
from scheduler.limits import Limits
from scheduler.params import SamplingParams
from scheduler.request import Request
from scheduler.scheduler import Scheduler

BLOCK_SIZE, NUM_BLOCKS, BUDGET, IN_FLIGHT = 16, 160_000, 2048, 2


class Feeder:
    """Makes requests of random tokens."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._count = 0

    def request(self, prompt_tokens: int, max_tokens: int) -> Request:
        self._count += 1
        tokens = [self._rng.randrange(40_000) for _ in range(prompt_tokens)]
        return Request(f"r{self._count}", tokens, SamplingParams(temperature=0), max_tokens, frozenset(), 0)

    def staggered(self) -> int:
        return self._rng.randint(16, 64)


def measure(mode: str, running: int, steps: int) -> dict[str, object]:
    limits = Limits(max(BUDGET, running), running)
    scheduler = Scheduler(limits, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    feeder = Feeder()
    for _ in range(running):
        scheduler.add(feeder.request(128, 1800) if mode == "decode" else feeder.request(64, feeder.staggered()))
    warm_up = 40 if mode == "mixed" else 32 + 2 * running * 128 // limits.max_num_batched_tokens
    times, sizes, tokens = [], [], []
    gc.collect()
    gc.freeze()
    for step in range(warm_up + steps):
        began = time.perf_counter()
        plan = scheduler.schedule()
        frame = b"" if plan is None else encode_plan(plan)
        spent = time.perf_counter() - began
        if len(scheduler.in_flight) == IN_FLIGHT or plan is None:
            entry = scheduler.in_flight[0]
            result = StepResult(0, entry.step, [7] * len(entry.sampled), 0.0)
            began = time.perf_counter()
            scheduler.update(result, 0)
            spent += time.perf_counter() - began
        if step >= warm_up and plan is not None:
            times.append(spent)
            sizes.append(len(frame))
            tokens.append(plan.num_tokens)
        while mode == "mixed" and len(scheduler.running) + len(scheduler.waiting) < running:
            scheduler.add(feeder.request(512, 64))
    gc.unfreeze()
    return {
        "mode": mode,
        "running": running,
        "total_us": round(statistics.median(times) * 1e6, 1),
        "frame_bytes": int(statistics.median(sizes)),
        "tokens_per_step": round(statistics.mean(tokens), 1),
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="1,64,256,1024", help="numbers of requests")
    parser.add_argument("--steps", type=int, default=300, help="steps measured for each")
    parser.add_argument("--json", type=Path, help="write JSON lines here too")
    parser.add_argument("--peer-python", help="python of the peer's venv; measures the peer in the same run")
    parser.add_argument("--peer-bench", help="the peer's benchmark script")
    parser.add_argument("--peer-model", help="model folder for the peer")
    args = parser.parse_args()
    rows = []
    for mode in ("decode", "mixed"):
        for running in map(int, args.running.split(",")):
            rows.append(measure(mode, running, args.steps))
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.peer_python:
        command = [args.peer_python, args.peer_bench, "--model", args.peer_model, "--ns", args.running]
        subprocess.run([*command, "--steps", str(args.steps)], check=True)


if __name__ == "__main__":
    main()
