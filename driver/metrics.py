"""A service's figures as Prometheus reads them; every name says its unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Values = Mapping[tuple[str, ...], float]

HISTOGRAMS = {
    "ttft": ("quadriga_time_to_first_token_seconds", "From a request's arrival to its first token."),
    "tbt": ("quadriga_time_between_tokens_seconds", "Between two tokens of one request."),
    "whole": ("quadriga_request_duration_seconds", "From a request's arrival to its end."),
    "step": ("quadriga_step_duration_seconds", "From when the workers could begin a step to its result."),
}


def exposition(stats: Mapping[str, Any] | None, restarts: int, own: CollectorRegistry) -> bytes:
    """The text of /metrics.

    stats: what the service says of itself, None where it does not answer. restarts: of its driver. own: what the HTTP
    server counts itself.
    """
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats, restarts))
    return generate_latest(registry) + generate_latest(own)


class _Snapshot(Collector):
    """Figures of one moment."""

    def __init__(self, stats: Mapping[str, Any] | None, restarts: int) -> None:
        self._stats, self._restarts = stats, restarts

    def collect(self) -> Iterator[Family]:
        yield _gauge("quadriga_up", "Whether the driver answers.", {(): float(self._stats is not None)})
        yield _counter("quadriga_driver_restarts", "Drivers that took another's place.", {(): self._restarts})
        if self._stats is not None:
            yield from families(self._stats)


def families(stats: Mapping[str, Any]) -> Iterator[Family]:
    """Of Service.stats."""
    used = stats["kv_blocks"] - stats["kv_blocks_free"]
    looked_up = stats["prefill_tokens"] + stats["cached_tokens"]
    yield _gauge("quadriga_driver_start_time_seconds", "When the driver started, Unix time.", {(): stats["started_at"]})
    yield _gauge("quadriga_requests_running", "Requests that hold KV blocks.", {(): stats["running"]})
    yield _gauge("quadriga_requests_waiting", "Requests that wait for their start.", {(): stats["waiting"]})
    ended = {(reason,): count for reason, count in stats["ended_requests"].items()}
    yield _counter("quadriga_requests", "Requests that have ended.", ended, ["finish_reason"])
    kinds = {
        ("prefill",): stats["prefill_tokens"],
        ("cached",): stats["cached_tokens"],
        ("generated",): stats["generated_tokens"],
        ("discarded",): stats["discarded_tokens"],
    }
    yield _counter("quadriga_tokens", "Tokens computed, found in the prefix cache, made, thrown away.", kinds, ["kind"])
    yield _gauge("quadriga_kv_blocks", "KV blocks that there are.", {(): stats["kv_blocks"]})
    yield _gauge("quadriga_kv_usage_ratio", "Share of KV blocks held by requests.", {(): used / stats["kv_blocks"]})
    ratio = stats["cached_tokens"] / looked_up if looked_up else 0.0
    yield _gauge("quadriga_prefix_cache_hit_ratio", "Share of prompt tokens found in the cache so far.", {(): ratio})
    yield _counter("quadriga_preemptions", "Requests whose blocks were taken for others.", {(): stats["preemptions"]})
    yield _counter("quadriga_epoch_restarts", "Losses of ranks that requests survived.", {(): stats["restarts"]})
    help_ = "What these losses took, from notice to the next step."
    yield _counter("quadriga_epoch_restart_seconds", help_, {(): stats["restart_seconds"]})
    yield _counter("quadriga_not_finite_requests", "Failed by logits that are no numbers.", {(): stats["not_finite"]})
    yield _counter("quadriga_late_steps", "Steps whose decodes took all of the target TBT.", {(): stats["late_steps"]})
    yield _gauge("quadriga_step_budget_tokens", "Tokens that the newest step could have.", {(): stats["step_budget"]})
    yield _gauge("quadriga_step_tokens", "Tokens that the newest step had.", {(): stats["step_tokens"]})
    frames = {(kind,): stats[f"{kind}_frames"] for kind in ("prefill", "decode")}
    sizes = {(kind,): stats[f"{kind}_bytes"] for kind in ("prefill", "decode")}
    yield _counter("quadriga_frames", "Step plans sent, with and without prefill.", frames, ["kind"])
    yield _counter("quadriga_frame_bytes", "Bytes of these plans.", sizes, ["kind"])
    for key, (name, help_) in HISTOGRAMS.items():
        yield _histogram(name, help_, stats["histograms"][key])


def _gauge(name: str, help_: str, values: Values) -> GaugeMetricFamily:
    return _filled(GaugeMetricFamily(name, help_, labels=[]), values)


def _counter(name: str, help_: str, values: Values, labels: Iterable[str] = ()) -> CounterMetricFamily:
    return _filled(CounterMetricFamily(name, help_, labels=list(labels)), values)


def _filled(family: Any, values: Values) -> Any:
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family


def _histogram(name: str, help_: str, found: Mapping[str, Any]) -> HistogramMetricFamily:
    bounds = [*map(str, found["bounds"]), "+Inf"]
    buckets = list(zip(bounds, accumulate(found["counts"]), strict=True))
    return HistogramMetricFamily(name, help_, buckets=buckets, sum_value=found["sum"])
