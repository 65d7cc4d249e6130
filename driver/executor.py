"""How the engine reaches its workers. It cannot tell the kinds apart."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from driver.config import ConfigError
from scheduler.frame import StepResult, decode_result
from workers.spec import WorkerReady, WorkerSpec

if TYPE_CHECKING:
    from workers.worker import Worker

logger = logging.getLogger("quadriga.worker")

LEAVE_SECONDS = 3.0  # what a thread gets to end when its epoch is over
CLOSE_SECONDS = 60.0  # and when all is over

OnShare = Callable[[float], None]


def ignore_share(share: float) -> None:
    """For those who show no progress."""


class WorkerFailed(RuntimeError):
    """A rank died, raised or fell silent; the message names rank and cause."""


class Executor(Protocol):
    """Runs the ranks. `start` first, `close` last; `publish` and `receive` belong to the engine's thread.

    device: `cpu` or `cuda`, known before `start`.
    """

    device: str

    def start(self, specs: Sequence[WorkerSpec], on_share: OnShare = ignore_share) -> list[WorkerReady]:
        """Brings up one rank per spec; on_share is told how much of the weights is loaded, in [0, 1].

        Raises the worker's own error when one cannot start.
        """

    def publish(self, frame: bytes) -> None:
        """Sends a plan to every rank without waiting. Raises WorkerFailed when a rank is gone."""

    def receive(self, timeout_seconds: float | None) -> StepResult | None:
        """The next result, or None when woken or when time is up. Raises WorkerFailed when a rank has failed."""

    def recover(self) -> list[WorkerReady]:
        """Ends the epoch and brings all ranks up for the next one, those that are whole with the weights they have.

        Raises WorkerFailed when they cannot be had.
        """

    def give_up(self) -> None:
        """Makes a `recover` raise WorkerFailed soon, also one that comes later. May be called from any thread."""

    def stacks(self) -> list[str | None]:
        """What the threads of each rank are doing; None for one that does not answer."""

    def wake(self) -> None:
        """Makes `receive` return. May be called from any thread."""

    def close(self) -> None:
        """Ends every rank. May be called twice."""


class InlineExecutor:
    """The one worker in a thread of this process: no Ray, no sockets."""

    def __init__(self, device: str) -> None:
        """device: as in EngineConfig. Raises ConfigError when it cannot be had."""
        self.device = _pick_device(device)
        self._plans: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._worker: Worker | None = None

    def start(self, specs: Sequence[WorkerSpec], on_share: OnShare = ignore_share) -> list[WorkerReady]:
        from workers.worker import Worker

        (spec,) = specs
        self._worker = Worker(spec)
        ready = self._worker.start(None, "127.0.0.1", ranks_here=1, on_share=on_share)
        self._begin_serving()
        return [ready]

    def recover(self) -> list[WorkerReady]:
        self._plans.put(None)
        self._thread.join(timeout=LEAVE_SECONDS)
        if self._thread.is_alive():
            raise WorkerFailed("rank 0 hangs, and a thread of this process cannot be ended")
        self._plans, self._news = queue.SimpleQueue(), queue.SimpleQueue()
        self._begin_serving()
        return [self._worker.ready]

    def give_up(self) -> None:
        return  # it takes LEAVE_SECONDS at most

    def stacks(self) -> list[str | None]:
        return ["a thread of the driver"]

    def publish(self, frame: bytes) -> None:
        self._plans.put(frame)

    def receive(self, timeout_seconds: float | None) -> StepResult | None:
        try:
            news = self._news.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if isinstance(news, BaseException):
            raise WorkerFailed(f"rank 0 failed: {type(news).__name__}: {news}") from news
        return None if news is None else decode_result(news)

    def wake(self) -> None:
        self._news.put(None)

    def close(self) -> None:
        if self._thread is not None:
            self._plans.put(None)
            self._thread.join(timeout=CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.error("the worker has not ended its step within %g s; its thread is left behind", CLOSE_SECONDS)
            self._thread = None

    def _begin_serving(self) -> None:
        channel = _InlineChannel(self._plans, self._news)
        self._thread = threading.Thread(target=self._serve, args=(channel,), name="quadriga-worker", daemon=True)
        self._thread.start()

    def _serve(self, channel: _InlineChannel) -> None:
        from parallel.channel import ChannelClosed

        try:
            self._worker.serve(channel)
        except ChannelClosed:
            return
        except BaseException as error:  # noqa: BLE001 handed to the engine, which raises it
            channel.fail(error)


class _InlineChannel:
    """The worker's end of the two queues."""

    def __init__(self, plans: queue.SimpleQueue, news: queue.SimpleQueue) -> None:
        self._plans, self._news = plans, news

    def receive(self, timeout_seconds: float | None) -> bytes | None:
        from parallel.channel import ChannelClosed

        try:
            frame = self._plans.get(block=timeout_seconds != 0, timeout=timeout_seconds or None)
        except queue.Empty:
            return None
        if frame is None:
            raise ChannelClosed("the engine has closed the channel", farewell=True)
        return frame

    def send(self, kind: bytes, body: bytes) -> None:
        self._news.put(body)

    def fail(self, error: BaseException) -> None:
        self._news.put(error)


def _pick_device(wanted: str) -> str:
    """`cpu` or `cuda`: the wanted device, or for `auto` what there is."""
    import torch  # the one place where the driver's process needs it

    if wanted != "cpu" and torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise ConfigError(f"device cuda was asked for, but torch {torch.__version__} finds no usable GPU here")
    return "cpu"
