"""The Ray actor around a worker. Its calls set up; the step channel then carries every step.

The driver imports this module to make the actor, so torch is imported only inside it, where the worker runs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

from parallel.channel import ChannelAddress, ChannelClosed, WorkerChannel
from workers.spec import WorkerReady, WorkerSpec

if TYPE_CHECKING:
    from workers.worker import Worker


class WorkerActor:
    """One rank in a process of its own, on the device that Ray assigned to it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.worker: Worker | None = None
        self._store: Any = None
        self._share = 0.0

    def node_ip(self) -> str:
        return ray.util.get_node_ip_address()

    def open_store(self, host: str) -> int:
        """Rank 0 opens the ranks' meeting point; returns its port."""
        from parallel.group import open_store

        self._store, port = open_store(host, self.spec.size, self.spec.start_timeout_seconds)
        return port

    def start(self, store_host: str | None, store_port: int, node_ip: str, ranks_here: int) -> WorkerReady:
        """Joins the other ranks, where there are any, and loads the shard; see Worker.start."""
        from parallel.group import join_store
        from workers.worker import Worker

        self.worker = Worker(self.spec)
        if self._store is None and store_host is not None:
            self._store = join_store(store_host, store_port, self.spec.size, self.spec.start_timeout_seconds)
        return self.worker.start(self._store, node_ip, ranks_here, self._set_share)

    @ray.method(concurrency_group="watch")
    def loaded(self) -> float:
        """How much of the weights is loaded, in [0, 1]; answered while `start` runs."""
        return self._share

    def _set_share(self, share: float) -> None:
        self._share = share

    def serve(self, address: ChannelAddress) -> None:
        """Carries out plans until the driver says goodbye. Ends the process when the driver is simply gone."""
        channel = WorkerChannel(address, self.spec.rank)
        try:
            self.worker.serve(channel)
        except ChannelClosed as closed:
            if not closed.farewell:
                os._exit(1)  # nobody is left to report to, and nothing here may outlive the driver
        finally:
            channel.close()
