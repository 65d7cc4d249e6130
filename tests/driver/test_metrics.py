"""Figures of the engine, as Prometheus, Grafana and `quadriga top` show them."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from driver import cli, top_frame
from driver.figures import Figures, Histogram
from driver.handle import Client
from driver.http_server import HttpServer, make_app
from driver.llm import LLM
from driver.metrics import exposition
from driver.wire import ServiceUnavailable
from tests.driver.serving import NUM_BLOCKS, Brake, Place, greedy_params, wait_until

DASHBOARD = Path(__file__).parents[2] / "docs" / "deploy" / "grafana.json"
SUFFIXES = ("_bucket", "_sum", "_count")


@pytest.fixture
def url(place: Place) -> Iterator[str]:
    server = HttpServer("127.0.0.1", 0)
    client = place.client()
    server.start(make_app(client, api_keys=["key"]))
    assert wait_until(lambda: client.connected)
    yield server.url
    server.close()


def scrape(url: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples by name and label values."""
    answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_figures_follow_what_happens(llm: LLM, place: Place, url: str) -> None:
    client = place.client()
    before = scrape(url)

    def grown(name: str, *labels: str) -> float:
        return scrape(url)[name][labels] - before[name].get(labels, 0)

    with Brake(llm, 6) as brake:
        stream = client.stream(list(range(40)), greedy_params(30, ignore_eos=True))
        next(stream)
        now = scrape(url)
        assert now["quadriga_up"][()] == 1
        assert now["quadriga_requests_running"][()] == 1
        assert now["quadriga_requests_waiting"][()] == 0
        assert now["quadriga_kv_usage_ratio"][()] == pytest.approx(1 - llm.stats()["kv_blocks_free"] / NUM_BLOCKS)
        assert now["quadriga_kv_usage_ratio"][()] > 0.1
        brake.allow(float("inf"))
        list(stream)
    assert grown("quadriga_tokens_total", "generated") == 30
    assert grown("quadriga_tokens_total", "prefill") == 40
    assert grown("quadriga_requests_total", "length") == 1
    for name, values in (
        ("quadriga_time_to_first_token_seconds", 1),
        ("quadriga_time_between_tokens_seconds", 29),
        ("quadriga_request_duration_seconds", 1),
    ):
        assert grown(f"{name}_count") == grown(f"{name}_bucket", "+Inf") == values
    assert grown("quadriga_step_duration_seconds_count") >= 30
    assert grown("quadriga_frames_total", "prefill") == 1
    assert grown("quadriga_frames_total", "decode") >= 29
    assert grown("quadriga_frame_bytes_total", "decode") > 29
    after = scrape(url)
    assert after["quadriga_step_budget_tokens"][()] >= after["quadriga_step_tokens"][()] >= 1
    assert after["quadriga_kv_usage_ratio"][()] == 0
    again = client.generate(list(range(40)), greedy_params(2))
    assert grown("quadriga_tokens_total", "cached") == again.cached_tokens > 0
    assert scrape(url)["quadriga_prefix_cache_hit_ratio"][()] > 0


def test_answers_are_counted_by_path_and_code(url: str) -> None:
    for path in ("/health", "/health", "/stats", "/no/such/path"):
        httpx.get(f"{url}{path}")
    counts = scrape(url)["quadriga_http_responses_total"]
    assert counts["200", "/health"] == 2
    assert counts["401", "/stats"] == 1
    assert counts["404", "other"] == 1


def test_a_service_that_does_not_answer_is_told_as_such() -> None:
    def nowhere() -> Any:
        raise ServiceUnavailable("gone")

    server = HttpServer("127.0.0.1", 0)
    with Client(nowhere) as client:
        server.start(make_app(client))
        found = scrape(server.url)
        server.close()
    assert found["quadriga_up"] == {(): 0.0}
    assert "quadriga_requests_running" not in found


