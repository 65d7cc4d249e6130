#!/usr/bin/env python3
"""Steady streams while long prompts arrive, through the engine: how long do the streams stall?

    python scripts/bench_mixed.py --model smollm2 --trace-steps steps.jsonl
    python scripts/bench_mixed.py --model smollm2 --no-chunked-prefill --trace-steps whole.jsonl
    python scripts/bench_mixed.py --sweep --rounds 3 --json docs/targets.jsonl --plot docs/targets.png

Prints JSON objects: TBT (time between tokens of the streams while long prompts were in flight) and TTFT of the long
prompts in milliseconds, and prompt tokens/s while any long prompt was in flight. Prompts are random token ids.

--sweep measures target TBTs beside fixed budgets and whole prompts, in turn, and sums up the rounds by their medians.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quadriga import LLM, SamplingParams

TARGETS, BUDGETS = (100, 200, 400), (128, 512, 2048)
MAX_MODEL_LEN = 2048


class Reader(threading.Thread):
    """Reads one stream and keeps when its tokens came."""

    def __init__(self, llm: LLM, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        self.began = time.perf_counter()
        self.times: list[float] = []

    def run(self) -> None:
        for increment in self.stream:
            self.times += [time.perf_counter()] * len(increment.token_ids)


def measure(args: argparse.Namespace, **options: Any) -> dict[str, Any]:
    """One run of the load on an engine of its own."""
    rng = random.Random(args.seed)
    with LLM(
        args.model,
        tensor_parallel_size=args.tp,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=False,
        trace_steps=args.trace_steps,
        **options,
    ) as llm:

        def start(num_tokens: int, max_tokens: int) -> Reader:
            reader = Reader(llm, [rng.randrange(100, 40_000) for _ in range(num_tokens)], max_tokens)
            reader.start()
            return reader

        streams = [start(16, MAX_MODEL_LEN - 16) for _ in range(args.streams)]
        while not all(len(stream.times) > 3 for stream in streams):
            time.sleep(0.01)
        long = []
        for _ in range(args.long):
            long.append(start(args.long_tokens, 1))
            time.sleep(args.every)
        for reader in long:
            reader.join()
        for stream in streams:
            llm.abort(stream.stream.request_id)
            stream.join()
        late = llm.stats()["late_steps"]
    first, last = long[0].began, max(reader.times[0] for reader in long)
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.times, stream.times[1:], strict=False)
        if later > first and earlier < last
    ]
    return {
        **options,
        "tbt_ms_p50": round(percentile(gaps, 0.5) * 1000),
        "tbt_ms_p99": round(percentile(gaps, 0.99) * 1000),
        "tbt_ms_max": round(max(gaps) * 1000),
        "long_ttft_ms_p50": round(percentile([r.times[0] - r.began for r in long], 0.5) * 1000),
        "prompt_tokens_per_s": round(args.long * args.long_tokens / (last - first)),
        "late_steps": late,
    }


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every setting once a round, so that a machine that changes its speed changes it for all; medians of rounds."""
    settings: list[dict[str, Any]] = [
        *({"target_tbt_ms": float(target)} for target in TARGETS),
        *({"max_num_batched_tokens": budget} for budget in BUDGETS),
        {"chunked_prefill": False},
    ]
    runs: list[list[dict[str, Any]]] = [[] for _ in settings]
    with tqdm(total=args.rounds * len(settings), unit="run") as bar:
        for _ in range(args.rounds):
            for setting, of_setting in zip(settings, runs, strict=True):
                of_setting.append(measure(args, **setting))
                bar.write(json.dumps(of_setting[-1]))
                bar.update()
    return [
        {
            key: value if key in setting else statistics.median(run[key] for run in rows)
            for key, value in rows[0].items()
        }
        for setting, rows in zip(settings, runs, strict=True)
    ]


def name_of(row: dict[str, Any]) -> str:
    if "target_tbt_ms" in row:
        return f"target {row['target_tbt_ms']:g} ms"
    return f"budget {row['max_num_batched_tokens']}" if "max_num_batched_tokens" in row else "whole prompts"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """p50 to p99 of TBT against prompt throughput: up and to the left is better."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    for row in rows:
        color = "#2b6cb0" if "target_tbt_ms" in row else "#e6a23c" if "max_num_batched_tokens" in row else "#c0392b"
        speed = row["prompt_tokens_per_s"]
        axes.plot([row["tbt_ms_p50"], row["tbt_ms_p99"]], [speed, speed], color=color, marker="|", linewidth=2)
        axes.annotate(name_of(row), (row["tbt_ms_p99"], speed), xytext=(4, 3), textcoords="offset points", fontsize=8)
        if "target_tbt_ms" in row:
            axes.axvline(row["target_tbt_ms"], color=color, linewidth=0.6, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("time between tokens, ms: p50 to p99")
    axes.set_ylabel("prompt tokens/s")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--long", type=int, default=5, help="number of long prompts")
    parser.add_argument("--long-tokens", type=int, default=1500, help="tokens of each long prompt")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between long prompts")
    parser.add_argument("--max-num-batched-tokens", type=int, help="token budget of a step")
    parser.add_argument("--target-tbt-ms", type=float, help="time between tokens to hold")
    parser.add_argument("--chunked-prefill", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trace-steps", help="record of every step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", action="store_true", help="targets beside fixed budgets and whole prompts")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the sweep")
    parser.add_argument("--json", type=Path, help="write the sweep's medians here, as JSON lines")
    parser.add_argument("--plot", type=Path, help="draw the sweep here")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    if not args.sweep:
        options = {
            name: value
            for name in ("max_num_batched_tokens", "target_tbt_ms", "chunked_prefill")
            if (value := getattr(args, name)) is not None
        }
        print(json.dumps(measure(args, **options)))
        return
    rows = sweep(args)
    for row in rows:
        print(json.dumps(row))
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
