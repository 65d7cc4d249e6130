#!/usr/bin/env python3
"""Draws what each step computed over time: one look shows whether streams were stalled.

    python scripts/plot_steps.py steps.jsonl whole.jsonl --titles "chunked" "whole prompts first" --out docs/steps.png

Each step is a bar from its start to its end, as high as its tokens: prefill above decode. A step without decodes while
requests decode is a stall, and so is a long one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PREFILL, DECODE = "#e6a23c", "#2b6cb0"


def read(path: str) -> list[dict]:
    """The steps of a trace, with the start of each: when it was published, or when the one before it was done."""
    steps = [json.loads(line) for line in Path(path).read_text().splitlines()]
    before = 0.0
    for step in steps:
        step["start_s"] = max(step["published_s"], before)
        before = step["done_s"]
    return steps


def draw(axes: plt.Axes, steps: list[dict], title: str) -> None:
    starts = [step["start_s"] for step in steps]
    widths = [step["done_s"] - step["start_s"] for step in steps]
    decodes = [step["decode_tokens"] for step in steps]
    prefills = [step["prefill_tokens"] for step in steps]
    edges = {"align": "edge", "linewidth": 0.2, "edgecolor": "white"}
    axes.bar(starts, decodes, widths, color=DECODE, label="decode", **edges)
    axes.bar(starts, prefills, widths, bottom=decodes, color=PREFILL, label="prefill", **edges)
    longest = max(range(len(steps)), key=widths.__getitem__)
    axes.set_title(f"{title}: longest step {widths[longest] * 1000:.0f} ms", fontsize=10)
    axes.set_yscale("symlog", linthresh=10)
    axes.set_ylabel("tokens in the step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", help="files written with --trace-steps")
    parser.add_argument("--titles", nargs="+", help="one for each trace; not given: the file names")
    parser.add_argument("--seconds", type=float, nargs=2, metavar=("FROM", "TO"), help="part of the time to draw")
    parser.add_argument("--out", default="steps.png", help="picture to write")
    args = parser.parse_args()
    figure, rows = plt.subplots(
        len(args.traces), 1, figsize=(9, 2.6 * len(args.traces)), sharex=True, sharey=True, squeeze=False
    )
    for axes, path, title in zip(rows[:, 0], args.traces, args.titles or args.traces, strict=True):
        draw(axes, read(path), title)
        if args.seconds:
            axes.set_xlim(*args.seconds)
    rows[0, 0].legend(loc="upper right", fontsize=8, ncols=2)
    rows[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
