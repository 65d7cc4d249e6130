"""The ranks that hold one model together, and the two collectives they use."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from parallel.errors import CollectiveError, GroupError
from parallel.shared_memory import SharedMemory, open_shared_memory
from parallel.symmetric import SymmetricSums, TorchPeers, open_symmetric


class TensorParallelGroup:
    """A process group whose ranks run the same steps in lockstep. With one rank, every collective is the identity.

    shared: the ranks' shared memory, when all of them are CPU ranks on one host.
    symmetric: what adds up small tensors of GPUs on one host; NCCL adds up the others.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        shared: SharedMemory | None = None,
        symmetric: SymmetricSums | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self.shared, self.symmetric = shared, symmetric

    @property
    def transport(self) -> str:
        """What carries the collectives, for the log."""
        if self.size == 1:
            return "none"
        if self.shared:
            return "shared memory"
        return dist.get_backend(self._group) + (" and symmetric memory" if self.symmetric else "")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` over all ranks, in place."""
        if self.shared is not None:
            return self.shared.all_reduce(tensor)
        if self.symmetric is not None and self.symmetric.takes(tensor):
            return self.symmetric.all_reduce(tensor)
        if self.size > 1:
            self._run(dist.all_reduce, tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stacks every rank's `tensor` (same shape everywhere): [size, *shape]."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        if self.shared is not None:
            return self.shared.all_gather(tensor)
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self._run(dist.all_gather, list(out.unbind(0)), tensor.contiguous())
        return out

    def smallest(self, value: int, device: torch.device) -> int:
        """The smallest of all ranks' values."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=device)
        self._run(dist.all_reduce, tensor, op=dist.ReduceOp.MIN)
        return int(tensor.item())

    def leave(self) -> None:
        """Ends a collective that this rank waits in, as far as its transport can do that. From any thread.

        The group is of no more use then; `renew` gives it another life.
        """
        if self.shared is not None:
            self.shared.leave()
        elif self.size > 1 and dist.is_initialized() and dist.get_backend(self._group) == "nccl":
            # Collectives of NCCL wait on the device, where nothing but this ends them. Gloo's see a closed connection.
            dist.distributed_c10d._abort_process_group(self._group)

    def renew(self, other: TensorParallelGroup) -> None:
        """Goes on as `other`, a group of the same rank and size that was just joined."""
        if (other.rank, other.size) != (self.rank, self.size):
            raise GroupError(f"rank {self.rank} of {self.size} cannot go on as rank {other.rank} of {other.size}")
        self._group, self.shared, self.symmetric = other._group, other.shared, other.symmetric

    def close(self) -> None:
        if self.shared is not None:
            self.shared.close()
            self.shared = None
        self.symmetric = None
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _run(self, collective: Callable[..., object], *tensors: object, **options: object) -> None:
        try:
            collective(*tensors, group=self._group, **options)
        except RuntimeError as error:  # Gloo's are of no other kind
            name = collective.__name__
            raise CollectiveError(f"rank {self.rank} of {self.size} failed in {name}: {error}") from error


def open_store(host: str, size: int, timeout_seconds: float) -> tuple[dist.TCPStore, int]:
    """Rank 0's meeting point, which listens on `host` alone; left to itself, torch would listen on every interface.

    The port is bound before it is returned, so no other process can take it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(address)
        listener.listen(1024)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            world_size=size,
            is_master=True,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


def join_store(host: str, port: int, size: int, timeout_seconds: float) -> dist.TCPStore:
    """The other ranks' way to the meeting point."""
    return dist.TCPStore(host, port, world_size=size, is_master=False, timeout=timedelta(seconds=timeout_seconds))


def join_group(
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    node_ip: str,
    timeout_seconds: float,
    symmetric_memory: bool = True,
) -> TensorParallelGroup:
    """Joins the group: NCCL for CUDA tensors, Gloo on CPU, both on the interface that has `node_ip`.

    symmetric_memory: use it for small sums of CUDA tensors where it can be had.

    Raises GroupError when the ranks do not meet in time, or when two of them sit on one GPU.
    """
    name = interface_of(node_ip)
    if device.type == "cuda":
        refuse_shared_gpus(store, rank, size, gpu_of(device, node_ip), timeout_seconds)
    # A user's own choice of interface stands; otherwise a host name that resolves elsewhere would decide.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if node_ip != "127.0.0.1":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
        group = TensorParallelGroup(rank, size, dist.group.WORLD)
        # The first collective connects the ranks; better now than in the first step.
        shared = open_shared_memory(store, rank, size, timeout_seconds) if device.type == "cpu" else None
        if group.smallest(int(shared is not None), device):
            group = TensorParallelGroup(rank, size, dist.group.WORLD, shared)
        if backend == "nccl" and symmetric_memory and size > 1:
            map_peers = lambda: TorchPeers(dist.group.WORLD, device)  # noqa: E731
            smallest = lambda value: group.smallest(value, device)  # noqa: E731
            group.symmetric = open_symmetric(map_peers, smallest, rank, size, node_ip, device, store)
    except (RuntimeError, ValueError) as error:
        if not dist.is_initialized():
            # torch counts the groups of a process, by which ranks find each other. The attempt must not count: the one
            # that takes a lost rank's place has not made it, and both would wait for each other in vain.
            dist.distributed_c10d._world.group_count = 0
        advice = nccl_advice(name) if backend == "nccl" else ""
        raise GroupError(
            f"rank {rank} of {size} could not join its {backend} group over {name}: {error}{advice}"
        ) from error
    return group


def gpu_of(device: torch.device, node_ip: str) -> str:
    """A name of this GPU that no other GPU of the cluster has."""
    properties = torch.cuda.get_device_properties(device)
    # An index would not do: every worker sees its own GPU as the first. Without a UUID nothing can be told.
    return f"{node_ip} {properties.name} {getattr(properties, 'uuid', f'of process {os.getpid()}')}"


def refuse_shared_gpus(store: dist.Store, rank: int, size: int, gpu: str, timeout_seconds: float) -> None:
    """Every rank tells the others its GPU. Raises GroupError when two have the same, where NCCL would hang or fail."""
    store.set(f"gpu/{rank}", gpu)
    keys = [f"gpu/{other}" for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise GroupError(f"rank {rank} of {size} waited {timeout_seconds:g} s for the others' GPUs: {error}") from error
    places: dict[str, list[int]] = {}
    for other, key in enumerate(keys):
        places.setdefault(store.get(key).decode(), []).append(other)
    shared = {name: ranks for name, ranks in places.items() if len(ranks) > 1}
    if shared:
        found = "; ".join(f"ranks {', '.join(map(str, ranks))} on {name}" for name, ranks in shared.items())
        raise GroupError(
            f"NCCL needs a GPU of its own for every rank, but there are {found}. Use a tensor-parallel size of at most "
            "the number of GPUs, and let the cluster give each worker its own (CUDA_VISIBLE_DEVICES unset for Ray)"
        )


def nccl_advice(interface: str) -> str:
    """What to try when ranks cannot be connected, for the end of the message."""
    missing_peers = [
        f"{a} and {b}"
        for a in range(torch.cuda.device_count())
        for b in range(a)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if missing_peers:
        peers = f" GPUs {', '.join(missing_peers)} have no peer access: NCCL_P2P_DISABLE=1."
    elif torch.cuda.device_count() == 1:  # as every worker sees its own GPU alone
        peers = " Where GPUs have no peer access (`nvidia-smi topo -p2p r` shows it), set NCCL_P2P_DISABLE=1."
    else:
        peers = ""
    return (
        f".{peers} If {interface} does not reach the other nodes, set NCCL_SOCKET_IFNAME (now "
        f"{os.environ.get('NCCL_SOCKET_IFNAME', 'unset')}) and GLOO_SOCKET_IFNAME to the interface that does, on every "
        "node; NCCL_DEBUG=INFO says what NCCL tried"
    )


def interface_of(ip: str) -> str:
    """The network interface that has this address. Raises GroupError, listing what there is, when none has.

    Every address of 127.0.0.0/8 is the loopback interface's: several nodes on one machine may have one each.
    """
    ip, found = "127.0.0.1" if ip.startswith("127.") else ip, []
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6):
                found.append(f"{name} {address.address}")
                if address.address.split("%")[0] == ip:
                    return name
    raise GroupError(f"no network interface has address {ip}; this node has {', '.join(found)}")
