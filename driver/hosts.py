"""The two places where `quadriga serve` keeps a driver: a Ray actor, or this very process."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from typing import Any

from driver.errors import end_anyway
from driver.handle import Client
from driver.llm import LLM
from driver.port import Port
from driver.service import Service
from driver.startup import FAILED, READY, StartStatus
from driver.wire import ServiceUnavailable
from parallel.channel import ChannelAddress

logger = logging.getLogger("quadriga.serve")

STATUS_SECONDS = 5.0
START_SECONDS = 60.0  # what a start in this process, which nothing can break off, gets to end
FRONT_OUTSTANDING = 1 << 20  # the service alone bounds what the HTTP front asks of it, so that its callers hear of it


class InlineHost:
    """Engine, worker and port in this process: no Ray, and nobody but this process can find it."""

    def __init__(self, options: dict[str, Any], max_queued_requests: int, model_name: str | None) -> None:
        """options: fields of EngineConfig. max_queued_requests, model_name: as in Service."""
        self._status = StartStatus()
        self._llm = LLM(start=False, **options)
        self._port: Port | None = None
        self._service = functools.partial(Service, max_queued_requests=max_queued_requests, model_name=model_name)
        self._status.follow(self._llm.phases)
        self._thread = threading.Thread(target=self._bring_up, name="quadriga-start", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        failure = self._llm.failure or (self._port and self._port.failure)
        if self._status.state == READY and failure is not None:
            self._status.failed(failure)
        return self._status.now

    def connect(self) -> Client:
        return Client(self._locate, max_outstanding=FRONT_OUTSTANDING)

    def end(self, drain_seconds: float) -> int:
        return self._port.service.drain(drain_seconds)

    def close(self) -> None:
        self._thread.join(timeout=START_SECONDS)
        if self._thread.is_alive():
            logger.error("the start has not come to its end within %g s; it is left behind", START_SECONDS)
        if self._port is not None:
            self._port.close()
        self._llm.close()

    def _locate(self) -> ChannelAddress:
        if self._port is None or self._status.state != READY:
            raise ServiceUnavailable(f"the service is {self._status.state}")
        return self._port.address

    def _bring_up(self) -> None:
        try:
            self._llm.start()
            self._port = Port(self._service(self._llm), None)
            self._port.start()
            self._status.ready(self._llm.phases)
        except BaseException as error:  # noqa: BLE001 told by status
            self._status.failed(error)


class ActorHost:
    """The driver in a named, detached actor, on the cluster that runs or on a private one."""

    def __init__(self, options: dict[str, Any], settings: Any, replace: bool, drain_seconds: float) -> None:
        """settings: ServiceSettings. replace, drain_seconds: as in start_service, and its errors."""
        from driver.cluster import Cluster
        from driver.owner import OwnerProcess
        from driver.service_actor import start_service

        self._cluster = Cluster(options.get("ray_address", "auto"), options["tensor_parallel_size"])
        try:
            if self._cluster.private and not settings.owned:
                raise ServiceUnavailable("there is no running Ray cluster to leave a service on; start one: ray start")
            owner = OwnerProcess.this() if settings.owned else None
            self._settings = settings = dataclasses.replace(settings, owner=owner)
            # The actor is on the cluster already, whichever way this process got there.
            self._actor = start_service({**options, "ray_address": "auto"}, settings, replace, drain_seconds)
        except BaseException:
            end_anyway("Ray", self._cluster.close)
            raise
        self._ended = False

    def status(self) -> dict[str, Any]:
        import ray

        try:
            return ray.get(self._actor.status.remote(), timeout=STATUS_SECONDS)
        except ray.exceptions.ActorDiedError as error:  # for good: it has been ended or replaced
            return {"state": FAILED, "error": str(error).splitlines()[0], "input_fault": False}
        except ray.exceptions.RayError as error:
            if self._cluster.private and _ray_has_ended():
                # Its raylet was killed, or one of the agents that take it along; nobody starts this Ray again.
                message = "its own Ray has ended; start it anew, or on a Ray cluster of several machines"
                return {"state": FAILED, "error": message, "input_fault": False}
            logger.warning("the driver does not answer: %s", str(error).splitlines()[0])
            return {**StartStatus().now, "phase": "driver"}

    def connect(self) -> Client:
        from driver.service_actor import Locator

        # Tied to this very actor: its successor under the name has an owner of its own.
        locate = Locator(self._settings.name, actor=self._actor)
        return Client(locate, owner=True, max_outstanding=FRONT_OUTSTANDING)

    def end(self, drain_seconds: float) -> int:
        from driver.service_actor import end_service

        self._ended = True
        return end_service(self._actor, drain_seconds)

    def close(self) -> None:
        if self._settings.owned and not self._ended:
            self.end(0.0)
        self._cluster.close()


def _ray_has_ended() -> bool:
    import ray

    try:
        return not any(node["Alive"] for node in ray.nodes())
    except ray.exceptions.RayError as error:  # the head is stopped, say, and may go on
        logger.warning("Ray cannot be asked for its nodes: %s", str(error).splitlines()[0])
        return False
