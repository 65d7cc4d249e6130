"""Pictures of simulated runs. matplotlib, which only they need, is imported when one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.config import ConfigError
from scheduler.simulate import SimulatedStep, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFILL, DECODE = "#e6a23c", "#2b6cb0"
BINS = 120
LARGEST_CURVE = 2000  # points; more are not seen


def check(path: str) -> None:
    """Raises ConfigError, before any work, when a picture cannot be drawn to `path`."""
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"plot must name a .png file, got {path!r}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {Path(path).absolute().parent}")
    _pyplot()


def draw(simulation: Simulation, title: str, path: str) -> None:
    """Tails of TTFT and TBT, and tokens a second over time. Raises ConfigError when it cannot be written."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    served = [outcome for outcome in simulation.outcomes if outcome.refusal is None]
    draw_tail(axes[0], [outcome.ttft for outcome in served], "TTFT", DECODE)
    draw_tail(axes[1], [gap for outcome in served for gap in outcome.gaps], "TBT", DECODE)
    for panel, name in zip(axes, ("time to first token", "time between tokens"), strict=False):
        panel.set_xlabel(f"{name}, ms")
        panel.set_ylabel("share that takes longer")
    draw_throughput(axes[2], simulation.steps)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def draw_tail(axes: Axes, seconds: np.ndarray | list[float], label: str, color: str) -> None:
    """The share of values that are longer, over their length in ms: one minus the cumulative distribution."""
    values = np.sort(np.asarray(seconds)) * 1e3
    if not len(values):
        return
    picked = np.unique(len(values) - np.geomspace(1, len(values), LARGEST_CURVE).astype(int))
    axes.plot(values[picked], 1 - picked / len(values), label=label, color=color, linewidth=1.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)


def draw_throughput(axes: Axes, steps: list[SimulatedStep]) -> None:
    """Prompt and output tokens a second, averaged over a BINS-th of the time each."""
    ends = [step.end for step in steps]
    edges = np.linspace(0, max(ends), BINS + 1)
    for label, color, weights in (
        ("prompt", PREFILL, [step.prefill_tokens for step in steps]),
        ("output", DECODE, [step.sampled for step in steps]),
    ):
        tokens, _ = np.histogram(ends, edges, weights=weights)
        axes.stairs(tokens / np.diff(edges), edges, label=label, color=color)
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def save(figure: Any, path: str) -> None:
    """Raises ConfigError."""
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    _pyplot().close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plot needs matplotlib: pip install 'quadriga[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
