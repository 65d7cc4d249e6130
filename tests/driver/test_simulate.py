"""`quadriga simulate`: loads, reports, pictures and refusals."""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from driver import cli
from driver.workload import poisson
from tests.driver.conftest import Outcome

ROOT = Path(__file__).parents[2]
LLAMA, YI = (str(ROOT / "docs" / "models" / name) for name in ("llama-3.1-70b", "yi-34b-200k"))
H100 = ("--hardware", "h100", "--tp", "8", "--model", LLAMA, "--max-model-len", "8192")
POISSON = ("--poisson", "5", "--num-requests", "60", "--output-tokens", "40")
REQUESTS = [(0.0, 700, 12), (0.25, 3000, 5), (1.5, 10, 30)]

Simulate = Callable[..., Outcome]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """Runs `quadriga simulate` in this process, which it leaves as it was."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    monkeypatch.setitem(os.environ, "TOKENIZERS_PARALLELISM", "false")

    def simulate(*options: str) -> Outcome:
        try:
            code = cli.main(["simulate", *options])
        except SystemExit as exit_:  # argparse
            code = exit_.code
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return simulate


def write_jsonl(path: Path, requests: list[tuple[float, int, int]]) -> str:
    names = ("arrival_s", "prompt_tokens", "output_tokens")
    path.write_text("".join(json.dumps(dict(zip(names, request, strict=True))) + "\n" for request in requests))
    return str(path)


def write_csv(path: Path, rows: list[str]) -> str:
    path.write_text("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return str(path)


# ---- loads


def test_json_lines_and_both_forms_of_the_azure_csv_agree(simulate: Simulate, tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "t.jsonl", REQUESTS)
    old = [
        "2023-11-16 18:15:46.6805900,700,12",
        "2023-11-16 18:15:46.9305900,3000,5",
        "2023-11-16 18:15:48.18059,10,30",
    ]
    new = [
        "2024-05-10 23:59:59+00:00,700,12",
        "2024-05-11 01:59:59.25+02:00,3000,5",
        "2024-05-11 00:00:00.500000Z,10,30",
    ]
    traces = [lines, write_csv(tmp_path / "old.csv", old), write_csv(tmp_path / "new.csv", new)]
    reports = [simulate("--trace", trace, *H100, "--json").objects[0] for trace in traces]
    assert reports[0]["requests"] == 3
    assert reports[0]["ttft_s"]["max"] > reports[0]["ttft_s"]["p50"] > 0
    for report in reports[1:]:
        for key in ("ttft_s", "tbt_s", "request_s", "step_s"):
            assert report[key] == pytest.approx(reports[0][key], abs=2e-6)


def test_a_trace_is_sorted_shifted_and_cut(simulate: Simulate, tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a", REQUESTS[:2])
    moved = write_jsonl(tmp_path / "b", [(at + 1024, *sizes) for at, *sizes in reversed(REQUESTS)])
    reports = [simulate("--trace", path, "--num-requests", "2", *H100, "--json").objects for path in (plain, moved)]
    assert reports[0] == reports[1]
    assert reports[0][0]["requests"] == 2


def test_poisson_draws_what_is_asked_and_the_same_again() -> None:
    arrivals = poisson(20.0, 20_000, 500, 100, 0.8, seed=3)
    assert arrivals == poisson(20.0, 20_000, 500, 100, 0.8, seed=3) != poisson(20.0, 20_000, 500, 100, 0.8, seed=4)
    assert arrivals[0].at == 0
    assert len(arrivals) / arrivals[-1].at == pytest.approx(20, rel=0.03)
    assert sum(a.prompt_tokens for a in arrivals) / len(arrivals) == pytest.approx(500, rel=0.03)
    assert sum(a.output_tokens for a in arrivals) / len(arrivals) == pytest.approx(100, rel=0.03)
    assert {(a.prompt_tokens, a.output_tokens) for a in poisson(1.0, 50, 500, 100, 0.0, seed=0)} == {(500, 100)}


# ---- reports


def test_the_report_adds_up(simulate: Simulate) -> None:
    outcome = simulate(*POISSON, *H100, "--length-spread", "0", "--json")
    assert outcome.code == 0
    (report,) = outcome.objects
    assert report["simulated"] is True
    assert (report["hardware"], report["tp"], report["model"]) == ("h100", 8, "llama-3.1-70b")
    assert (report["requests"], report["refused"]) == (60, 0)
    assert report["output_tokens_per_s"] * report["seconds"] == pytest.approx(60 * 40)
    assert report["prompt_tokens_per_s"] * report["seconds"] == pytest.approx(60 * 1024)
    # One of a request's 40 tokens comes out of its last chunk, the others out of decodes.
    assert report["tokens_per_step"] * report["steps"] == pytest.approx(60 * (1024 + 39))
    assert 0 < report["busy"] <= 1
    for key in ("ttft_s", "tbt_s", "request_s"):
        values = report[key]
        assert 0 < values["p50"] <= values["p90"] <= values["p99"] <= values["max"]
    assert report["request_s"]["mean"] == pytest.approx(report["ttft_s"]["mean"] + 39 * report["tbt_s"]["mean"])


def test_the_table_has_the_same_figures(simulate: Simulate) -> None:
    (report,) = simulate(*POISSON, *H100, "--json").objects
    outcome = simulate(*POISSON, *H100)
    assert outcome.code == 0
    assert "simulated, not measured" in outcome.out
    for label, key in (("TTFT, ms", "ttft_s"), ("TBT, ms", "tbt_s")):
        (line,) = [line for line in outcome.out.splitlines() if line.startswith(label)]
        assert f"{report[key]['p99'] * 1e3:,.1f}" in line.split()


def test_a_single_token_has_no_time_between_tokens(simulate: Simulate, tmp_path: Path) -> None:
    trace = write_jsonl(tmp_path / "t", [(0, 5, 1)])
    assert simulate("--trace", trace, *H100, "--json").objects[0]["tbt_s"] is None
    assert simulate("--trace", trace, *H100).code == 0


def test_a_config_file_is_as_good_as_its_folder(simulate: Simulate) -> None:
    folder = simulate(*POISSON, *H100, "--json").out
    file = simulate(*POISSON, *H100, "--model", f"{LLAMA}/config.json", "--json").out
    assert folder == file


def test_chunks_keep_the_tail_short_and_whole_prompts_do_not(simulate: Simulate) -> None:
    load = ("--poisson", "0.4", "--num-requests", "60", "--prompt-tokens", "5000", "--output-tokens", "100")
    yi = ("--hardware", "a100-80g", "--tp", "2", "--model", YI, "--max-model-len", "16384", "--length-spread", "0.4")
    chunked, whole, held = (
        simulate(*load, *yi, *options, "--json").objects[0]
        for options in (["--max-num-batched-tokens", "512"], ["--no-chunked-prefill"], ["--target-tbt-ms", "90"])
    )
    assert chunked["tbt_s"]["p99"] < 0.3 * whole["tbt_s"]["p99"]
    assert whole["limits"]["max_num_batched_tokens"] == 16384
    assert held["limits"]["max_num_batched_tokens"] == 8192
    assert held["tbt_s"]["p99"] < 0.09 * 1.1
    assert held["tbt_s"]["max"] < 0.09 * 1.3


def test_more_devices_are_faster_and_the_driver_is_hidden_at_depth_two(simulate: Simulate) -> None:
    def mean_tbt(*options: str) -> float:
        return simulate(*POISSON, *H100, *options, "--json").objects[0]["tbt_s"]["mean"]

    assert mean_tbt() < mean_tbt("--tp", "4")
    assert mean_tbt("--tp", "6") < mean_tbt("--tp", "4")  # 8 KV heads do not divide by 6
    # A slower driver costs a step each time without asynchronous steps, and next to nothing with them.
    slow = ("--driver-ms", "5")
    assert mean_tbt(*slow, "--async-depth", "1") > mean_tbt("--async-depth", "1") + 0.0035
    assert mean_tbt(*slow) < mean_tbt() + 0.001


# ---- pictures


def test_the_plot_is_a_png(simulate: Simulate, tmp_path: Path) -> None:
    picture = tmp_path / "run.png"
    assert simulate(*POISSON, *H100, "--plot", str(picture)).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_any_work(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = simulate(*POISSON, *H100, "--plot", str(tmp_path / "run.png"))
    assert (outcome.code, outcome.out) == (2, "")
    assert "quadriga[plots]" in outcome.err
    assert simulate(*POISSON, *H100).code == 0


def test_the_committed_plot_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "stalls.png"
    monkeypatch.setattr(sys, "argv", ["plot_stalls.py", "--num-requests", "20", "--out", str(picture)])
    runpy.run_path(str(ROOT / "scripts" / "plot_stalls.py"), run_name="__main__")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("simulated, not measured") == 3


# ---- what is refused


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\nno\n', ["line 2 is not JSON"]),
        ('\n{"arrival_s": 0, "prompt_tokens": 1}\n', ["line 2 must be an object with", '{"arrival_s": 0, "prompt_t']),
        ("[1, 2, 3]", ["line 1 must be an object", "[1, 2, 3]"]),
        ('{"arrival_s": 0, "prompt_tokens": -3, "output_tokens": 1}', ["line 1: prompt_tokens", "got -3"]),
        ('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 0}', ["line 1: output_tokens", "got 0"]),
        ('{"arrival_s": 0, "prompt_tokens": 2.5, "output_tokens": 1}', ["line 1: prompt_tokens", "got 2.5"]),
        ('{"arrival_s": 0, "prompt_tokens": true, "output_tokens": 1}', ["line 1: prompt_tokens", "got True"]),
        ('{"arrival_s": "x", "prompt_tokens": 1, "output_tokens": 1}', ["line 1: arrival_s", "'x'"]),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', ["line 1: arrival_s", "nan"]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,5\n", ["line 2 must have 3 cells"]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n\nyesterday,5,6\n", ["line 3: TIMESTAMP", "'yesterday'"]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,5,-6\n", ["line 2: GeneratedTokens", "-6"]),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,five,6\n",
            ["line 2: ContextTokens", "'five'"],
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", ["holds no requests"]),
        ("", ["holds no requests"]),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(
    simulate: Simulate, tmp_path: Path, content: str, parts: list[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    outcome = simulate("--trace", str(path), *H100)
    assert (outcome.code, outcome.out) == (2, "")
    for part in [str(path), *parts]:
        assert part in outcome.err


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ([*POISSON, "--hardware", "tpu"], ["a100-80g, h100, h200", "'tpu'"]),
        ([*POISSON, "--tp", "1"], ["h100 has 80 GB", "141.1 GB", "larger tp"]),
        ([*POISSON, "--tp", "65"], ["size 65", "64 query heads"]),
        ([*POISSON, "--tp", "0"], ["tensor_parallel_size", "got 0"]),
        ([*POISSON, "--model", "nowhere"], ["config.json", "'nowhere'"]),
        ([*POISSON, "--model", str(ROOT / "README.md")], ["config.json", "README.md"]),
        ([*POISSON, "--max-model-len", "131073"], ["max_model_len 131073", "131072 positions"]),
        ([*POISSON, "--no-chunked-prefill", "--max-num-batched-tokens", "4096"], ["4096 is less", "8192"]),
        ([*POISSON, "--no-chunked-prefill", "--target-tbt-ms", "50"], ["target_tbt_ms 50 needs chunked prefill"]),
        ([*POISSON, "--target-tbt-ms", "-1"], ["target_tbt_ms", "got -1.0"]),
        ([*POISSON, "--async-depth", "3"], ["async_depth", "got 3"]),
        ([*POISSON, "--compute-efficiency", "1.2"], ["compute efficiency must be in (0, 1], got 1.2"]),
        ([*POISSON, "--driver-ms", "nan"], ["driver_ms", "got nan"]),
        ([*POISSON, "--plot", "run.pdf"], [".png", "'run.pdf'"]),
        ([*POISSON, "--plot", "/nowhere/run.png"], ["there is no folder /nowhere"]),
        ([*POISSON, "--prompt-tokens", "20000", "--length-spread", "0"], ["none of the 60", "20040", "8192"]),
        (["--poisson", "0"], ["poisson must be between", "got 0.0"]),
        (["--poisson", "nan"], ["poisson must be between", "got nan"]),
        (["--poisson", "1", "--num-requests", "-1"], ["num_requests", "got -1"]),
        (["--poisson", "1", "--output-tokens", "0.5"], ["output_tokens", "got 0.5"]),
        (["--poisson", "1", "--seed", "-1"], ["seed", "got -1"]),
        (["--trace", "/nowhere/trace"], ["cannot read the trace /nowhere/trace"]),
        (["--trace", "a", "--poisson", "1"], ["not allowed with"]),
        ([], ["--trace", "--poisson", "required"]),
    ],
    ids=lambda value: " ".join(value)[-40:],
)
def test_what_cannot_be_had_is_refused_with_value_and_limit(
    simulate: Simulate, options: list[str], parts: list[str]
) -> None:
    outcome = simulate(*H100, *options)
    assert (outcome.code, outcome.out) == (2, "")
    for part in parts:
        assert part in outcome.err


def test_requests_beyond_the_context_are_counted_and_the_others_served(
    simulate: Simulate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = write_jsonl(tmp_path / "t", [(0, 100, 5), (0, 8190, 3), (1, 8190, 2)])
    outcome = simulate("--trace", trace, *H100, "--json")
    assert outcome.code == 0
    assert (outcome.objects[0]["requests"], outcome.objects[0]["refused"]) == (2, 1)
    assert "1 of 3 requests are refused; the last one: 8193 tokens" in caplog.text
