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
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import ray
from ray._private import ray_constants

from driver.config import ConfigError
from workers.cores import available_cores

logger = logging.getLogger("quadriga.cluster")

_OBJECT_STORE_BYTES = 80 << 20  # steps never travel through Ray's object store
_RANK, _MAX_RANKS = "quadriga_rank", 4096  # the resource that ranks take in a private cluster
_LONGEST_TEMPORARY_FOLDER = 25  # Ray adds some 65 bytes, our own folder's name 18
_CLEANER = Path(__file__).with_name("cleaner.py")


class Cluster:
    """A share in this process's connection to Ray: the last one to close leaves the cluster.

    private: whether this process has started the cluster, for itself alone.
    """

    _shares: ClassVar[int] = 0
    _connection: ClassVar[_Connection | None] = None

    def __init__(self, address: str, size: int) -> None:
        """address: as in EngineConfig. Raises ConfigError when the named cluster cannot be reached."""
        if Cluster._connection is None:
            with _own_sigterm_handler():
                Cluster._connection = _connect(address)
        Cluster._shares += 1
        self.private = Cluster._connection.folder is not None
        self._closed = False
        if self.private and size > available_cores():
            logger.warning("%d ranks share %d CPU cores; they will wait for each other", size, available_cores())

    def bundle(self, device: str) -> dict[str, float]:
        """The resources of one rank's place. In a private cluster, where only ranks run, they may share cores."""
        own = {_RANK: 1.0} if self._has_rank_places() else {"CPU": 1.0}
        return {"GPU": 1.0, **own} if device == "cuda" else own

    def _has_rank_places(self) -> bool:
        """Whether the cluster is a private one, of this process or of the one that started the driver."""
        return self.private or _RANK in ray.cluster_resources()

    def close(self) -> None:
        """Gives up the share. A cluster that was started here ends with the last one, and its folder goes."""
        if self._closed:
            return
        self._closed = True
        Cluster._shares -= 1
        if Cluster._shares == 0:
            connection, Cluster._connection = Cluster._connection, None
            connection.close()


@dataclass(slots=True)
class _Connection:
    """folder, cleaner: of a cluster that was started here. ours: whether it was us who connected."""

    ours: bool
    folder: str | None = None
    cleaner: subprocess.Popen | None = None

    def close(self) -> None:
        if self.ours:
            ray.shutdown()
        if self.cleaner is not None:
            self.cleaner.stdin.close()
            self.cleaner.wait(timeout=30)


def _connect(address: str) -> _Connection:
    if ray.is_initialized():
        return _Connection(ours=False)
    if address == "local" or (address == "auto" and not _join_running()):
        return _start_private()
    if address != "auto":
        try:
            ray.init(address=address, **_quiet())
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot reach a Ray cluster at {address}: {error}") from error
    return _Connection(ours=True)


def _join_running() -> bool:
    try:
        ray.init(address="auto", **_quiet())
    except ConnectionError:
        return False
    logger.info("joined the running Ray cluster: %s", describe_nodes())
    return True


def _start_private() -> _Connection:
    """A Ray for this process alone. A small cleaner process outlives it to end what a killed driver leaves."""
    folder = tempfile.mkdtemp(prefix="quadriga-", dir=_short_temporary_folder())
    cleaner = subprocess.Popen(
        [sys.executable, "-S", str(_CLEANER), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    connection = _Connection(ours=True, folder=folder, cleaner=cleaner)
    try:
        with _loopback_only():
            ray.init(
                address="local",
                num_cpus=available_cores(),
                resources={_RANK: float(_MAX_RANKS)},
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=folder,
                **_quiet(),
            )
    except BaseException:
        connection.close()
        raise
    return connection


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
