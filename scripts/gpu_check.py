#!/usr/bin/env python3
"""Checks the CUDA path and measures it, with tiny random models made on the spot. See gpu_check.sh.

    backends    every backend that this machine has, against `reference`, over ragged batches in poisoned caches
    tokens      a whole engine's tokens on the GPU against the CPU's, in fp32, and against `reference` in bf16
    graphs      replayed steps against launched ones
    linears     products with weights in int4, int8 and fp8 against those with the numbers that they stand for
    shards      two ranks on this one GPU over Gloo against one rank
    timings     decode steps and prefill of a Llama-3-8B-shaped model beside the roofline of what the GPU was seen to
                do, and mixed steps with one call of the attention backend and with two
    serving     the same model under mixed load with and without chunked prefill: time between tokens, and how much of
                a step is the device's and how much the host's
    peers       sums of two processes on this one GPU through symmetric memory

Each part is carried out even if another failed; exit code 1 when one did. Nothing that did not run counts as passed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_check_missing import do_without

MISSING = do_without()  # before anything of ours is imported

from scripts import gpu_check_parts as parts  # noqa: E402
from scripts.gpu_check_linears import check_linears  # noqa: E402
from scripts.gpu_check_peers import check_peers  # noqa: E402
from scripts.gpu_check_serving import serve  # noqa: E402
from scripts.gpu_check_timings import measure  # noqa: E402

LIMIT_SECONDS = 8 * 60


@dataclass(frozen=True)
class Settings:
    """device: where to run. full: the sizes for a GPU; otherwise those of the reduced form."""

    device: torch.device
    full: bool


PARTS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "backends": parts.check_backends,
    "tokens": parts.check_tokens,
    "graphs": parts.check_graphs,
    "linears": check_linears,
    "shards": parts.check_shards,
    "timings": measure,
    "serving": serve,
    "peers": check_peers,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the reduced form: no GPU, stand-ins for its kernels")
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-check"), help="folder for the results")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="some of the parts")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; --cpu runs the reduced form", file=sys.stderr)
        return 2
    settings = Settings(torch.device("cpu") if args.cpu else torch.device("cuda", 0), not args.cpu)
    report: dict[str, Any] = {"machine": machine(settings), "parts": {}}
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for name in args.only:
        report["parts"][name] = run_part(name, settings, LIMIT_SECONDS - (time.perf_counter() - began))
        (out / "gpu_check.json").write_text(json.dumps(report, indent=1, default=str) + "\n")
    draw(report, out)
    failed = [name for name, part in report["parts"].items() if part["status"] != "passed"]
    print(f"gpu_check: {'all parts passed' if not failed else 'not passed: ' + ', '.join(failed)}; see {out}")
    return 1 if failed else 0


def run_part(name: str, settings: Settings, seconds_left: float) -> dict[str, Any]:
    if seconds_left < 20:
        return {"status": "skipped", "reason": f"{seconds_left:.0f} of {LIMIT_SECONDS} s were left"}
    began = time.perf_counter()
    try:
        with torch.inference_mode():
            found = PARTS[name](settings)
        result = {"status": "failed" if found.get("problems") else "passed", **found}
    except Exception:  # noqa: BLE001 - the other parts are to run whatever went wrong in this one
        result = {"status": "failed", "problems": [traceback.format_exc()]}
    result["seconds"] = round(time.perf_counter() - began, 1)
    print(f"{name}: {result['status']} in {result['seconds']} s")
    for problem in result.get("problems", []):
        print(f"  {problem}")
    return result


def machine(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": str(settings.device),
    }
    found["missing"] = MISSING
    if settings.device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return found


def draw(report: dict[str, Any], out: Path) -> None:
    """Measured beside the roofline, where there are timings and matplotlib."""
    timings = report["parts"].get("timings", {})
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    draw_serving(report["parts"].get("serving", {}).get("gaps_ms", {}), out, plt)
    for name, unit in (("decode", "ms per step"), ("prefill", "tokens/s")):
        rows = timings.get(name, [])
        if not rows:
            continue
        figure, axes = plt.subplots(figsize=(7, 4))
        places = range(len(rows))
        axes.bar([place - 0.2 for place in places], [row["measured"] for row in rows], 0.4, label="measured")
        axes.bar([place + 0.2 for place in places], [row["roofline"] for row in rows], 0.4, label="roofline")
        axes.set_xticks(list(places), [row["name"] for row in rows], rotation=30, ha="right")
        axes.set_ylabel(unit)
        axes.legend()
        figure.tight_layout()
        figure.savefig(out / f"gpu_check_{name}.png", dpi=120)
        plt.close(figure)


def draw_serving(gaps: dict[str, list[float]], out: Path, plt: Any) -> None:
    """How large the gaps between a stream's tokens were, with and without chunked prefill."""
    if not gaps:
        return
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, values in gaps.items():
        ordered = sorted(values)
        axes.plot(ordered, [(at + 1) / len(ordered) for at in range(len(ordered))], label=name)
    axes.set_xscale("log")
    axes.set_xlabel("time between tokens, ms")
    axes.set_ylabel("share of tokens")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "gpu_check_serving.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
