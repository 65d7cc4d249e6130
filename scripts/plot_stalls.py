#!/usr/bin/env python3
"""Draws what stall-free batching does to the time between tokens, at one load, by simulation.

    python scripts/plot_stalls.py --out docs/stalls.png

The same requests are served three times: prompts whole and first, and cut into steps of 2048 and of 512 tokens. Left,
how many gaps between tokens are how long; right, the stream with the longest gap. The load is like that of the
Sarathi-Serve paper (arXiv 2403.02310) with long prompts: Yi-34B on two A100.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from driver import plots
from driver.config import EngineConfig
from driver.simulate import Planned, as_text, summarise
from driver.workload import poisson
from scheduler.simulate import Arrival, Outcome, Simulation

MODEL = Path(__file__).parents[1] / "docs" / "models" / "yi-34b-200k"
HARDWARE, TP, MAX_MODEL_LEN = "a100-80g", 2, 16384
PROMPT_TOKENS, OUTPUT_TOKENS, SPREAD = 7000, 250, 0.5
RUNS = (
    ("whole prompts first", "#c0392b", {"chunked_prefill": False}),
    ("2048 tokens a step", "#e6a23c", {"max_num_batched_tokens": 2048}),
    ("512 tokens a step", "#2b6cb0", {"max_num_batched_tokens": 512}),
)


def simulate(arrivals: list[Arrival], name: str, options: dict) -> Simulation:
    config = EngineConfig(
        model=str(MODEL), tensor_parallel_size=TP, max_model_len=MAX_MODEL_LEN, prefix_caching=False, **options
    )
    planned = Planned(config, HARDWARE)
    simulation = planned.run(arrivals)
    print(f"{name}\n{as_text(summarise(planned, simulation))}\n")
    return simulation


def draw_stream(axes: plt.Axes, outcome: Outcome, label: str, color: str) -> None:
    times = [time - outcome.arrival.at for time in outcome.token_times]
    axes.step(times, range(1, len(times) + 1), where="post", label=label, color=color, linewidth=1.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.35, help="requests a second")
    parser.add_argument("--num-requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="stalls.png", help="picture to write")
    args = parser.parse_args()
    drawn = poisson(args.rate, args.num_requests, PROMPT_TOKENS, OUTPUT_TOKENS, SPREAD, args.seed)
    arrivals = [arrival for arrival in drawn if arrival.prompt_tokens + arrival.output_tokens <= MAX_MODEL_LEN]
    runs = [simulate(arrivals, name, options) for name, _, options in RUNS]
    stalled = max(range(len(arrivals)), key=lambda number: max(runs[0].outcomes[number].gaps, default=0.0))
    figure, (tails, stream) = plt.subplots(1, 2, figsize=(11, 4))
    for (label, color, _), run in zip(RUNS, runs, strict=True):
        gaps = [gap for outcome in run.outcomes for gap in outcome.gaps]
        plots.draw_tail(tails, gaps, label, color)
        draw_stream(stream, run.outcomes[stalled], label, color)
    tails.set_xlabel("time between tokens, ms")
    tails.set_ylabel("share that takes longer")
    tails.legend(fontsize=8)
    stream.set_xlabel("seconds since the request arrived")
    stream.set_ylabel("tokens that the stream has got")
    stream.grid(alpha=0.3)
    prompt = sum(arrival.prompt_tokens for arrival in arrivals) / len(arrivals)
    figure.suptitle(
        f"Yi-34B on {TP} A100, {args.rate:g} requests/s with prompts of {prompt:,.0f} tokens: simulated", fontsize=10
    )
    plots.save(figure, args.out)


if __name__ == "__main__":
    main()
