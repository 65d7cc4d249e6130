"""What `quadriga serve` shows of its start where there is no terminal, as in a job's log."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from driver import serve


def test_phases_and_quarters_of_the_weights_are_lines_of_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starting: dict[str, Any] = {"state": "starting", "phase": "weights", "share": None}
    shares = [None, 0.0, 0.1, 0.3, 0.31, 0.8, 1.0]
    states = [{**starting, "share": share} for share in shares]
    states.append({"state": "ready", "seconds": {"weights": 1.5}})
    monkeypatch.setattr(serve, "POLL_SECONDS", 0.001)
    serve._show_start(iter(states).__next__, threading.Event())
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "quadriga: starting: weights …"
    assert lines[1:4] == ["quadriga: weights 30 %", "quadriga: weights 80 %", "quadriga: weights 100 %"]
    assert "weights 1.5 s" in lines[4]
