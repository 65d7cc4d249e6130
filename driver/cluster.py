"""The Ray cluster under the workers: joined where one runs, else started for this process alone."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray._private import ray_constants

from driver.config import ConfigError
from workers.cores import available_cores

logger = logging.getLogger("quadriga.cluster")

_OBJECT_STORE_BYTES = 80 << 20  # steps never travel through Ray's object store
_LONGEST_TEMPORARY_FOLDER = 25  # Ray adds some 65 bytes, our own folder's name 18
_CLEANER = Path(__file__).with_name("cleaner.py")


class Cluster:
    """This process's connection to Ray."""

    def __init__(self, address: str, size: int) -> None:
        """address: as in EngineConfig.ray_address. Raises ConfigError when the named cluster cannot be reached."""
        self._folder: str | None = None
        self._joined_before = ray.is_initialized()
        self._cleaner: subprocess.Popen | None = None
        if self._joined_before:
            return
        with _own_sigterm_handler():
            self._connect(address, size)

    def _connect(self, address: str, size: int) -> None:
        if address == "local" or (address == "auto" and not self._join_running()):
            self._start_private(size)
        elif address not in ("auto", "local"):
            self._join(address)

    def close(self) -> None:
        """Leaves the cluster; one that was started here ends, and its folder goes."""
        if self._joined_before:
            return
        ray.shutdown()
        if self._cleaner is not None:
            self._cleaner.stdin.close()
            self._cleaner.wait(timeout=30)
            self._cleaner = None

    def _join_running(self) -> bool:
        try:
            ray.init(address="auto", **_quiet())
        except ConnectionError:
            return False
        logger.info("joined the running Ray cluster: %s", describe_nodes())
        return True

    def _join(self, address: str) -> None:
        try:
            ray.init(address=address, **_quiet())
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot reach a Ray cluster at {address}: {error}") from error

    def _start_private(self, size: int) -> None:
        """A Ray for this process alone. A small cleaner process outlives it to end what a killed driver leaves."""
        cores = available_cores()
        if size > cores:
            logger.warning("%d ranks share %d CPU cores; they will wait for each other", size, cores)
        self._folder = tempfile.mkdtemp(prefix="quadriga-", dir=_short_temporary_folder())
        self._cleaner = subprocess.Popen(
            [sys.executable, "-S", str(_CLEANER), self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with _loopback_only():
                ray.init(
                    address="local",
                    num_cpus=max(size, cores),
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _temp_dir=self._folder,
                    **_quiet(),
                )
        except BaseException:
            self.close()
            raise


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keeps the program's own handling of SIGTERM, which ray.init replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Makes a Ray that starts meanwhile listen on 127.0.0.1 alone.

    Ray does so on Windows and macOS; on Linux it replaces a loopback address that it is given by one that others can
    reach. The switch between the two is read from the environment when ray is imported, and from this constant after.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR]


def _short_temporary_folder() -> str:
    """Where temporary files go, unless Ray's Unix sockets, whose paths end at 107 bytes, would not fit there."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= _LONGEST_TEMPORARY_FOLDER else "/tmp"


def describe_nodes() -> str:
    """What each live node of the cluster offers, for error messages."""
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"]
            nodes.append(
                f"{node['NodeManagerAddress']} with {resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
            )
    return "; ".join(nodes) or "no live node"


def _quiet() -> dict:
    """Worker output stays in Ray's logs: standard output belongs to the caller."""
    return {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
