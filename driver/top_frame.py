"""What `quadriga top` shows: load, rates and latencies of a service, from its stats."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from driver.top import Stats

QUANTILES = (0.5, 0.9, 0.99)
LATENCIES = {"ttft": "first token", "tbt": "between tokens", "whole": "whole request", "step": "step"}


def frame(stats: Stats, before: Stats | None, seconds: float) -> Group:
    """What is shown. before: figures `seconds` earlier, for rates and latencies of that time; None: since the start."""
    if before is not None and before["started_at"] != stats["started_at"]:
        before = None  # another driver, which counts anew
    if before is None:
        seconds = max(stats["uptime_s"], 1e-3)
    head = f"{stats['model']}   TP {stats['tensor_parallel_size']}   {stats['state']}   up {_time(stats['uptime_s'])}"
    return Group(Panel(_load(stats), title=head), _rates(stats, before, seconds), _latencies(stats, before))


def quantile(found: Mapping[str, Any], before: Mapping[str, Any] | None, share: float) -> float | None:
    """The value that `share` of a histogram's values do not exceed, by interpolation; None without values.

    before: an earlier state of it, whose values are left out.
    """
    counts = found["counts"] if before is None else _differences(found["counts"], before["counts"])
    wanted = share * sum(counts)
    if not sum(counts):
        return None
    below, passed = 0.0, 0
    for bound, count in zip(found["bounds"], counts, strict=False):
        if count and passed + count >= wanted:
            return below + (bound - below) * (wanted - passed) / count
        below, passed = bound, passed + count
    return found["bounds"][-1]  # it is above, and nobody knows how far


def show(look: Callable[[], Stats], interval: float, once: bool) -> int:
    """Draws what `look` gives, again and again, or once. Returns the exit code."""
    before, at = look(), time.monotonic()
    if once:
        time.sleep(interval)
        stats, now = look(), time.monotonic()
        Console().print(frame(stats, before, now - at))
        return 0
    with Live(frame(before, None, 0.0), screen=sys.stdout.isatty(), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            stats, now = look(), time.monotonic()
            live.update(frame(stats, before, now - at), refresh=True)
            before, at = stats, now


def _load(stats: Stats) -> Table:
    used = stats["kv_blocks"] - stats["kv_blocks_free"]
    grid = Table.grid(padding=(0, 2))
    grid.add_row("requests", f"{stats['running']} running, {stats['waiting']} waiting")
    grid.add_row("step", f"{stats['step_tokens']} of {stats['step_budget']} tokens")
    grid.add_row("KV cache", _bar(used, stats["kv_blocks"]), f"{used} of {stats['kv_blocks']} blocks")
    looked_up = stats["prefill_tokens"] + stats["cached_tokens"]
    grid.add_row("prefix hits", _bar(stats["cached_tokens"], looked_up), f"of {looked_up} prompt tokens so far")
    return grid


def _bar(part: float, whole: float) -> Table:
    share = part / whole if whole else 0.0
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(total=1.0, completed=share, width=30), f"{100 * share:.1f} %")
    return grid


def _rates(stats: Stats, before: Stats | None, seconds: float) -> Table:
    table = Table("", "per second", "in all", expand=True)
    rows = {
        "prompt tokens computed": ("prefill_tokens",),
        "prompt tokens from the cache": ("cached_tokens",),
        "tokens made": ("generated_tokens",),
        "steps": ("steps",),
        "steps too slow for the target": ("late_steps",),
        "preemptions": ("preemptions",),
        "frame bytes": ("prefill_bytes", "decode_bytes"),
    }
    for title, names in rows.items():
        total = sum(stats[name] for name in names)
        earlier = sum(before[name] for name in names) if before else 0
        table.add_row(title, f"{(total - earlier) / seconds:,.1f}", f"{total:,}")
    ended = stats["ended_requests"]
    earlier = sum(before["ended_requests"].values()) if before else 0
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(ended.items()) if count)
    table.add_row("requests ended", f"{(sum(ended.values()) - earlier) / seconds:,.1f}", reasons or "0")
    return table


def _latencies(stats: Stats, before: Stats | None) -> Table:
    table = Table("seconds", *(f"p{100 * share:g}" for share in QUANTILES), "values", expand=True)
    for key, title in LATENCIES.items():
        found, earlier = stats["histograms"][key], before and before["histograms"][key]
        values = [quantile(found, earlier, share) for share in QUANTILES]
        count = sum(found["counts"]) - (sum(earlier["counts"]) if earlier else 0)
        table.add_row(title, *("–" if value is None else f"{value:.3g}" for value in values), f"{count:,}")
    return table


def _differences(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(now, before, strict=True)]


def _time(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
