"""Two minutes of everything that can break, beside which nothing may be lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.end_to_end.clusters import ROOT


@pytest.mark.timeout(900)
def test_two_minutes_of_chaos_lose_nothing_and_leave_nothing() -> None:
    command = [sys.executable, "scripts/chaos.py", "--minutes", "2", "--tp", "3", "--seed", "11"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    summary = json.loads(run.stdout.splitlines()[-1])
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert (summary["differences"], summary["leaks"]) == (0, 0)
    assert summary["faults"] >= 5
    assert summary["tokens_compared"] > 1000
