"""Workers as Ray actors, and the step channel to them; an epoch ends when one of them is lost, and the next begins."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from driver.cluster import Cluster, describe_nodes
from driver.config import ConfigError
from driver.errors import end_anyway
from driver.executor import OnShare, WorkerFailed, ignore_share
from driver.ranks import BLAME_SECONDS, RankDied, Ranks, first_lines
from parallel.channel import ChannelClosed, DriverChannel
from scheduler.frame import StepResult, decode_result
from workers.spec import WorkerReady, WorkerSpec

logger = logging.getLogger("quadriga.ray")

ATTEMPTS = 3  # to bring the ranks up, when some are lost meanwhile
CONNECT_SECONDS = 30.0
STACKS_SECONDS = 2.0


class RayExecutor:
    """Joins or starts a Ray cluster when made; `close` undoes what it started and nothing else."""

    def __init__(
        self, address: str, device: str, size: int, timeout_seconds: float, service_name: str | None = None
    ) -> None:
        """address, device, service_name: as in EngineConfig. Raises ConfigError when they cannot be had."""
        self._group_name = f"quadriga-{service_name}" if service_name else ""
        self._timeout = timeout_seconds
        self._cluster = Cluster(address, size)
        try:
            self.device = _pick_device(device, size)
        except BaseException:
            end_anyway("Ray", self._cluster.close)
            raise
        self.ranks: Ranks | None = None
        self._channel: DriverChannel | None = None
        self._failure: WorkerFailed | None = None
        self._failed = threading.Event()
        self._epoch_over = threading.Event()
        self._closed = False
        self._watcher: threading.Thread | None = None

    def start(self, specs: Sequence[WorkerSpec], on_share: OnShare = ignore_share) -> list[WorkerReady]:
        self.ranks = Ranks(self._cluster, self.device, specs, self._timeout, self._group_name)
        return self._bring_up(on_share, (RankDied,))

    def recover(self) -> list[WorkerReady]:
        self._end_epoch()
        lost = self.ranks.replace_lost()
        logger.warning("%s made anew; the others keep their weights", _named(lost) if lost else "no rank needs to be")
        return self._bring_up(ignore_share, (WorkerFailed,))

    def publish(self, frame: bytes) -> None:
        self._raise_failure()
        try:
            self._channel.publish(frame)
        except ChannelClosed as closed:
            self._fail(closed)

    def receive(self, timeout_seconds: float | None) -> StepResult | None:
        try:
            message = self._channel.receive(timeout_seconds)
        except ChannelClosed as closed:
            self._fail(closed)
        self._raise_failure()
        return None if message is None else decode_result(message.body)

    def wake(self) -> None:
        channel = self._channel
        if channel is not None:
            channel.wake()

    def give_up(self) -> None:
        if self.ranks is not None:
            self.ranks.closing.set()

    def stacks(self) -> list[str | None]:
        return self.ranks.stacks(STACKS_SECONDS)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        end_anyway("the epoch", self._end_epoch)
        if self.ranks is not None and ray.is_initialized():
            end_anyway("a rank", self.ranks.close)
        self._cluster.close()

    # ---- pieces

    def _bring_up(self, on_share: OnShare, mendable: tuple[type[WorkerFailed], ...]) -> list[WorkerReady]:
        """Starts an epoch. Ranks that are lost meanwhile are made anew, a few times. mendable: failures that this
        may mend: at the start, what a rank complains of would come again."""
        attempts_left = ATTEMPTS
        while True:
            try:
                ready = self.ranks.bring_up(on_share)
                self._connect()
                return ready
            except mendable as failure:
                attempts_left -= 1
                if not attempts_left or self.ranks.closing.is_set():
                    raise
                logger.warning("%s; once more", failure)
                self._end_epoch()
                self.ranks.replace_lost()

    def _connect(self) -> None:
        """Opens the step channel and waits until every rank has shown itself."""
        self._failure = None
        self._failed.clear()
        self._epoch_over = threading.Event()
        node_ip = ray.util.get_node_ip_address()
        self._channel = DriverChannel(len(self.ranks), None if self.ranks.all_at(node_ip) else node_ip)
        serving = [actor.serve.remote(self._channel.address) for actor in self.ranks.actors]
        self._watcher = threading.Thread(
            target=self._watch, args=(serving, self._epoch_over), name="quadriga-watch", daemon=True
        )
        self._watcher.start()
        deadline = time.monotonic() + CONNECT_SECONDS
        while self._channel.missing_rank is not None:
            try:
                self._channel.receive(0.5)
                self._raise_failure()
            except (ChannelClosed, WorkerFailed) as failure:
                raise RankDied(str(failure)) from failure
            missing = self._channel.missing_rank
            if missing is not None and time.monotonic() > deadline:
                raise RankDied(
                    f"rank {missing} did not connect to {self._channel.address.url} within {CONNECT_SECONDS:g} s"
                )
            if self.ranks.closing.is_set():
                raise WorkerFailed("connecting the ranks was given up: the engine closes")

    def _end_epoch(self) -> None:
        self._epoch_over.set()
        if self._channel is not None:
            self._channel.close()
        if self._watcher is not None:
            self._watcher.join(timeout=10)
            self._watcher = None

    def _watch(self, serving: list[Any], over: threading.Event) -> None:
        """Waits for the first rank whose serving ends, which it never should, and wakes the engine."""
        try:
            failure = _first_end(serving, over)
        except Exception as error:  # of Ray's or ours: a rank's end would pass unnoticed from now on
            logger.exception("the ranks cannot be watched any more")
            failure = f"the ranks cannot be watched any more: {error!r}"
        if not over.is_set():
            self._failure = WorkerFailed(failure)
            self._failed.set()
            self._channel.wake()

    def _fail(self, closed: ChannelClosed) -> NoReturn:
        self._failed.wait(0.3)  # the watcher may know better what became of the rank
        self._raise_failure()
        raise WorkerFailed(str(closed)) from closed

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _first_end(serving: list[Any], over: threading.Event) -> str:
    """Which rank's serving ended first, and why; where it only misses another, which that was. Empty when over."""
    done: list[Any] = []
    while not done and not over.is_set():
        done, _ = ray.wait(serving, num_returns=1, timeout=1.0)
    if not done:
        return ""
    cause, is_own = _end_of(serving.index(done[0]), done[0])
    others = [ref for ref in serving if ref != done[0]]
    if not is_own and others:
        for ref in ray.wait(others, num_returns=1, timeout=BLAME_SECONDS)[0]:
            other, is_own = _end_of(serving.index(ref), ref)
            cause = other if is_own else cause
    return cause


def _end_of(rank: int, ended: Any) -> tuple[str, bool]:
    """Why a rank's serving ended, and whether that is its own doing."""
    try:
        return f"rank {rank} failed: {ray.get(ended)}", False
    except RayTaskError as error:
        logger.error("rank %d raised:\n%s", rank, error)
        return f"rank {rank} failed: {str(error.cause or error).strip()}", True
    except RayActorError as error:
        return f"rank {rank} failed: its process died: {first_lines(error)}", True
    except RayError as error:
        return f"rank {rank} failed: {error}", True


def _pick_device(wanted: str, size: int) -> str:
    """`cpu` or `cuda`: the wanted device, or for `auto` what the cluster has."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return "cpu"
    if gpus < size:
        raise ConfigError(
            f"tensor_parallel_size {size} needs {size} GPUs, but the Ray cluster has {gpus}: {describe_nodes()}"
        )
    return "cuda"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
