"""The two places where `quadriga serve` keeps a driver: a Ray actor, or this very process."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

from driver.errors import is_input_fault
from driver.handle import Client
from driver.llm import LLM
from driver.port import Port
from driver.service import Service
from driver.wire import ServiceUnavailable

logger = logging.getLogger("quadriga.serve")


class InlineHost:
    """Engine, worker and port in this process: no Ray, and nobody but this process can find it."""

    def __init__(self, options: dict[str, Any], max_queued_requests: int, model_name: str | None) -> None:
        """options: fields of EngineConfig. max_queued_requests, model_name: as in Service."""
        self._status: dict[str, Any] = {"state": "starting", "phase": "process", "share": None, "seconds": {}}
        self._llm = LLM(start=False, **options)
        self._port: Port | None = None
        self._service = functools.partial(Service, max_queued_requests=max_queued_requests, model_name=model_name)
        self._llm.phases.on_begin = lambda name: self._status.update(phase=name, share=None)
        self._llm.phases.on_share = lambda share: self._status.update(share=share)
        self._thread = threading.Thread(target=self._bring_up, name="quadriga-start", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        if self._port is not None and self._llm.failure is not None:
            self._status.update(state="failed", error=str(self._llm.failure), input_fault=False)
        return self._status

    def connect(self) -> Client:
        return Client(lambda: self._port.address)

    def end(self, drain_seconds: float) -> int:
        return self._port.service.drain(drain_seconds)

    def close(self) -> None:
        self._thread.join()
        if self._port is not None:
            self._port.close()
        self._llm.close()

    def _bring_up(self) -> None:
        try:
            self._llm.start()
            self._port = Port(self._service(self._llm), None)
            self._port.start()
            self._status.update(state="ready", seconds=dict(self._llm.phases.times))
        except Exception as error:  # noqa: BLE001 told by status
            self._status.update(state="failed", error=str(error), input_fault=is_input_fault(error))


class ActorHost:
    """The driver in a named, detached actor, on the cluster that runs or on a private one."""

    def __init__(self, options: dict[str, Any], settings: Any, replace: bool) -> None:
        """settings: ServiceSettings. Raises ConfigError when the name is taken."""
        from driver.cluster import Cluster
        from driver.service_actor import start_service

        self._settings = settings
        self._cluster = Cluster(options.get("ray_address", "auto"), options["tensor_parallel_size"])
        try:
            if self._cluster.private and not settings.owned:
                raise ServiceUnavailable("there is no running Ray cluster to leave a service on; start one: ray start")
            # The actor is on the cluster already, whichever way this process got there.
            self._actor = start_service({**options, "ray_address": "auto"}, settings, replace)
        except BaseException:
            self._cluster.close()
            raise
        self._ended = False

    def status(self) -> dict[str, Any]:
        import ray

        try:
            return ray.get(self._actor.status.remote(), timeout=30)
        except ray.exceptions.RayError as error:
            logger.warning("the driver does not answer: %s", str(error).splitlines()[0])
            return {"state": "starting", "phase": "driver", "share": None, "seconds": {}}

    def connect(self) -> Client:
        from driver.service_actor import Locator

        return Client(Locator(self._settings.name), owner=True)

    def end(self, drain_seconds: float) -> int:
        from driver.service_actor import end_service

        self._ended = True
        return end_service(self._actor, drain_seconds)

    def close(self) -> None:
        if self._settings.owned and not self._ended:
            self.end(0.0)
        self._cluster.close()
