"""The workers' actors: placed, started, and replaced one by one when they are lost."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from driver.cluster import Cluster, describe_nodes
from driver.config import ConfigError
from driver.errors import is_input_fault
from driver.executor import OnShare, WorkerFailed
from parallel.errors import CollectiveError, GroupError
from workers.spec import WorkerPlace, WorkerReady, WorkerSpec

logger = logging.getLogger("quadriga.ray")

LOOPBACK = "127.0.0.1"
CAUSE_SECONDS = 3.0  # in which a rank's loss shows after others have failed to reach it
LEAVE_SECONDS = 3.0  # what a rank gets to end its step when another is lost; it then is as good as lost itself


class RankDied(WorkerFailed):
    """A rank ended, fell silent or was not reached by another while the ranks were being brought up."""


class Ranks:
    """One actor per rank, in a placement group on one node or many."""

    def __init__(
        self, cluster: Cluster, device: str, specs: Sequence[WorkerSpec], timeout_seconds: float, group_name: str
    ) -> None:
        """Reserves the devices and makes the actors. group_name: of the placement group; empty for none.

        Raises ConfigError when the devices are not to be had in time.
        """
        self._cluster, self._device, self._timeout = cluster, device, timeout_seconds
        self._specs = list(specs)
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
        ready = self._all(calls, None, "loading the model", self._follow_loading(on_share))
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
        if not self.actors:
            raise WorkerFailed("the ranks were ended meanwhile")
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
        for rank in range(len(self.actors)):
            self._kill(rank)
        self.actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

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
        place = self._places[rank]
        self._places[rank] = None
        if place is not None and place.node_ip == ray.util.get_node_ip_address():
            try:
                psutil.Process(place.pid).kill()  # Ray asks politely first, which one that is stopped does not hear
            except psutil.NoSuchProcess:
                logger.debug("rank %d has ended already", rank)
        ray.kill(self.actors[rank])

    def _follow_loading(self, on_share: OnShare) -> Callable[[], None]:
        """Asks the ranks how much they have loaded, and tells on_share. Raises RankDied for one that falls silent."""
        heard = [time.monotonic()] * len(self)

        def ask() -> None:
            asked = [actor.loaded.remote() for actor in self.actors]
            answered, _ = ray.wait(asked, num_returns=len(asked), timeout=1.0)
            shares = [_share(answer) if answer in answered else None for answer in asked]
            for rank, share in enumerate(shares):
                if share is not None:
                    heard[rank] = time.monotonic()
                elif time.monotonic() > heard[rank] + self._timeout:
                    raise RankDied(f"rank {rank} has not answered for {self._timeout:g} s while loading the model")
            on_share(min(share or 0.0 for share in shares))

        return ask

    def _all(
        self, refs: list[Any], deadline: float | None, what: str, meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """All results; the first error wins over ranks that still wait for it. deadline: monotonic, None for none.

        meanwhile: called a few times a second.
        """
        waiting = list(refs)
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, waiting = ray.wait(waiting, num_returns=1, timeout=0.3 if meanwhile else left)
            if not done and meanwhile:
                meanwhile()
                continue
            rank = refs.index(done[0]) if done else -1
            if not done:
                raise WorkerFailed(f"{what} took longer than {self._timeout:g} s on rank {refs.index(waiting[0])}")
            failure = _failure(done[0], rank, what)
            if failure is not None:
                raise self._cause(failure, refs, waiting, what)
        return ray.get(refs)

    def _cause(self, failure: Exception, refs: list[Any], waiting: list[Any], what: str) -> Exception:
        """What may be behind a rank's failure to reach the others: the end of one of them shows a little later."""
        deadline = time.monotonic() + CAUSE_SECONDS
        while waiting and _is_of_others(failure):
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                break
            failure = _failure(done[0], refs.index(done[0]), what) or failure
        return failure


def first_lines(error: BaseException, count: int = 3) -> str:
    return " ".join(str(error).strip().splitlines()[:count])


def _failure(answer: Any, rank: int, what: str) -> Exception | None:
    """What a rank's call has failed with, to be raised."""
    try:
        ray.get(answer)
    except RayTaskError as error:
        if is_input_fault(error.cause):
            return error.cause
        kind = RankDied if isinstance(error.cause, CollectiveError) else WorkerFailed
        failure = kind(f"rank {rank} failed while {what}: {error.cause or error}")
        failure.__cause__ = error
        return failure
    except RayActorError as error:
        failure = RankDied(f"rank {rank} died while {what}: {first_lines(error)}")
        failure.__cause__ = error
        return failure
    return None


def _is_of_others(failure: Exception) -> bool:
    """Whether a rank failed with what it has to do with others, so that one of them may be the cause."""
    return isinstance(failure.__cause__, RayTaskError) and isinstance(failure.__cause__.cause, GroupError)


def _share(answer: Any) -> float | None:
    try:
        return ray.get(answer)
    except RayError:
        return 0.0  # whatever is wrong with the rank, its `start` tells


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
