"""Small sums between the GPUs of one host through memory that all of them map (torch's symmetric memory).

    tensor --copy--> this rank's buffer | kernel: meet the others, read all buffers and add, meet again | --> tensor

Everything runs on the current stream and nothing waits on the host. The kernels meet those of the other ranks before
they read and again before they end, so that the next copy into the buffer overtakes nobody, and they reset the flags by
which they meet, so that a CUDA graph may hold them and be replayed. They add in the order of the ranks, or each element
on one rank alone, so all ranks get the same bits. (torch: CUDASymmetricMemoryOps.cu.)
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

logger = logging.getLogger("quadriga.worker")

# Where torch's own choice among the same algorithms changes (intra_node_comm.cu). Beyond, NCCL is at home.
ONE_SHOT_BYTES = 256 << 10
TWO_SHOT_BYTES = 10 << 20
DTYPES = (torch.bfloat16, torch.float32)  # the kernels know no others
ALIGNMENT = 16  # bytes that a thread moves at once
MAPPING_SECONDS = 60.0
MOST_RANKS = 8


class Peers(Protocol):
    """A buffer [TWO_SHOT_BYTES] uint8 that the other ranks can read, and the kernels over it.

    All ranks make the same calls in the same order with equal shapes. staged: a view of the beginning of the buffer.
    """

    buffer: torch.Tensor

    def one_shot(self, staged: torch.Tensor, out: torch.Tensor) -> None:
        """The sum of all ranks' staged tensors, to `out`: every rank reads all of every other."""

    def two_shot(self, staged: torch.Tensor) -> None:
        """The same in place: every rank adds a part and writes it to the others."""


class TorchPeers:
    """Maps the buffers of all ranks of the group. Raises RuntimeError where they cannot be."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        # Each worker sees one GPU, so all have the same index, which torch takes for the same GPU. That they are not
        # was made sure of when the group was joined. It also keeps torch from multicast, so there is none here.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        # Memory of its own: of a pool, it could be what an earlier group has mapped, with that one's peers.
        make = symmetric_memory._SymmetricMemory.empty_strided_p2p
        self.buffer = make((TWO_SHOT_BYTES,), (1,), torch.uint8, device)
        self._handle = symmetric_memory.rendezvous(self.buffer, group)
        self._name = group.group_name

    def one_shot(self, staged: torch.Tensor, out: torch.Tensor) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(staged, "sum", self._name, out)

    def two_shot(self, staged: torch.Tensor) -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(staged, "sum", self._name)


class SymmetricSums:
    """Adds up tensors that are small enough. What it takes depends on dtype, shape and layout, equal on all ranks."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def takes(self, tensor: torch.Tensor) -> bool:
        aligned = not (tensor.nbytes | tensor.storage_offset() * tensor.element_size()) % ALIGNMENT
        return tensor.dtype in DTYPES and 0 < tensor.nbytes <= TWO_SHOT_BYTES and aligned and tensor.is_contiguous()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor that it takes over all ranks, in place."""
        staged = self._peers.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor)
        if tensor.nbytes <= ONE_SHOT_BYTES:
            self._peers.one_shot(staged, tensor)
        else:
            self._peers.two_shot(staged)
            tensor.copy_(staged)
        return tensor


Smallest = Callable[[int], int]


def open_symmetric(
    map_peers: Callable[[], Peers],
    smallest: Smallest,
    rank: int,
    size: int,
    node_ip: str,
    device: torch.device,
    store: dist.Store | None = None,
) -> SymmetricSums | None:
    """What adds up small tensors, or None where some rank cannot; the log of rank 0 says why. All ranks call it.

    map_peers: makes this rank's Peers. smallest: of all ranks' values. store: the ranks' meeting point, which does not
    wait longer than MAPPING_SECONDS meanwhile.
    """
    if size > MOST_RANKS:
        return _without(rank, f"{size} ranks are more than {MOST_RANKS}")
    node = zlib.crc32(node_ip.encode())
    if smallest(node) != -smallest(-node):
        return _without(rank, "the ranks are on several nodes")
    if not smallest(int(_has_kernels(device))):
        return _without(rank, "a GPU is older than compute capability 8.0, or this torch has no such kernels")
    before = store.timeout if store is not None else None
    peers, problem = None, "another rank could not"
    try:
        if store is not None:
            store.set_timeout(timedelta(seconds=MAPPING_SECONDS))
        peers = map_peers()
    except (RuntimeError, ImportError, AttributeError) as error:  # of private parts of torch, too
        problem = str(error)
    finally:
        if store is not None:
            store.set_timeout(before)
    if not smallest(int(peers is not None)):
        return _without(rank, f"the ranks' memory cannot be mapped: {problem}")
    sums = SymmetricSums(peers)
    if not smallest(int(_adds_up(sums, rank, size, device))):
        return _without(rank, "its kernels added up wrongly when they were tried")
    return sums


def _without(rank: int, reason: str) -> None:
    if rank == 0:
        logger.info("no symmetric memory for small sums: %s", reason)


def _has_kernels(device: torch.device) -> bool:
    if not all(hasattr(torch.ops.symm_mem, name) for name in ("one_shot_all_reduce_out", "two_shot_all_reduce_")):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _adds_up(sums: SymmetricSums, rank: int, size: int, device: torch.device) -> bool:
    """Both kernels on numbers whose sum is known and exact, several times in a row."""
    total = size * (size + 1) // 2
    results = []
    for dtype in DTYPES:
        for nbytes in (ONE_SHOT_BYTES // 2, ONE_SHOT_BYTES * 2):
            pattern = torch.arange(nbytes // dtype.itemsize, device=device) % 7
            for step in range(3):
                tensor = ((rank + 1) * (pattern + step)).to(dtype)
                results.append((sums.all_reduce(tensor) == total * (pattern + step)).all())
    return bool(torch.stack(results).all())
