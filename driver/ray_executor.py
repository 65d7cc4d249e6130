"""Workers as Ray actors: one per rank, in a placement group, on one node or many."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from driver.cluster import Cluster, describe_nodes
from driver.config import ConfigError
from driver.errors import is_input_fault
from driver.executor import OnShare, WorkerFailed, ignore_share
from parallel.channel import ChannelClosed, DriverChannel
from scheduler.frame import StepResult, decode_result
from workers.spec import WorkerReady, WorkerSpec

logger = logging.getLogger("quadriga.ray")

LOOPBACK = "127.0.0.1"


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
        except ConfigError:
            self._cluster.close()
            raise
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._channel: DriverChannel | None = None
        self._failure: WorkerFailed | None = None
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self, specs: Sequence[WorkerSpec], on_share: OnShare = ignore_share) -> list[WorkerReady]:
        deadline = time.monotonic() + self._timeout
        self._group = self._place(specs)
        self._actors = [self._make_actor(spec) for spec in specs]
        ips = self._all([actor.node_ip.remote() for actor in self._actors], deadline, "starting the workers")
        one_host = len(set(ips)) == 1
        hosts = [LOOPBACK] * len(ips) if one_host else ips
        store_host, store_port = None, 0
        if len(specs) > 1:
            store_host = hosts[0]
            (store_port,) = self._all([self._actors[0].open_store.remote(store_host)], deadline, "opening the store")
        calls = [
            actor.start.remote(store_host, store_port, host, hosts.count(host))
            for actor, host in zip(self._actors, hosts, strict=True)
        ]
        ready = self._all(calls, None, "loading the model", lambda: on_share(self._loaded()))
        self._connect(one_host and ips[0] == ray.util.get_node_ip_address(), deadline)
        return ready

    def publish(self, frame: bytes) -> None:
        self._raise_failure()
        try:
            self._channel.publish(frame)
        except ChannelClosed as closed:
            self._failed.wait(1)  # the watcher knows better what became of the rank
            self._raise_failure()
            raise WorkerFailed(str(closed)) from closed

    def receive(self, timeout_seconds: float | None) -> StepResult | None:
        message = self._channel.receive(timeout_seconds)
        self._raise_failure()
        return None if message is None else decode_result(message.body)

    def wake(self) -> None:
        if self._channel is not None:
            self._channel.wake()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        if self._channel is not None:
            self._channel.close()
        if ray.is_initialized():
            self._end_actors()
        if self._watcher is not None:
            self._watcher.join(timeout=10)
        self._cluster.close()

    # ---- pieces

    def _place(self, specs: Sequence[WorkerSpec]) -> PlacementGroup:
        """Reserves the ranks' devices, packed on as few nodes as possible. Raises ConfigError when they are not to
        be had in time, saying what was asked for and what there is."""
        bundle = self._cluster.bundle(self.device)
        if self._group_name:
            _remove_left_over(self._group_name)
        group = placement_group([dict(bundle) for _ in specs], strategy="PACK", name=self._group_name)
        patience = min(3.0, self._timeout)
        if group.wait(patience):
            return group
        wanted = f"{len(specs)} workers with {_resources(bundle)} each"
        logger.warning("waiting for room for %s; the Ray cluster has %s", wanted, describe_nodes())
        if not group.wait(self._timeout - patience):
            remove_placement_group(group)
            raise ConfigError(
                f"no room for {wanted} within {self._timeout:g} s; the Ray cluster has {describe_nodes()}"
            )
        return group

    def _make_actor(self, spec: WorkerSpec) -> Any:
        from workers.actor import WorkerActor

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=spec.rank)
        resources = self._cluster.bundle(self.device)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": 0,
            "concurrency_groups": {"watch": 1},
        }
        return ray.remote(**options)(WorkerActor).options(scheduling_strategy=strategy).remote(spec)

    def _connect(self, same_host: bool, deadline: float) -> None:
        """Opens the step channel and waits until every rank has shown itself."""
        self._channel = DriverChannel(len(self._actors), None if same_host else ray.util.get_node_ip_address())
        serving = [actor.serve.remote(self._channel.address) for actor in self._actors]
        self._watcher = threading.Thread(target=self._watch, args=(serving,), name="quadriga-watch", daemon=True)
        self._watcher.start()
        deadline = max(deadline, time.monotonic() + 30)
        while self._channel.missing_rank is not None:
            self._channel.receive(0.5)
            self._raise_failure()
            if time.monotonic() > deadline:
                raise WorkerFailed(f"rank {self._channel.missing_rank} did not connect to {self._channel.address.url}")

    def _watch(self, serving: list[Any]) -> None:
        """Waits for the first rank whose serving ends, which it never should, and wakes the engine."""
        ranks = {ref: rank for rank, ref in enumerate(serving)}
        while not self._closing.is_set():
            try:
                done, _ = ray.wait(serving, num_returns=1, timeout=1.0)
                if not done:
                    continue
                ray.get(done[0])
                cause = "it stopped serving"
            except RayTaskError as error:
                cause = str(error.cause or error).strip()
                logger.error("rank %d raised:\n%s", ranks[done[0]], error)
            except RayActorError as error:
                cause = f"its process died: {_first_lines(error)}"
            except RayError as error:
                cause = str(error)
            if not self._closing.is_set():
                self._failure = WorkerFailed(f"rank {ranks[done[0]]} failed: {cause}")
                self._failed.set()
                self._channel.wake()
            return

    def _loaded(self) -> float:
        """How much of the weights the slowest rank has loaded, in [0, 1]."""
        try:
            return min(ray.get([actor.loaded.remote() for actor in self._actors], timeout=1.0))
        except RayError:
            return 0.0  # whatever is wrong with a rank, its `start` tells

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
            try:
                ray.get(done[0])
            except RayTaskError as error:
                if is_input_fault(error.cause):
                    raise error.cause from None
                raise WorkerFailed(f"rank {rank} failed while {what}: {error.cause or error}") from error
            except RayActorError as error:
                raise WorkerFailed(f"rank {rank} died while {what}: {_first_lines(error)}") from error
        return ray.get(refs)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _end_actors(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


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


def _remove_left_over(name: str) -> None:
    """Removes the places of a driver that ended without doing so: its successor could not have them otherwise."""
    try:
        remove_placement_group(ray.util.get_placement_group(name))
    except ValueError:
        return  # nothing was left


def _resources(bundle: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def _first_lines(error: BaseException, count: int = 3) -> str:
    return " ".join(str(error).strip().splitlines()[:count])
