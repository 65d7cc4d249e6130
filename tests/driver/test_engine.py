"""What the engine's thread makes of time that it did not live, and of faults in its wake."""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from driver import awake
from driver.engine import EngineDead, Update
from driver.executor import InlineExecutor, WorkerFailed
from tests.driver.serving import PROMPT, greedy_params, open_llm, wait_until


@pytest.fixture
def expected(folder: Path) -> list[int]:
    with open_llm(folder) as llm:
        return llm.generate(PROMPT, greedy_params(20)).output_token_ids


def test_a_driver_that_stood_still_does_not_take_that_for_a_step_that_hangs(
    folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awake, "LONGEST_GAP", 0.2)
    with open_llm(folder, hang_seconds=0.5, step_timeout_seconds=1.0) as llm:
        receive, stops = llm._engine.executor.receive, []

        def stopped(timeout_seconds: float | None) -> Any:
            if timeout_seconds is not None and len(stops) < 2:
                stops.append(time.sleep(1.5))  # as SIGSTOP and SIGCONT: this thread comes back late, with nothing
                return None
            return receive(timeout_seconds)

        llm._engine.executor.receive = stopped
        assert llm.generate(PROMPT, greedy_params(20)).output_token_ids == expected
        assert len(stops) == 2
        assert llm.stats()["restarts"] == 0


def test_a_hang_that_cannot_be_written_down_is_recovered_from_all_the_same(
    folder: Path, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with open_llm(folder, hang_seconds=0.2, step_timeout_seconds=0.4) as llm:
        worker, hung = llm._engine.executor._worker, []
        launch = worker._launch

        def hang_once(frame: bytes) -> Any:
            if not hung:
                hung.append(time.sleep(1.0))
            return launch(frame)

        worker._launch = hang_once
        assert llm.generate(PROMPT, greedy_params(20)).output_token_ids == expected
        assert hung
        assert llm.stats()["restarts"] == 1


def test_a_panic_in_a_library_is_told_to_all(folder: Path) -> None:
    class Panic(BaseException):
        """As those of Rust are: no Exception."""

    def panic(*_: object) -> NoReturn:
        raise Panic("index out of bounds")

    with open_llm(folder) as llm:
        request = llm.prepare(PROMPT, greedy_params(5))
        text, news = llm.text_stream(request), queue.SimpleQueue()
        text.push = panic
        llm.submit(request, news.put, text)
        update: Update = news.get(timeout=10)
        assert isinstance(update.error, EngineDead)
        assert "index out of bounds" in str(update.error)
        assert "index out of bounds" in str(llm.failure)


def test_closing_ends_a_recovery_before_its_ranks(folder: Path) -> None:
    llm = open_llm(folder)
    executor, order = llm._engine.executor, []
    given_up, recovering = threading.Event(), threading.Event()

    def recover() -> NoReturn:
        recovering.set()
        given_up.wait(20)
        order.append("recovery")
        raise WorkerFailed("given up")

    close = executor.close
    executor.recover, executor.give_up = recover, given_up.set
    executor.close = lambda: (order.append("ranks"), close())
    stream = llm.stream(PROMPT, greedy_params(200))
    next(stream)
    executor._news.put(RuntimeError("a rank is lost"))
    assert recovering.wait(10)
    began = time.monotonic()
    llm.close()
    assert time.monotonic() - began < 10
    assert order == ["recovery", "ranks"]
    with pytest.raises(EngineDead, match="closed"):
        list(stream)
    assert wait_until(lambda: not llm._engine._thread.is_alive())


def test_a_rank_that_is_lost_while_the_steps_are_profiled_costs_another_attempt(
    folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUADRIGA_FAULT", "0:3:raise")
    with open_llm(folder, target_tbt_ms=500.0) as llm:
        assert "epoch 0 has ended: rank 0 failed: InjectedFault" in caplog.text
        assert llm._engine.scheduler.epoch == 2
        assert llm.generate(PROMPT, greedy_params(20)).output_token_ids == expected
        assert llm.stats()["restarts"] == 0


def test_a_step_of_the_profile_that_hangs_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InlineExecutor, "receive", lambda executor, seconds: time.sleep(seconds))
    monkeypatch.setattr(InlineExecutor, "stacks", lambda executor: [None])
    with pytest.raises(WorkerFailed, match=r"step 0 of the profile took longer than 0\.\d s"):
        open_llm(folder, target_tbt_ms=500.0, hang_seconds=0.3)
