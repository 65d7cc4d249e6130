"""What scripts/chaos.py has seen, as a picture and as its last line."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import dataclass, field


@dataclass
class Tally:
    """What was seen. arrivals: when tokens came, `time.monotonic()`; faults: (when, kind).

    refused: requests, in a crowd or while there was no driver. rss_mib: resident memory by role, before and after.
    """

    arrivals: list[float] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    compared: int = 0
    requests: int = 0
    refused: int = 0
    rss_mib: list[dict[str, int]] = field(default_factory=list)
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

    kinds = sorted({kind for _, kind in tally.faults})
    colors = dict(zip(kinds, map(plt.get_cmap("tab20"), range(len(kinds))), strict=True))
    seconds = ended - began
    unit, size = ("seconds", 1.0) if seconds < 600 else ("minutes", 60.0)
    bins = max(10, int(min(seconds, 360)))
    at = [(when - began) / size for when in tally.arrivals if when >= began]
    figure, (load, pauses) = plt.subplots(2, 1, figsize=(9, 5), sharex=True)
    load.hist(at, bins=bins, weights=[bins / seconds] * len(at), color="#2b6cb0")
    load.set_ylabel("tokens/s")
    for (when, kind), pause in zip(tally.faults, tally.pauses(ended), strict=True):
        pauses.plot([(when - began) / size] * 2, [0, pause], color=colors[kind], linewidth=1.5)
    for kind in kinds:
        pauses.plot([], [], color=colors[kind], label=kind)
    pauses.set_ylabel("longest pause\nafter a fault, s")
    pauses.set_xlabel(unit)
    pauses.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=9)
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
        "refused": tally.refused,
        "pause_s_p50": round(statistics.median(pauses), 2),
        "pause_s_p99": round(pauses[int(0.99 * (len(pauses) - 1))], 2),
        "pause_s_max": round(pauses[-1], 2),
        "pause_s_p50_by_kind": {kind: round(statistics.median(by_kind[kind]), 2) for kind in sorted(by_kind)},
        "rss_mib": tally.rss_mib,
        "tokens_compared": tally.compared,
        "differences": len(tally.differences),
        "leaks": len(tally.leaks),
    }
    print(json.dumps(summary))
    return int(bool(tally.differences or tally.leaks))
