"""The workers' actors: placed, started, and replaced one by one when they are lost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from driver.awake import AwakeClock
from driver.cluster import Cluster, describe_nodes
from driver.config import ConfigError
from driver.errors import end_anyway, is_input_fault
from driver.executor import OnShare, WorkerFailed
from parallel.errors import CollectiveError, GroupError
from workers.spec import WorkerPlace, WorkerReady, WorkerSpec

logger = logging.getLogger("quadriga.ray")

LOOPBACK = "127.0.0.1"
LEAVE_SECONDS = 3.0  # what a rank gets to end its step when another is lost; it then is as good as lost itself
SILENT_SECONDS = 20.0  # after a loss: what a rank that joins again or loads may leave calls beside that unanswered
BLAME_SECONDS = 2.0  # what is waited for the rank that the first one to fail complains of
POLITE_SECONDS = 2.0  # what ranks get to end by themselves when the engine closes
TICK_SECONDS, ANSWER_SECONDS = 0.3, 0.5


class RankDied(WorkerFailed):
    """A rank ended, fell silent or was not reached by another while the ranks were being brought up."""


class Ranks:
    """One actor per rank, in a placement group on one node or many.

    closing: set from any thread, it ends a `bring_up` with WorkerFailed.
    """

    def __init__(
        self, cluster: Cluster, device: str, specs: Sequence[WorkerSpec], timeout_seconds: float, group_name: str
    ) -> None:
        """Reserves the devices and makes the actors. group_name: of the placement group; empty for none.

        Raises ConfigError when the devices are not to be had in time.
        """
        self._cluster, self._device, self._timeout = cluster, device, timeout_seconds
        self._specs = list(specs)
        self.closing = threading.Event()
        self._node_ip = ray.util.get_node_ip_address()
        self._silent_seconds = timeout_seconds  # a first import of torch may hold up a process for long
        self._group: PlacementGroup | None = self._place(group_name)
        self._places: list[WorkerPlace | None] = [None] * len(specs)
        self.actors = [self._make(rank) for rank in range(len(specs))]

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def on_one_host(self) -> bool:
        return len({place.node_ip for place in self._places}) == 1

    def all_at(self, node_ip: str) -> bool:
        """Whether every rank runs on this node."""
        return all(place is not None and place.node_ip == node_ip for place in self._places)

    def bring_up(self, on_share: OnShare) -> list[WorkerReady]:
        """Has every rank join the others, those that have no weights yet load them. on_share: as in Executor.start.

        Loading takes as long as it takes, if all ranks answer meanwhile that they live.

        Raises RankDied, WorkerFailed, or a rank's own complaint about the model.
        """
        deadline = time.monotonic() + self._timeout
        self._places = self._all([actor.place.remote() for actor in self.actors], deadline, "starting the workers")
        hosts = [LOOPBACK if self.on_one_host else place.node_ip for place in self._places]
        store_host, store_port = None, 0
        if len(self) > 1:
            store_host = hosts[0]
            (store_port,) = self._all([self.actors[0].open_store.remote(store_host)], deadline, "opening the store")
        calls = [
            actor.start.remote(store_host, store_port, host, hosts.count(host))
            for actor, host in zip(self.actors, hosts, strict=True)
        ]
        loading = _Loading(self.actors, self._silent_seconds)
        ready = self._all(calls, None, "loading the model", lambda: on_share(loading.share()))
        self._silent_seconds = min(SILENT_SECONDS, self._timeout)
        # A rank that takes another's place must do with the blocks that there are; the others have no time to measure.
        self._specs = [dataclasses.replace(spec, num_kv_blocks=ready[0].num_blocks) for spec in self._specs]
        return ready

    def replace_lost(self) -> list[int]:
        """Ends the epoch: ranks that are gone, broken or do not answer are made anew. Returns which were.

        The others keep their processes and weights, for `bring_up`.
        """
        asked = [actor.leave.remote(LEAVE_SECONDS) for actor in self.actors]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=LEAVE_SECONDS + 1)
        lost = [rank for rank, answer in enumerate(asked) if answer not in answered or not _is_true(answer)]
        for rank in lost:
            self._kill(rank)
        for rank in lost:
            self._specs[rank] = dataclasses.replace(self._specs[rank], generation=self._specs[rank].generation + 1)
            self.actors[rank] = self._make(rank)
        return lost

    def stacks(self, seconds: float) -> list[str | None]:
        """What each rank's threads are doing; None for one that does not answer in time."""
        asked = [actor.stacks.remote() for actor in self.actors]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=seconds)
        return [_text(answer) if answer in answered else None for answer in asked]

    def close(self) -> None:
        processes = [self._process(rank) for rank in range(len(self.actors))]
        for rank, actor in enumerate(self.actors):
            # Asked by Ray to end, a rank is not taken for one that has crashed.
            end_anyway(f"rank {rank}", functools.partial(ray.kill, actor))
        _, left = psutil.wait_procs([process for process in processes if process], timeout=POLITE_SECONDS)
        for process in left:  # one that is stopped does not hear Ray
            _end(process)
        self.actors = []
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    # ---- pieces

    def _place(self, name: str) -> PlacementGroup:
        """Reserves the ranks' devices, packed on as few nodes as possible. Raises ConfigError when they are not to
        be had in time, saying what was asked for and what there is."""
        bundle = self._cluster.bundle(self._device)
        if name:
            _remove_left_over(name)
        group = placement_group([dict(bundle) for _ in self._specs], strategy="PACK", name=name)
        patience = min(3.0, self._timeout)
        if group.wait(patience):
            return group
        wanted = f"{len(self)} workers with {_resources(bundle)} each"
        logger.warning("waiting for room for %s; the Ray cluster has %s", wanted, describe_nodes())
        if not group.wait(self._timeout - patience):
            remove_placement_group(group)
            raise ConfigError(
                f"no room for {wanted} within {self._timeout:g} s; the Ray cluster has {describe_nodes()}"
            )
        return group

    def _make(self, rank: int) -> Any:
        from workers.actor import WorkerActor

        resources = self._cluster.bundle(self._device)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": 0,
            "concurrency_groups": {"watch": 2},
        }
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        return ray.remote(**options)(WorkerActor).options(scheduling_strategy=strategy).remote(self._specs[rank])

    def _kill(self, rank: int) -> None:
        process = self._process(rank)
        self._places[rank] = None
        if process is not None:
            _end(process)  # Ray asks politely first, which one that is stopped does not hear
        ray.kill(self.actors[rank])

    def _process(self, rank: int) -> psutil.Process | None:
        """A rank's process, if it is one of this machine and there."""
        place = self._places[rank]
        if place is None or place.node_ip != self._node_ip:
            return None
        try:
            process = psutil.Process(place.pid)
            # And not who has its number by now.
            return process if process.cmdline()[0].startswith("ray::WorkerActor") else None
        except (psutil.Error, IndexError):
            return None

    def _all(
        self, refs: list[Any], deadline: float | None, what: str, meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """All results; the first error wins over ranks that still wait for it. deadline: monotonic, None for none.

        meanwhile: called a few times a second.
        """
        waiting = list(refs)
        while waiting:
            if self.closing.is_set():
                raise WorkerFailed(f"{what} was given up: the engine closes")
            left = TICK_SECONDS if deadline is None else min(TICK_SECONDS, max(0.0, deadline - time.monotonic()))
            done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if done:
                failure = _failure(refs, done[0], what)
                if failure is not None:
                    raise _first_cause(failure, refs, waiting, what)
            elif deadline is not None and time.monotonic() >= deadline:
                raise WorkerFailed(f"{what} took longer than {self._timeout:g} s on rank {refs.index(waiting[0])}")
            elif meanwhile:
                meanwhile()
        return ray.get(refs)


class _Loading:
    """What ranks that load say of themselves meanwhile."""

    def __init__(self, actors: Sequence[Any], silent_seconds: float) -> None:
        """silent_seconds: what one may leave unanswered."""
        self._actors, self._silent_seconds = actors, silent_seconds
        self._clock = AwakeClock()
        self._heard = [self._clock.now()] * len(actors)

    def share(self) -> float:
        """How much of the weights the slowest rank has loaded, in [0, 1]. Raises RankDied for one that is silent."""
        asked = [actor.loaded.remote() for actor in self._actors]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS)
        now, shares = self._clock.now(), []
        for rank, answer in enumerate(asked):
            if answer in answered:
                self._heard[rank] = now
            elif now - self._heard[rank] > self._silent_seconds:
                raise RankDied(f"rank {rank} has not answered for {self._silent_seconds:g} s while it was to load")
            shares.append(_share(answer) if answer in answered else 0.0)
        return min(shares)


