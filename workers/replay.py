"""A step as one call: the model's kernel calls are recorded first and then carried out together by a team of threads.

Nothing waits for Python between two kernels, nor for a thread that the system has put aside (`vector.h`). Decode steps
of few rows come again and again: their recordings are kept, on inputs that stay where they are, and cost no more Python
than copying the inputs there.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention.metadata import AttentionMetadata, DecodeMetadata
from attention.native import Recording, call
from workers.inputs import StepInputs
from workers.kernels import Kernels

logger = logging.getLogger("quadriga.worker")

MOST_ROWS = 64  # with more, noting the calls takes little beside carrying them out
_ALIGNMENT = 64

Compute = Callable[[StepInputs], torch.Tensor]


class NotRecordable(RuntimeError):
    """A step that does more than call kernels."""


class Pool:
    """Memory for recordings that are carried out one after another: free again once no tensor looks at it."""

    def __init__(self, keeps: bool) -> None:
        """keeps: whether memory stays where it is for good, because recordings refer to it."""
        self._keeps = keeps
        self._arrays: list[np.ndarray] = []
        self._outgrown: list[np.ndarray] = []

    def begin(self) -> None:
        """A new recording begins, and the last one has been carried out."""
        self._outgrown.clear()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        free = [i for i, count in enumerate(_references(self._arrays)) if count == _UNUSED]
        fitting = [i for i in free if len(self._arrays[i]) >= size]
        if fitting:
            index = min(fitting, key=lambda i: len(self._arrays[i]))
        else:
            if free and not self._keeps:
                # Calls that are noted but not carried out yet may still refer to it.
                self._outgrown.append(self._arrays.pop(max(free, key=lambda i: len(self._arrays[i]))))
            index = len(self._arrays)
            self._arrays.append(_aligned(size))
        return self.tensor(index, shape, dtype)

    def tensor(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The beginning of one array."""
        size = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(self._arrays[index])[:size].view(dtype).view(tuple(shape))

    def index(self, tensor: torch.Tensor) -> int:
        """The array that a tensor of this pool lies in."""
        addresses = [array.ctypes.data for array in self._arrays]
        return addresses.index(tensor.data_ptr())


@dataclass(frozen=True, slots=True)
class _Kept:
    """A recorded decode step. inputs stay where they are; the result's place in the pool, shape and dtype."""

    inputs: StepInputs
    recording: Recording
    arrays: tuple[ctypes.Array, ctypes.Array]
    result: tuple[int, Sequence[int], torch.dtype]


class Replay:
    """max_blocks: of one request."""

    def __init__(self, kernels: Kernels, max_blocks: int) -> None:
        self._kernels, self._max_blocks = kernels, max_blocks
        self._lasting, self._passing = Pool(keeps=True), Pool(keeps=False)
        self._kept: dict[int, _Kept] = {}
        self._watched: set[bool] = set()

    def run(self, compute: Compute, inputs: StepInputs) -> tuple[torch.Tensor, int]:
        """compute(inputs), and the status of its kernels. The result is good until the next run.

        compute: the same function for all steps of decodes alone. Raises NotRecordable.
        """
        rows = len(inputs.token_ids)
        if inputs.metadata.prefill is not None or rows > MOST_ROWS:
            result, recording = self._record(compute, inputs, self._passing)
            return result, self._carry_out(recording, recording.arrays())
        if rows not in self._kept:
            lasting = _lasting(inputs, self._max_blocks)
            result, recording = self._record(compute, lasting, self._lasting)
            place = (self._lasting.index(result), result.shape, result.dtype)
            self._kept[rows] = _Kept(lasting, recording, recording.arrays(), place)
            del result
        kept = self._kept[rows]
        _copy(inputs, kept.inputs)
        status = self._carry_out(kept.recording, kept.arrays)
        return self._lasting.tensor(*kept.result), status

    def _record(self, compute: Compute, inputs: StepInputs, pool: Pool) -> tuple[torch.Tensor, Recording]:
        """The first step of a kind is watched for anything that is no kernel."""
        pool.begin()
        recording, kind = Recording(pool.allocate), inputs.metadata.prefill is None
        if kind in self._watched:
            with recording.record():
                return compute(inputs), recording
        with recording.record(), _Watch() as watch:
            result = compute(inputs)
        if watch.computing:
            raise NotRecordable(", ".join(sorted(watch.computing)))
        self._watched.add(kind)
        return result, recording

    def _carry_out(self, recording: Recording, arrays: tuple[ctypes.Array, ctypes.Array]) -> int:
        addresses = map(ctypes.addressof, arrays)
        return call(self._kernels.replay, torch.get_num_threads(), len(recording.calls), *addresses)


class _Watch(TorchDispatchMode):
    """Notes operations of torch that compute something: they would see memory that no kernel has written yet."""

    def __init__(self) -> None:
        super().__init__()
        self.computing: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here. True would have torch import its compiler, more than a second, in the first step.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func.overloadpacket is torch.ops.aten.empty):
            self.computing.add(str(func))
        return func(*args, **(kwargs or {}))


def _references(arrays: list[np.ndarray]) -> list[int]:
    """How often each is referred to. Every tensor's memory that is made of an array holds a reference to it."""
    return [sys.getrefcount(array) for array in arrays]


_UNUSED = _references([np.empty(1)])[0]


def _lasting(inputs: StepInputs, max_blocks: int) -> StepInputs:
    """Room for the inputs of any decode step of as many rows."""
    decode = inputs.metadata.decode
    rows, width = decode.block_table.shape
    blocks = torch.zeros((rows, max(width, max_blocks)), dtype=torch.int32)
    part = DecodeMetadata(torch.empty_like(decode.context_lens), blocks, decode.max_seq_len)
    slots = torch.empty_like(inputs.metadata.slot_mapping)
    return replace(
        inputs,
        token_ids=torch.empty_like(inputs.token_ids),
        positions=torch.empty_like(inputs.positions),
        metadata=AttentionMetadata(slots, inputs.metadata.block_size, None, part),
    )


def _copy(inputs: StepInputs, to: StepInputs) -> None:
    to.token_ids.copy_(inputs.token_ids)
    to.positions.copy_(inputs.positions)
    to.metadata.slot_mapping.copy_(inputs.metadata.slot_mapping)
    decode, room = inputs.metadata.decode, to.metadata.decode
    room.context_lens.copy_(decode.context_lens)
    room.block_table[:, : decode.block_table.shape[1]] = decode.block_table


def _aligned(size: int) -> np.ndarray:
    """Bytes that begin where a cache line does."""
    array = np.empty(size + _ALIGNMENT, np.uint8)
    start = -array.ctypes.data % _ALIGNMENT
    return array[start : start + size]
