"""A step as one call: the model's kernel calls are recorded first and then carried out together by a team of threads.

Nothing waits for Python between two kernels, nor for a thread that the system has put aside (`vector.h`). Steps of few
tokens come again and again in the same shapes: their recordings are kept, on inputs that stay where they are, and cost
no more Python than copying the inputs there.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from attention.native import Recording, call
from workers.inputs import StepInputs
from workers.kernels import Kernels

logger = logging.getLogger("quadriga.worker")

MOST_TOKENS = 256  # with more, noting the calls takes little beside carrying them out
MOST_KEPT = 160  # recordings, of some 50 KiB each
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
        if self._keeps:  # few sizes, so that steps that grow little by little do not each leave memory behind
            size = 1 << max(size - 1, 0).bit_length()
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


class _Kind(NamedTuple):
    """What steps have in common that one recording serves."""

    compute: Compute
    tokens: int
    chunks: int
    decodes: int
    sampled: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """A recorded step. inputs stay where they are; the result's place in the pool, shape and dtype."""

    inputs: StepInputs
    recording: Recording
    arrays: tuple[ctypes.Array, ctypes.Array]
    result: tuple[int, Sequence[int], torch.dtype]


class Replay:
    """max_blocks: of one request."""

    def __init__(self, kernels: Kernels, max_blocks: int) -> None:
        self._kernels, self._max_blocks = kernels, max_blocks
        self._lasting, self._passing = Pool(keeps=True), Pool(keeps=False)
        self._kept: OrderedDict[_Kind, _Kept] = OrderedDict()  # the longest unused first
        self._watched: set[bool] = set()

    def run(self, compute: Compute, inputs: StepInputs) -> tuple[torch.Tensor, int]:
        """compute(inputs), and the status of its kernels. The result is good until the next run.

        Raises NotRecordable.
        """
        kind = _kind(compute, inputs)
        if kind.tokens > MOST_TOKENS:
            result, recording = self._record(compute, inputs, self._passing)
            return result, self._carry_out(recording, recording.arrays())
        if kind not in self._kept:
            if len(self._kept) == MOST_KEPT:
                self._kept.popitem(last=False)
            lasting = _lasting(inputs, self._max_blocks)
            result, recording = self._record(compute, lasting, self._lasting)
            place = (self._lasting.index(result), result.shape, result.dtype)
            self._kept[kind] = _Kept(lasting, recording, recording.arrays(), place)
            del result
        self._kept.move_to_end(kind)
        kept = self._kept[kind]
        _copy(inputs, kept.inputs)
        status = self._carry_out(kept.recording, kept.arrays)
        return self._lasting.tensor(*kept.result), status

    def _record(self, compute: Compute, inputs: StepInputs, pool: Pool) -> tuple[torch.Tensor, Recording]:
        """The first step of a kind is watched for anything that is no kernel."""
        pool.begin()
        recording, decodes_alone = Recording(pool.allocate), inputs.metadata.prefill is None
        if decodes_alone in self._watched:
            with recording.record():
                return compute(inputs), recording
        with recording.record(), _Watch() as watch:
            result = compute(inputs)
        if watch.computing:
            raise NotRecordable(", ".join(sorted(watch.computing)))
        self._watched.add(decodes_alone)
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


def _kind(compute: Compute, inputs: StepInputs) -> _Kind:
    prefill, decode = inputs.metadata.prefill, inputs.metadata.decode
    return _Kind(
        compute=compute,
        tokens=len(inputs.token_ids),
        chunks=len(prefill.query_lens) if prefill else 0,
        decodes=decode.num_tokens if decode else 0,
        sampled=len(inputs.sampled_tokens),
    )


def _lasting(inputs: StepInputs, max_blocks: int) -> StepInputs:
    """Room for the inputs of any step of the same kind. The lengths that the host knows are this step's."""
    prefill, decode = inputs.metadata.prefill, inputs.metadata.decode
    if prefill:
        prefill = PrefillMetadata(
            torch.empty_like(prefill.query_start_loc),
            torch.empty_like(prefill.context_lens),
            _widened(prefill.block_table, max_blocks),
            prefill.query_lens,
            prefill.seq_lens,
        )
    if decode:
        blocks = _widened(decode.block_table, max_blocks)
        decode = DecodeMetadata(torch.empty_like(decode.context_lens), blocks, decode.max_seq_len)
    slots = torch.empty_like(inputs.metadata.slot_mapping)
    return replace(
        inputs,
        token_ids=torch.empty_like(inputs.token_ids),
        positions=torch.empty_like(inputs.positions),
        metadata=AttentionMetadata(slots, inputs.metadata.block_size, prefill, decode),
        sampled_tokens=torch.empty_like(inputs.sampled_tokens),
    )


def _widened(block_table: torch.Tensor, max_blocks: int) -> torch.Tensor:
    rows, width = block_table.shape
    return torch.zeros((rows, max(width, max_blocks)), dtype=torch.int32)


def _copy(inputs: StepInputs, to: StepInputs) -> None:
    to.token_ids.copy_(inputs.token_ids)
    to.positions.copy_(inputs.positions)
    to.sampled_tokens.copy_(inputs.sampled_tokens)
    to.metadata.slot_mapping.copy_(inputs.metadata.slot_mapping)
    prefill = inputs.metadata.prefill
    if prefill:
        to.metadata.prefill.query_start_loc.copy_(prefill.query_start_loc)
    for part, room in ((prefill, to.metadata.prefill), (inputs.metadata.decode, to.metadata.decode)):
        if part:
            room.context_lens.copy_(part.context_lens)
            room.block_table[:, : part.block_table.shape[1]] = part.block_table


def _aligned(size: int) -> np.ndarray:
    """Bytes that begin where a cache line does."""
    array = np.empty(size + _ALIGNMENT, np.uint8)
    start = -array.ctypes.data % _ALIGNMENT
    return array[start : start + size]
