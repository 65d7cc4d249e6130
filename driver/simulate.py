"""`quadriga simulate`: the scheduler on a device that is only calculated, for planning past this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from driver import plots
from driver.config import ConfigError, EngineConfig
from driver.hardware import ACCELERATORS, DTYPE_BYTES, GB, Efficiency, Roofline, find_accelerator
from driver.options import add_scheduling_options, engine_options
from driver.setup import Model, read_model
from driver.workload import poisson, read_trace
from scheduler.blocks import BlockPool
from scheduler.budget import TokenBudget
from scheduler.limits import Limits
from scheduler.scheduler import Scheduler
from scheduler.simulate import Arrival, Outcome, Simulation, profiled

logger = logging.getLogger("quadriga.simulate")

PERCENTILES = (50, 90, 99)
DEFAULT_BLOCK = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    _add_load(parser)
    _add_machine(parser)
    add_scheduling_options(parser.add_argument_group("scheduling; what is said of cuda holds here"))
    parser.add_argument("--plot", metavar="FILE.png", help="draw TTFT, TBT and throughput over time")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace",
        metavar="FILE",
        help="JSON lines with arrival_s, prompt_tokens and output_tokens, or CSV with the header "
        "TIMESTAMP,ContextTokens,GeneratedTokens",
    )
    source.add_argument("--poisson", type=float, metavar="RATE", help="requests a second, arriving independently")
    group.add_argument(
        "--num-requests", type=int, metavar="N", help="how many; not given: the whole trace, or 1000 with --poisson"
    )
    group.add_argument("--prompt-tokens", type=float, default=1024, metavar="MEAN", help="of a prompt, with --poisson")
    group.add_argument("--output-tokens", type=float, default=256, metavar="MEAN", help="of an answer, with --poisson")
    group.add_argument(
        "--length-spread",
        type=float,
        default=0.8,
        metavar="SIGMA",
        help="standard deviation of the lengths' logarithm, with --poisson; 0 makes all alike",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of what --poisson draws")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    assumed = Efficiency()
    group = parser.add_argument_group("machine")
    names = ", ".join(accelerator.name for accelerator in ACCELERATORS)
    group.add_argument("--hardware", required=True, metavar="NAME", help=f"one of {names}")
    group.add_argument("--model", required=True, metavar="CONFIG", help="a config.json, or a folder that has one")
    group.add_argument("--tp", type=int, default=1, metavar="N", help="devices; need not divide the heads")
    group.add_argument("--dtype", choices=("auto", *DTYPE_BYTES), default="auto", help="auto: the model's own")
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=EngineConfig.__dataclass_fields__["gpu_memory_utilization"].default,
        metavar="F",
        help="share of each device's memory to use, (0, 1]",
    )
    for name, default, help_ in (
        ("--compute-efficiency", assumed.compute, "assumed share of the peak FLOP/s that is reached, (0, 1]"),
        ("--memory-efficiency", assumed.memory, "assumed share of the memory bandwidth, (0, 1]"),
        ("--link-efficiency", assumed.link, "assumed share of the link bandwidth, (0, 1]"),
        ("--all-reduce-us", assumed.all_reduce_seconds * 1e6, "assumed least time of an all-reduce, in microseconds"),
        ("--step-ms", assumed.step_seconds * 1e3, "assumed time of a step beside all that, in milliseconds"),
        ("--driver-ms", 1.0, "assumed time from planning a step to its start, in ms; hidden while another step runs"),
    ):
        group.add_argument(name, type=float, default=default, metavar="X", help=help_)


class Planned:
    """What is to be simulated: a configuration, its model on its devices, and the limits that follow.

    Raises ConfigError or UnsupportedModel.
    """

    def __init__(self, config: EngineConfig, hardware: str, efficiency: Efficiency | None = None) -> None:
        self.config = config
        self.block_size = config.block_size or DEFAULT_BLOCK
        device = find_accelerator(hardware)
        self.model: Model = read_model(config)
        self.limits: Limits = config.limits("cuda", self.model.max_model_len)
        self.roofline = Roofline(
            device, self.model.arch, config.tensor_parallel_size, self.model.dtype, efficiency or Efficiency()
        )
        self.num_blocks = self.roofline.num_blocks(
            self.limits, self.block_size, self.model.max_model_len, config.gpu_memory_utilization
        )

    def run(
        self, arrivals: Sequence[Arrival], driver_seconds: float = 1e-3, on_end: Callable[[], None] = lambda: None
    ) -> Simulation:
        """Simulates. Requests beyond the context length or the cache are refused, as the engine would."""
        step_seconds, target = self.roofline.step_seconds, self.config.target_tbt_ms
        budget = TokenBudget(
            self.limits.max_num_batched_tokens,
            None if target is None else target / 1000,
            None if target is None else profiled(step_seconds),
        )
        pool = BlockPool(self.num_blocks, self.block_size)
        scheduler = Scheduler(self.limits, pool, prefix_caching=False, budget=budget)
        simulation = Simulation(scheduler, step_seconds, self.config.async_depth, driver_seconds)
        longest = self.model.max_model_len
        fitting = [arrival for arrival in arrivals if arrival.prompt_tokens + arrival.output_tokens <= longest]
        simulation.run(fitting, on_end)
        for arrival in arrivals:
            size = arrival.prompt_tokens + arrival.output_tokens
            if size > longest:
                refusal = f"{size} tokens are more than the context length of {longest}"
                simulation.outcomes.append(Outcome(arrival, refusal=refusal))
        return simulation


def model_folder(model: str) -> str:
    """The folder of a --model, which nothing is downloaded for. Raises ConfigError."""
    try:
        path = Path(model).expanduser()
        folder = path.parent if path.name == "config.json" else path
        found = (folder / "config.json").is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{model!r} cannot be a model's path: {error}") from error
    if not found:
        raise ConfigError(f"model must be a config.json or a folder that has one, got {model!r}")
    return str(folder)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    if args.plot:
        plots.check(args.plot)
    if not 0 <= args.driver_ms <= 1e6:
        raise ConfigError(f"driver_ms must be between 0 and 1e6, got {args.driver_ms:g}")
    efficiency = Efficiency(
        compute=args.compute_efficiency,
        memory=args.memory_efficiency,
        link=args.link_efficiency,
        all_reduce_seconds=args.all_reduce_us / 1e6,
        step_seconds=args.step_ms / 1e3,
    )
    config = EngineConfig(**{**engine_options(args), "model": model_folder(args.model), "prefix_caching": False})
    planned = Planned(config, args.hardware, efficiency)
    arrivals = _arrivals(args)
    with tqdm(total=len(arrivals), unit="request", leave=False, disable=None) as bar:
        simulation = planned.run(arrivals, args.driver_ms / 1e3, bar.update)
    report = summarise(planned, simulation)
    print(json.dumps(report) if args.json else as_text(report))
    if args.plot:
        plots.draw(simulation, f"{_title(report)}: simulated", args.plot)
    return 0


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    if args.poisson is not None:
        count = 1000 if args.num_requests is None else args.num_requests
        return poisson(args.poisson, count, args.prompt_tokens, args.output_tokens, args.length_spread, args.seed)
    if args.num_requests is not None and args.num_requests < 1:
        raise ConfigError(f"num_requests must be at least 1, got {args.num_requests}")
    return read_trace(args.trace)[: args.num_requests]


def summarise(planned: Planned, simulation: Simulation) -> dict[str, Any]:
    """The figures of a run, as they are printed as JSON. Times in seconds, sizes in bytes.

    Raises ConfigError when no request at all was served.
    """
    outcomes, steps = simulation.outcomes, simulation.steps
    served = [outcome for outcome in outcomes if outcome.refusal is None]
    refusals = [outcome.refusal for outcome in outcomes if outcome.refusal is not None]
    if not served:
        raise ConfigError(f"none of the {len(outcomes)} requests can be served; the last one: {refusals[-1]}")
    if refusals:
        logger.warning("%d of %d requests are refused; the last one: %s", len(refusals), len(outcomes), refusals[-1])
    last_arrival = max(outcome.arrival.at for outcome in served)
    seconds = max(outcome.token_times[-1] for outcome in served)
    outputs = sum(len(outcome.token_times) for outcome in served)
    counters, roofline = simulation.scheduler.counters, planned.roofline
    return {
        "simulated": True,
        "hardware": roofline.device.name,
        "tp": roofline.size,
        "model": Path(planned.config.model).resolve().name,
        "dtype": planned.model.dtype,
        "weight_bytes": roofline.weight_bytes,
        "kv_blocks": planned.num_blocks,
        "block_size": planned.block_size,
        "limits": dataclasses.asdict(planned.limits),
        "target_tbt_ms": planned.config.target_tbt_ms,
        "requests": len(served),
        "refused": len(refusals),
        "seconds": seconds,
        "arriving_per_s": (len(served) - 1) / last_arrival if last_arrival else None,
        "requests_per_s": len(served) / seconds,
        "output_tokens_per_s": outputs / seconds,
        "prompt_tokens_per_s": sum(outcome.arrival.prompt_tokens for outcome in served) / seconds,
        "ttft_s": spread([outcome.ttft for outcome in served]),
        "tbt_s": spread([gap for outcome in served for gap in outcome.gaps]),
        "request_s": spread([outcome.token_times[-1] - outcome.arrival.at for outcome in served]),
        "steps": len(steps),
        "step_s": spread([step.end - step.start for step in steps]),
        "tokens_per_step": sum(step.work.tokens for step in steps) / len(steps),
        "busy": sum(step.end - step.start for step in steps) / seconds,
        "most_running": max(step.running for step in steps),
        "most_waiting": max(step.waiting for step in steps),
        "preemptions": counters.preemptions,
        "late_steps": counters.late_steps,
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None where there are no values."""
    if not values:
        return None
    points = zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    return {"mean": float(np.mean(values))} | {f"p{p}": float(v) for p, v in points} | {"max": float(np.max(values))}


