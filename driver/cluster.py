"""The Ray cluster under the workers: joined where one runs, else started for this process alone."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import ray
from ray._private import ray_constants, services

from driver.config import ConfigError
from driver.errors import end_anyway
from driver.launch import unreachable
from workers.cores import available_cores

logger = logging.getLogger("quadriga.cluster")

_OBJECT_STORE_BYTES = 80 << 20  # steps never travel through Ray's object store
_RANK, _MAX_RANKS = "quadriga_rank", 4096  # the resource that ranks take in a private cluster
_LONGEST_TEMPORARY_FOLDER = 25  # Ray adds some 65 bytes, our own folder's name 18
CLEANER_SECONDS = 30.0  # it gives Ray's processes 8 s itself
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
            end_anyway("Ray", ray.shutdown)
        if self.cleaner is not None:
            self.cleaner.stdin.close()
            try:
                self.cleaner.wait(timeout=CLEANER_SECONDS)
            except subprocess.TimeoutExpired:
                logger.error(
                    "the cleaner (process %d) has not removed %s within %g s; it goes on by itself",
                    *(self.cleaner.pid, self.folder, CLEANER_SECONDS),
                )


def _connect(address: str) -> _Connection:
    if ray.is_initialized():
        return _Connection(ours=False)
    address = named_address(address)
    if address == "local" or (address == "auto" and not join_running()):
        return _start_private()
    if address != "auto":
        try:
            join(address)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot reach a Ray cluster at {address}: {error}") from error
    return _Connection(ours=True)


def join_running() -> bool:
    """Joins a cluster that runs on this machine; False when there is none."""
    address = joinable()
    try:
        if address is None:
            return False
        join(address)
    except ConnectionError:
        return False
    logger.info("joined the running Ray cluster: %s", describe_nodes())
    return True


def joinable() -> str | None:
    """The address of a cluster that runs on this machine and is nobody's own: a private one ends with its program."""
    return next((address for address in running_clusters() if not _listens_on_loopback(address)), None)


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
        with _loopback_only(), _own_process_group():
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


def named_address(address: str) -> str:
    """The address that `auto` stands for where RAY_ADDRESS says so."""
    named = os.environ.get(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE)
    return named if named and address == "auto" else address


def running_clusters() -> list[str]:
    """Addresses of the Ray clusters that `auto` may stand for, best first; private ones of other programs come last."""
    named = os.environ.get(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE)
    if named:
        return [named]
    newest = services.find_bootstrap_address(None)
    found = services.find_gcs_addresses() or ({newest} if newest else set())
    return sorted(found, key=lambda address: (_listens_on_loopback(address), address != newest, address))


def join(address: str) -> None:
    """Connects this process to a running cluster; raises what ray.init does, and at once where nobody listens."""
    with _loopback_only() if _listens_on_loopback(address) else nullcontext():
        silent = unreachable(address)
        if silent is not None:
            raise ConnectionError(silent)
        if address in services.find_gcs_addresses():
            _use_token()
        with _one_attempt():
            ray.init(address=address, **_quiet())


@contextmanager
def _one_attempt() -> Iterator[None]:
    """Lets ray.init try once, which takes up to 40 s; it would try 20 times where a cluster ends in this moment."""
    name = "RAY_gcs_server_port_wait_time_s"
    given = os.environ.get(name)
    os.environ[name] = given or "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


def _listens_on_loopback(address: str) -> bool:
    """Whether the cluster is a private one. Others may be named by a loopback address and listen on another."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("127.0.0.1", "::1", "localhost") and address in services.find_gcs_addresses()


def _use_token() -> None:
    """Shows this user's token to a cluster of this machine, as Ray does for those that it finds by itself.

    `ray start` asks for it by default. Whoever has set RAY_AUTH_MODE has decided otherwise.
    """
    try:
        from ray._private.authentication import authentication_token_setup as tokens
    except ImportError:
        return  # of a Ray that knows none
    tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextmanager
def _own_process_group() -> Iterator[None]:
    """Puts the processes of a Ray that starts meanwhile in sessions, and so groups, of their own.

    A signal to this process's group, as service managers and `timeout` send it, would end them before the drain.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keeps the program's own handling of SIGTERM, which ray.init replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Makes a Ray that starts meanwhile listen on 127.0.0.1 alone, and lets one that does be joined.

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
