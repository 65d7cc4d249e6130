"""The Ray actor around a worker. Made remote by the driver; its calls set up, the channel then carries every step."""

from __future__ import annotations

import os

import ray
import torch.distributed as dist

from parallel.channel import ChannelAddress, ChannelClosed, WorkerChannel
from parallel.group import join_store, open_store
from workers.spec import WorkerReady, WorkerSpec
from workers.worker import Worker


class WorkerActor:
    """One rank in a process of its own, on the device that Ray assigned to it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.worker = Worker(spec)
        self._store: dist.TCPStore | None = None

    def node_ip(self) -> str:
        return ray.util.get_node_ip_address()

    def open_store(self, host: str) -> int:
        """Rank 0 opens the ranks' meeting point; returns its port."""
        self._store, port = open_store(host, self.spec.size, self.spec.start_timeout_seconds)
        return port

    def start(self, store_host: str | None, store_port: int, node_ip: str) -> WorkerReady:
        if self._store is None and store_host is not None:
            self._store = join_store(store_host, store_port, self.spec.size, self.spec.start_timeout_seconds)
        return self.worker.start(self._store, node_ip)

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
