"""The Ray actor around a worker. Its calls set up; the step channel then carries every step.

The driver imports this module to make the actor, so torch is imported only inside it, where the worker runs.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import ray

from parallel.channel import ChannelAddress, ChannelClosed, WorkerChannel
from workers.spec import WorkerPlace, WorkerReady, WorkerSpec

if TYPE_CHECKING:
    from workers.worker import Worker

LEAVE_SECONDS = 1.5  # what a driver that lives gets to tell a rank whose connection broke that the epoch is over


class WorkerActor:
    """One rank in a process of its own, on the device that Ray assigned to it.

    `start` and `serve` alternate in one thread, an epoch each; the methods of the group "watch" are answered meanwhile.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.worker: Worker | None = None
        self._store: Any = None
        self._share = 0.0
        self._busy = threading.Lock()  # held by `start` and `serve`
        self._broken = False
        self._leaving = threading.Event()

    def place(self) -> WorkerPlace:
        return WorkerPlace(ray.util.get_node_ip_address(), os.getpid())

    def open_store(self, host: str) -> int:
        """Rank 0 opens the ranks' meeting point; returns its port."""
        from parallel.group import open_store

        self._store, port = open_store(host, self.spec.size, self.spec.start_timeout_seconds)
        return port

    def start(self, store_host: str | None, store_port: int, node_ip: str, ranks_here: int) -> WorkerReady:
        """Joins the other ranks, where there are any, and loads the shard, unless an earlier epoch has; see Worker."""
        from parallel.errors import GroupError
        from parallel.group import join_store
        from workers.worker import Worker

        with self._busy:
            self._leaving.clear()
            if store_host is None or self.spec.rank > 0:
                self._store = None
            if store_host is not None and self._store is None:
                self._store = join_store(store_host, store_port, self.spec.size, self.spec.start_timeout_seconds)
            if self.worker is not None and self.worker.ready is not None:
                try:
                    return self.worker.rejoin(self._store, node_ip, ranks_here)
                except GroupError:  # another rank's doing
                    raise
                except BaseException:
                    self._broken = True
                    raise
            self._broken = True  # until it is known to be whole
            self.worker = Worker(self.spec)
            ready = self.worker.start(self._store, node_ip, ranks_here, self._set_share)
            self._broken = False
            return ready

    def serve(self, address: ChannelAddress) -> str:
        """Carries out plans until the epoch is over. Returns why it is, where that is not this rank's doing.

        Ends the process when the driver is simply gone.
        """
        from parallel.errors import CollectiveError
        from parallel.shared_memory import RankMissingError

        with self._busy:
            if self._leaving.is_set():
                return "it has left"  # that epoch was over before it began
            channel = WorkerChannel(address, self.spec.rank)
            try:
                self.worker.serve(channel)
            except ChannelClosed as closed:
                if not (closed.farewell or self._leaving.wait(LEAVE_SECONDS)):
                    os._exit(1)  # nobody is left to report to, and nothing here may outlive the driver
                return str(closed)
            except (CollectiveError, RankMissingError) as error:
                return str(error)
            except BaseException as error:
                if self._leaving.is_set():  # a collective that was ended may raise anything
                    return str(error)
                self._broken = True
                raise
            finally:
                channel.close()

    @ray.method(concurrency_group="watch")
    def loaded(self) -> float:
        """How much of the weights is loaded, in [0, 1]; answered while `start` runs."""
        return self._share

    @ray.method(concurrency_group="watch")
    def leave(self, seconds: float) -> bool:
        """Ends the epoch for this rank. Returns whether it stands ready for the next one, weights and all, in time."""
        self._leaving.set()
        if self.worker is not None:
            self.worker.group.leave()
        if not self._busy.acquire(timeout=seconds):
            return False
        self._busy.release()
        return not self._broken and self.worker is not None and self.worker.ready is not None

    @ray.method(concurrency_group="watch")
    def stacks(self) -> str:
        """What every thread of this process is doing."""
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read().decode(errors="replace")

    def _set_share(self, share: float) -> None:
        self._share = share
