"""The driver as a named, detached Ray actor, and how handles find it.

Ray restarts the actor when its process dies. It then brings up its workers anew, and the handles ask again for what
they had not got to the end. An actor that has failed beyond that (its model cannot be loaded, say) stays, to tell why.
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

from driver.config import ConfigError
from driver.errors import is_input_fault
from driver.wire import PING_SECONDS, SILENCE_SECONDS, ServiceUnavailable
from parallel.channel import ChannelAddress

logger = logging.getLogger("quadriga.service")

NAMESPACE = "quadriga"
STARTING, READY, FAILED = "starting", "ready", "failed"
OWNER_SECONDS = 10.0  # an owner unheard of for so long is gone, and the service ends
LOOKUP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What a service has beyond its engine's configuration.

    max_queued_requests, model_name: as in Service. owned: whether the service ends with the handle that owns it.
    """

    name: str
    max_queued_requests: int = 1024
    owned: bool = True
    model_name: str | None = None


class DriverActor:
    """Runs engine and port in an actor's process; brings itself up, also after a restart."""

    def __init__(self, options: Mapping[str, Any], settings: ServiceSettings) -> None:
        """options: fields of EngineConfig."""
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        self._options, self._settings = dict(options), settings
        self._status: dict[str, Any] = {"state": STARTING, "phase": "process", "share": None, "seconds": {}}
        self._llm: Any = None
        self._port: Any = None
        self._stopping = threading.Lock()
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed
        threading.Thread(target=self._live, name="quadriga-driver", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """state (starting, ready, failed); phase of the start and the share of it that is done, where known; seconds
        of the phases that are done; error and input_fault where it has failed; restarted; pid."""
        return {**self._status, "restarted": self._restarted, "pid": os.getpid()}

    def address(self) -> ChannelAddress | None:
        """Where handles connect; None while it starts. Raises ServiceUnavailable when it has failed."""
        if self._status["state"] == FAILED:
            raise ServiceUnavailable(f"the service has failed: {self._status['error']}")
        return self._port.address if self._status["state"] == READY else None

    def stop(self, drain_seconds: float) -> int:
        """Drains and ends engine, workers and port. Returns how many requests had to be aborted."""
        with self._stopping:
            aborted = 0
            if self._port is not None:
                aborted = self._port.service.drain(drain_seconds)
                self._port.close()
                self._port = None
            if self._llm is not None:
                self._llm.close()
            return aborted

    # ---- the actor's own thread

    def _live(self) -> None:
        try:
            self._bring_up()
        except Exception as error:
            logger.exception("the service could not start")
            if self._llm is not None:
                self._llm.close()
            self._status.update(state=FAILED, error=str(error), input_fault=is_input_fault(error))
            self._wait_for_owner()
            return
        self._watch()

    def _bring_up(self) -> None:
        from driver.llm import LLM
        from driver.port import Port
        from driver.service import Service

        self._status["phase"] = "model files"
        self._llm = llm = LLM(start=False, service_name=self._settings.name, **self._options)
        llm.phases.on_begin = lambda name: self._status.update(phase=name, share=None)
        llm.phases.on_share = lambda share: self._status.update(share=share)
        llm.start()
        service = Service(llm, self._settings.max_queued_requests, self._settings.model_name)
        self._port = Port(service, ray.util.get_node_ip_address(), restarts=True)
        self._port.start()
        self._status.update(state=READY, phase=None, share=None, seconds=dict(llm.phases.times))

    def _watch(self) -> None:
        """Ends the process when the engine has failed, for Ray to start it again, and the service with its owner."""
        began = time.monotonic()
        while self._port is not None:
            time.sleep(0.2)
            failure = self._llm.failure
            if failure is not None and not self._stopping.locked():
                logger.error("the engine has failed, the driver starts again: %s", failure)
                self._llm.close()
                os._exit(1)
            port = self._port
            if port is None or not self._settings.owned:
                continue
            silent = time.monotonic() - max(port.owner_seen_at, began)
            patience = OWNER_SECONDS if port.owner_seen_at else OWNER_SECONDS + 2 * SILENCE_SECONDS
            if port.owner_left or silent > patience:
                logger.warning("the owner has left; the service ends")
                self.stop(0.0)
                self._end()

    def _wait_for_owner(self) -> None:
        """Gives whoever started the service time to read why it failed."""
        if self._settings.owned:
            time.sleep(OWNER_SECONDS)
            self._end()

    def _end(self) -> None:
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


class Locator:
    """Finds a service's address, again and again. Raises ServiceUnavailable when there is none."""

    def __init__(self, name: str, address: str = "auto") -> None:
        """address: of the Ray cluster, as in ray.init."""
        self.name = name
        if not ray.is_initialized():
            join_cluster(address)
        find_actor(name)

    def __call__(self) -> ChannelAddress:
        deadline = time.monotonic() + LOOKUP_SECONDS
        while True:
            try:
                address = ray.get(find_actor(self.name).address.remote(), timeout=LOOKUP_SECONDS)
            except ServiceUnavailable:
                raise
            except ray.exceptions.RayTaskError as error:
                raise ServiceUnavailable(str(error.cause or error)) from error
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                raise ServiceUnavailable(f"service {self.name!r} does not answer: {error}") from error
            if address is not None:
                return address
            if time.monotonic() > deadline:
                raise ServiceUnavailable(f"service {self.name!r} is still starting")
            time.sleep(PING_SECONDS / 5)


def join_cluster(address: str) -> None:
    """Connects this process to a running Ray cluster. Raises ServiceUnavailable when there is none."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ServiceUnavailable(f"no Ray cluster at {address}: {error}") from error


def find_actor(name: str) -> Any:
    """The actor of a service. Raises ServiceUnavailable when the cluster has none of that name."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise ServiceUnavailable(
            f"there is no service named {name!r} on this Ray cluster (`quadriga serve --name {name}` starts one)"
        ) from error


def start_service(options: Mapping[str, Any], settings: ServiceSettings, replace: bool) -> Any:
    """Makes the driver actor. Raises ConfigError when the name is taken and not to be replaced."""
    try:
        old = find_actor(settings.name)
    except ServiceUnavailable:
        old = None
    if old is not None:
        if not replace:
            raise ConfigError(
                f"a service named {settings.name!r} runs on this Ray cluster already; use another name, or --replace"
            )
        end_service(old, drain_seconds=0.0)
    return (
        ray.remote(DriverActor)
        .options(
            name=settings.name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=8,
            num_cpus=0,
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