def test_the_dashboard_shows_just_what_there_is(llm: LLM, place: Place, url: str) -> None:
    llm.generate(list(range(9)), greedy_params(3), use_tqdm=False)
    httpx.get(f"{url}/health")
    exported = {name for name in scrape(url) if not name.endswith("_created")}
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for one in expressions for name in re.findall(r"\bquadriga_\w+", one)}
    assert used <= exported, "the dashboard asks for what is not there"
    assert exported == used | {name for name in exported if name.startswith("quadriga_up")}
    labels = set(re.findall(r"by \(([^)]*)\)", " ".join(expressions)))
    assert {label for one in labels for label in one.split(", ")} == {"finish_reason", "path", "code", "kind", "le"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_histograms_count_and_interpolate() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value, times in ((0.5, 1), (1.0, 1), (1.5, 2), (3.0, 4), (9.0, 2)):
        histogram.add(value, times)
    found = histogram.snapshot()
    assert found == {"bounds": [1.0, 2.0, 4.0], "counts": [2, 2, 4, 2], "sum": 34.5 + 0.0}
    assert top_frame.quantile(found, None, 0.2) == 1.0
    assert top_frame.quantile(found, None, 0.3) == 1.5
    assert top_frame.quantile(found, None, 0.6) == 3.0
    assert top_frame.quantile(found, None, 0.99) == 4.0
    assert top_frame.quantile(found, found, 0.5) is None
    earlier = {**found, "counts": [2, 2, 2, 2]}
    assert top_frame.quantile(found, earlier, 0.5) == 3.0


def test_gaps_of_a_step_are_counted_together() -> None:
    figures = Figures()
    for _ in range(5):
        figures.told_token(0.5, 1.0, 1.004)  # four ms since the last
    figures.told_token(0.5, 0.0, 1.004)  # the first one
    figures.told_token(0.5, 0.9, 1.004)
    figures.told_step(1.004)
    found = figures.snapshot()
    tbt, ttft = found["histograms"]["tbt"], found["histograms"]["ttft"]
    assert tbt["counts"][tbt["bounds"].index(0.005)] == 5
    assert tbt["counts"][tbt["bounds"].index(0.15)] == 1
    assert sum(tbt["counts"]) == 6
    assert tbt["sum"] == pytest.approx(5 * 0.004 + 0.104)
    assert ttft["counts"][ttft["bounds"].index(1.0)] == 1
    assert found["generated_tokens"] == 7


def test_text_without_stats_is_valid() -> None:
    text = exposition(None, 3, CollectorRegistry()).decode()
    values = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert values == {"quadriga_up": 0.0, "quadriga_driver_restarts_total": 3.0}


# ---- quadriga top


def test_top_shows_a_frame_of_a_running_service(
    place: Place, url: str, capsys: pytest.CaptureFixture[str], process_state: None
) -> None:
    client, stop = place.client(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            client.generate(list(range(8)), greedy_params(20, ignore_eos=True))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(0.2)
        assert cli.main(["top", url, "--api-key", "key", "--once", "--interval", "0.5"]) == 0
    finally:
        stop.set()
        thread.join(30)
    shown = capsys.readouterr().out
    made = next(line for line in shown.splitlines() if "tokens made" in line)
    assert float(made.split("│")[2].replace(",", "")) > 10
    for word in ("running", "KV cache", "first token", "between tokens", f"of {NUM_BLOCKS} blocks", "length"):
        assert word in shown
    between = next(line for line in shown.splitlines() if "between tokens" in line)
    assert re.search(r"\d", between.split("│")[2]), "no latency"


def test_top_forgets_what_another_driver_counted(place: Place) -> None:
    def shown(before: dict[str, Any]) -> str:
        with open(os.devnull, "w") as nowhere:
            console = Console(record=True, width=100, file=nowhere)
            console.print(top_frame.frame(stats, before, 1.0))
        return next(line for line in console.export_text().splitlines() if "tokens made" in line)

    stats = {**place.service.stats(), "generated_tokens": 100, "uptime_s": 50.0}
    before = {**stats, "generated_tokens": 40}
    assert "60.0" in shown(before)
    assert "2.0" in shown({**before, "started_at": stats["started_at"] - 100, "generated_tokens": 10**9})


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (["http://127.0.0.1:1"], 1, "does not answer"),
        (["ftp//x"], 2, "is not where a service answers"),
        (["--interval", "0"], 2, "--interval must be between"),
    ],
)
def test_top_says_what_is_wrong(
    options: list[str], code: int, reason: str, capsys: pytest.CaptureFixture[str], process_state: None
) -> None:
    assert cli.main(["top", "--once", *options]) == code
    assert reason in capsys.readouterr().err


def test_top_needs_the_key(url: str, capsys: pytest.CaptureFixture[str], process_state: None) -> None:
    assert cli.main(["top", url, "--once"]) == 2
    assert "wants a valid --api-key" in capsys.readouterr().err