def _end(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):  # it has ended already
        process.kill()


def _failure(refs: list[Any], done: Any, what: str) -> Exception | None:
    """What a call that has ended failed with, if it did."""
    rank = refs.index(done)
    try:
        ray.get(done)
        return None
    except RayTaskError as error:
        if is_input_fault(error.cause):
            return error.cause
        kind = RankDied if isinstance(error.cause, CollectiveError) else WorkerFailed
        failure: Exception = kind(f"rank {rank} failed while {what}: {error.cause or error}")
        failure.__cause__ = error
    except RayError as error:
        failure = RankDied(f"rank {rank} died while {what}: {first_lines(error)}")
        failure.__cause__ = error
    return failure


def _first_cause(failure: Exception, refs: list[Any], waiting: list[Any], what: str) -> Exception:
    """What may be behind a rank's failure to reach the others: the end of one of them shows a little later."""
    deadline = time.monotonic() + BLAME_SECONDS
    while waiting and _is_of_others(failure):
        done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            break
        failure = _failure(refs, done[0], what) or failure
    return failure


def _is_of_others(failure: Exception) -> bool:
    """Whether a rank failed with what it has to do with others, so that one of them may be the cause."""
    return isinstance(failure.__cause__, RayTaskError) and isinstance(failure.__cause__.cause, GroupError)


def first_lines(error: BaseException, count: int = 3) -> str:
    return " ".join(str(error).strip().splitlines()[:count])


def _share(answer: Any) -> float:
    try:
        return ray.get(answer)
    except RayError:
        return 0.0  # whatever is wrong with a rank, its `start` tells


def _is_true(answer: Any) -> bool:
    try:
        return ray.get(answer)
    except RayError:
        return False  # it is gone


def _text(answer: Any) -> str:
    try:
        return ray.get(answer)
    except RayError as error:
        return first_lines(error)


def _remove_left_over(name: str) -> None:
    """Removes the places of a driver that ended without doing so: its successor could not have them otherwise."""
    try:
        remove_placement_group(ray.util.get_placement_group(name))
    except ValueError:
        return  # nothing was left


def _resources(bundle: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
