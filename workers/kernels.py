"""Compiled kernels of a shard on CPU. `attention/native.py` builds them; without them plain torch does the work."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from attention.native import FORMATS, NativeError, call, function, load_library
from parallel.shared_memory import COUNTER_BYTES, SLOT_BYTES, SharedMemory
from workers.cores import available_cores

logger = logging.getLogger("quadriga.worker")

SOURCES = tuple(
    Path(__file__).with_name(f"{name}.cpp")
    for name in ("linear", "ops", "sampling", "truncation", "exchange", "replay")
)


class Kernels:
    """The library's functions. Raises NativeError where they cannot be had."""

    def __init__(self) -> None:
        library = load_library(*SOURCES)
        self.pack = function(library, "quadriga_pack")
        self.lookup = function(library, "quadriga_lookup")
        self.multiply = function(library, "quadriga_multiply")
        self.norm = function(library, "quadriga_norm")
        self.rotate = function(library, "quadriga_rotate")
        self.gate = function(library, "quadriga_gate")
        self.gather = function(library, "quadriga_gather")
        self.best = function(library, "quadriga_best")
        self.candidates = function(library, "quadriga_candidates")
        self.weigh = function(library, "quadriga_weigh")
        self.cut = function(library, "quadriga_cut")
        self.nearest = function(library, "quadriga_nearest")
        self.replay = function(library, "quadriga_replay")
        self.all_reduce = function(library, "quadriga_all_reduce")


def find_kernels(device: torch.device) -> Kernels | None:
    """The kernels for this device, or None; where a CPU could have them, the log says why not and what that costs."""
    if device.type != "cpu":
        return None
    try:
        return Kernels()
    except NativeError as error:
        logger.warning(
            "the model runs on plain torch, because compiled kernels cannot be had (%s); "
            "a step with few tokens then takes several times as long",
            error,
        )
        return None


def compile_all_reduce(shared: SharedMemory, kernels: Kernels) -> None:
    """Lets the ranks' sums go without Python between a rank's arrival and its departure."""
    header, slots = shared.addresses()
    timeout_ns = int(shared.timeout_seconds * 1e9)
    # Being woken takes longer than the usual wait, so a rank with a core of its own polls that long first. Where ranks
    # share cores, one that polls holds up the one it waits for.
    spins = 2000 if shared.size <= available_cores() else 500
    segment = (header, COUNTER_BYTES, slots, SLOT_BYTES, shared.rank, shared.size, spins, timeout_ns)

    def reduce(tensor: torch.Tensor) -> int:
        return call(kernels.all_reduce, FORMATS[tensor.dtype], *segment, tensor.data_ptr(), tensor.numel())

    shared.reduce = reduce
