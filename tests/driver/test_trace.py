"""The step trace, and the picture drawn from it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from driver.config import ConfigError
from driver.llm import LLM
from scheduler.params import SamplingParams

PLOT = Path(__file__).parents[2] / "scripts" / "plot_steps.py"


def test_every_step_is_recorded_and_can_be_drawn(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "steps.jsonl"
    options = {"executor": "inline", "max_num_batched_tokens": 8, "num_kv_blocks": 32, "dtype": "float32"}
    with LLM(str(folder), trace_steps=str(trace), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        llm.generate([list(range(20)), [1, 2]], params, use_tqdm=False)
        stats = llm.stats()
    steps = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(stats["steps"]))
    assert sum(step["prefill_tokens"] for step in steps) == stats["prefill_tokens"] == 22
    assert sum(step["decode_tokens"] for step in steps) == stats["decode_tokens"] == 8
    assert [chunk[1:] for step in steps for chunk in step["chunks"] if chunk[0] == steps[0]["chunks"][0][0]][:3] == [
        [0, 8],
        [8, 8],
        [16, 4],
    ]
    assert all(step["published_s"] < step["done_s"] and step["worker_s"] > 0 for step in steps)

    picture = tmp_path / "steps.png"
    monkeypatch.setattr(sys, "argv", ["plot_steps.py", str(trace), "--out", str(picture)])
    runpy.run_path(str(PLOT), run_name="__main__")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_that_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the step trace .*nowhere"):
        LLM(str(folder), executor="inline", trace_steps=str(tmp_path / "nowhere" / "steps.jsonl"))


def test_a_trace_that_fills_the_disk_ends_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(folder), executor="inline", num_kv_blocks=32, trace_steps="/dev/full") as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        assert len(llm.generate([1, 2], params).output_token_ids) == 60
        assert llm.failure is None
    assert "the step trace /dev/full is not complete: [Errno 28]" in caplog.text