def as_text(report: dict[str, Any]) -> str:
    """The report as a short table."""
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    lines = [f"{_title(report)}: simulated, not measured", f"{'':<12}" + "".join(f"{name:>10}" for name in columns)]
    for label, key, factor in (("TTFT, ms", "ttft_s", 1e3), ("TBT, ms", "tbt_s", 1e3), ("request, s", "request_s", 1)):
        values = report[key] or {}
        cells = [f"{values[name] * factor:,.1f}" if values else "-" for name in columns]
        lines.append(f"{label:<12}" + "".join(f"{cell:>10}" for cell in cells))
    arriving = "at once" if report["arriving_per_s"] is None else f"at {report['arriving_per_s'] * 60:,.0f}/min"
    cache_tokens = report["kv_blocks"] * report["block_size"]
    lines += [
        f"requests    {report['requests']:,} served, {report['refused']:,} refused; arriving {arriving}, "
        f"done at {report['requests_per_s'] * 60:,.0f}/min",
        f"throughput  {report['output_tokens_per_s']:,.0f} output tokens/s, "
        f"{report['prompt_tokens_per_s']:,.0f} prompt tokens/s, over {report['seconds']:,.1f} s",
        f"steps       {report['steps']:,} of {report['tokens_per_step']:,.0f} tokens on average; "
        f"device busy {report['busy']:.0%}; at most {report['most_running']:,} requests running, "
        f"{report['most_waiting']:,} waiting",
        f"memory      {report['weight_bytes'] / GB:,.1f} GB of weights on each device, KV cache of "
        f"{cache_tokens:,} tokens, {report['preemptions']:,} preemptions",
    ]
    if report["target_tbt_ms"] is not None:
        lines.append(
            f"target      TBT {report['target_tbt_ms']:g} ms; {report['late_steps']:,} steps could not hold it"
        )
    return "\n".join(lines)


def _title(report: dict[str, Any]) -> str:
    return f"{report['model']} in {report['dtype']} on {report['tp']} x {report['hardware']}"
