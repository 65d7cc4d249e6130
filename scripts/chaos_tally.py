"""What scripts/chaos.py has seen, as a picture and as its last line."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import dataclass, field


@dataclass
class Tally:
    """What was seen. arrivals: when tokens came, `time.monotonic()`; faults: (when, kind)."""

    arrivals: list[float] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    compared: int = 0
    requests: int = 0
    differences: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    def pauses(self, until: float) -> list[float]:
        """For each fault the longest time without a token of anybody from then to the next fault."""
        ends = [when for when, _ in self.faults[1:]] + [until]
        found = []
        for (when, _), end in zip(self.faults, ends, strict=True):
            times = [when, *(at for at in self.arrivals if when <= at <= end), end]
            found.append(max(later - earlier for earlier, later in itertools.pairwise(times)))
        return found


def draw(tally: Tally, began: float, ended: float, path: str) -> None:
    """Tokens a second over time, and when what was broken."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3))
    axes.hist([at - began for at in tally.arrivals if at >= began], bins=max(10, int(ended - began)), color="#2b6cb0")
    colors = {"driver": "#c0392b", "client": "#27ae60", "pause": "#f1c40f", "stop": "#8e44ad"}
    for when, kind in tally.faults:
        axes.axvline(when - began, color=colors.get(kind, "#e67e22"), linewidth=1)
    for kind in sorted({kind for _, kind in tally.faults}):
        axes.plot([], [], color=colors.get(kind, "#e67e22"), label=kind)
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens/s")
    axes.legend(fontsize=7, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def report(tally: Tally, ended: float) -> int:
    in_turn = tally.pauses(ended)
    pauses = sorted(in_turn)
    by_kind: dict[str, list[float]] = {}
    for (_, kind), pause in zip(tally.faults, in_turn, strict=True):
        by_kind.setdefault(kind, []).append(pause)
    summary = {
        "faults": len(tally.faults),
        "requests": tally.requests,
        "pause_s_p50": round(statistics.median(pauses), 2),
        "pause_s_p99": round(pauses[int(0.99 * (len(pauses) - 1))], 2),
        "pause_s_max": round(pauses[-1], 2),
        "pause_s_p50_by_kind": {kind: round(statistics.median(by_kind[kind]), 2) for kind in sorted(by_kind)},
        "tokens_compared": tally.compared,
        "differences": len(tally.differences),
        "leaks": len(tally.leaks),
    }
    print(json.dumps(summary))
    return int(bool(tally.differences or tally.leaks))
