"""The driver as a named, detached Ray actor, and how handles find it.

Ray restarts the actor when its process dies. It then brings up its workers anew, again and again for some minutes if
need be, and the handles ask again for what they had not got to the end. An actor that has failed beyond that (its model
cannot be loaded, say) stays, to tell why.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from driver.cluster import join, running_clusters
from driver.config import ConfigError
from driver.errors import end_anyway
from driver.owner import OWNER_SECONDS, OwnerProcess, OwnerWatch
from driver.startup import FAILED, LOG_FORMAT, READY, StartStatus
from driver.wire import ServiceUnavailable
from parallel.channel import ChannelAddress

logger = logging.getLogger("quadriga.service")

NAMESPACE = "quadriga"
LOOKUP_SECONDS = 5.0
AGAIN_SECONDS = 600.0  # how long a driver that was up before tries to be so again
PAUSE_SECONDS = 5.0  # before it tries once more


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What a service has beyond its engine's configuration.

    max_queued_requests, model_name: as in Service. owned: whether the service ends with the handle that owns it.
    owner: the process of that handle, where it is known.
    """

    name: str
    max_queued_requests: int = 1024
    owned: bool = True
    model_name: str | None = None
    owner: OwnerProcess | None = None


class DriverActor:
    """Runs engine and port in an actor's process; brings itself up, also after a restart."""

    def __init__(self, options: Mapping[str, Any], settings: ServiceSettings) -> None:
        """options: fields of EngineConfig."""
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        self._options, self._settings = dict(options), settings
        self._status = StartStatus()
        self._llm: Any = None
        self._port: Any = None
        self._stopping = threading.Lock()
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed
        threading.Thread(target=self._live, name="quadriga-driver", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """StartStatus.now, restarted and pid."""
        return {**self._status.now, "restarted": self._restarted, "pid": os.getpid()}

    def address(self) -> ChannelAddress | None:
        """Where handles connect; None while it starts. Raises ServiceUnavailable when it has failed."""
        if self._status.state == FAILED:
            raise ServiceUnavailable(f"the service has failed: {self._status.now['error']}")
        return self._port.address if self._status.state == READY else None

    def stop(self, drain_seconds: float) -> int:
        """Drains and ends engine, workers and port. Returns how many requests had to be aborted."""
        with self._stopping:
            aborted = 0
            if self._port is not None:
                aborted = self._port.service.drain(drain_seconds)
                end_anyway("the port", self._port.close)
                self._port = None
            if self._llm is not None:
                end_anyway("the engine", self._llm.close)
            return aborted

    # ---- the actor's own thread

    def _live(self) -> None:
        until = time.monotonic() + (AGAIN_SECONDS if self._restarted else 0.0)
        while (error := self._start()) is not None:
            if time.monotonic() >= until:
                self._status.failed(error)
                self._wait_for_owner()
                return
            if self._settings.owned and OwnerWatch(self._settings.owner).has_ended:
                self._end()
                return
            logger.error("the driver was up before, and tries again in %d s", PAUSE_SECONDS)
            time.sleep(PAUSE_SECONDS)  # whatever it lacks may come back: machines, memory, a file system
        try:
            self._watch()
        except BaseException:
            logger.exception("nobody watches the service any more; the driver starts again")
            os._exit(1)

    def _start(self) -> BaseException | None:
        """What went wrong, if something did."""
        try:
            self._bring_up()
        except BaseException as error:  # whatever it is, it is to be told, and nobody else is here to do so
            logger.exception("the service could not start")
            if self._llm is not None:
                end_anyway("the engine", self._llm.close)
                self._llm = None
            return error
        return None

    def _bring_up(self) -> None:
        from driver.llm import LLM
        from driver.port import Port
        from driver.service import Service

        self._status.begin("model files")
        self._llm = llm = LLM(start=False, service_name=self._settings.name, **self._options)
        self._status.follow(llm.phases)
        llm.start()
        service = Service(llm, self._settings.max_queued_requests, self._settings.model_name)
        self._port = Port(service, ray.util.get_node_ip_address(), restarts=True)
        self._port.start()
        self._status.ready(llm.phases)

    def _watch(self) -> None:
        """Ends the process when the engine has failed, for Ray to start it again, and the service with its owner."""
        owner = OwnerWatch(self._settings.owner)
        while True:
            time.sleep(0.2)
            port = self._port
            if port is None:
                return  # stopped
            failure = self._llm.failure or port.failure
            if failure is not None and not self._stopping.locked():
                logger.error("the driver has failed and starts again: %s", failure)
                end_anyway("the engine", self._llm.close)
                os._exit(1)
            if not self._settings.owned:
                continue
            if port.owner_left or owner.is_gone(port.owner_seen_at):
                logger.warning("the owner has left; the service ends")
                port.service.hurry()  # it may have left amid a drain that it asked for
                self.stop(0.0)
                self._end()
                return

    def _wait_for_owner(self) -> None:
        """Gives whoever started the service time to read why it failed."""
        if self._settings.owned:
            time.sleep(OWNER_SECONDS)
            self._end()

    def _end(self) -> None:
        """Ends the actor for good, unless Ray has another process for it by now: that one must not be hit.

        So it is when this machine was cut off, its driver was started again elsewhere, and the network is back.
        """
        context = ray.get_runtime_context()
        try:
            if any(node["Alive"] and node["NodeID"] == context.get_node_id() for node in ray.nodes()):
                ray.kill(context.current_actor, no_restart=True)
                return
            logger.warning("this machine was taken for lost; the process ends alone")
        except ray.exceptions.RayError as error:
            logger.warning("Ray cannot be asked who is to end (%s); the process ends alone", error)
        os._exit(1)


class Locator:
    """Finds a service's address, again and again. Raises ServiceUnavailable when there is none."""

    def __init__(self, name: str, address: str = "auto", actor: Any = None) -> None:
        """address: of the Ray cluster, as in ray.init. actor: only this one, whoever has the name later."""
        self.name, self._actor = name, actor
        if not ray.is_initialized():
            join_cluster_of(name, address)
        elif actor is None:
            find_actor(name)

    def __call__(self) -> ChannelAddress:
        try:
            actor = self._actor or find_actor(self.name)
            address = ray.get(actor.address.remote(), timeout=LOOKUP_SECONDS)
        except ServiceUnavailable:
            raise
        except ray.exceptions.RayTaskError as error:
            raise ServiceUnavailable(str(error.cause or error)) from error
        except Exception as error:  # Ray has many: the actor restarts, its node is gone, the cluster has ended
            raise ServiceUnavailable(f"service {self.name!r} does not answer: {error}") from error
        if address is None:
            raise ServiceUnavailable(f"service {self.name!r} is still starting")
        return address


def join_cluster_of(name: str, address: str) -> None:
    """Connects this process to the running Ray cluster that has a service. Raises ServiceUnavailable when none has.

    address: `auto` looks at all on this machine, as `quadriga serve` may have started one for itself.
    """
    trouble: Exception = ServiceUnavailable(f"there is no Ray cluster, and so no service named {name!r}")
    for candidate in running_clusters() if address == "auto" else [address]:
        try:
            join(candidate)
        except (ConnectionError, ValueError, RuntimeError) as error:
            trouble = ServiceUnavailable(f"no Ray cluster at {candidate}: {error}")
            continue
        try:
            find_actor(name)
            return
        except ServiceUnavailable as error:
            ray.shutdown()
            trouble = error
    raise trouble


def find_actor(name: str) -> Any:
    """The actor of a service. Raises ServiceUnavailable when the cluster has none of that name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise ServiceUnavailable(
            f"there is no service named {name!r} on this Ray cluster (`quadriga serve --name {name}` starts one)"
        ) from error


def start_service(options: Mapping[str, Any], settings: ServiceSettings, replace: bool, drain_seconds: float) -> Any:
    """Makes the driver actor. Raises ConfigError when the name is taken and not to be replaced.

    drain_seconds: what the running requests of a service that is replaced get to finish.
    """
    try:
        old = find_actor(settings.name)
    except ServiceUnavailable:
        old = None
    if old is not None:
        if not replace:
            raise ConfigError(
                f"a service named {settings.name!r} runs on this Ray cluster already; use another name, or --replace"
            )
        logger.warning("service %r is drained and replaced", settings.name)
        aborted = end_service(old, drain_seconds)
        logger.warning("the old service has ended; %d of its requests were aborted", aborted)
    return (
        ray.remote(DriverActor)
        .options(
            name=settings.name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=8,
            num_cpus=0,
            # Here, beside the HTTP front: one machine less whose loss breaks the service.
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
        )
        .remote(dict(options), settings)
    )


def end_service(actor: Any, drain_seconds: float) -> int:
    """Drains a service and ends its actor. Returns how many requests had to be aborted."""
    try:
        return ray.get(actor.stop.remote(drain_seconds), timeout=drain_seconds + 30)
    except ray.exceptions.RayError as error:
        logger.warning("the service ended without draining: %s", str(error).splitlines()[0])
        return 0
    finally:
        ray.kill(actor, no_restart=True)
