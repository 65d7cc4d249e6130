"""Decode steps of few rows as recordings of kernel calls: a step costs one call from Python instead of hundreds.

A recording is made by computing a step on inputs that stay where they are. To compute a later step of as many rows, its
inputs are copied there and the kernels are called again.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention.metadata import AttentionMetadata, DecodeMetadata
from attention.native import Recording, call
from workers.inputs import StepInputs
from workers.kernels import Kernels

logger = logging.getLogger("quadriga.worker")

MOST_ROWS = 16  # with more, computing takes so much longer than calling that memory is better spent otherwise


@dataclass(frozen=True, slots=True)
class _Step:
    """A recorded step. token_ids, positions, slots, contexts: [rows]; blocks: [rows, most blocks of a request]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    contexts: torch.Tensor
    blocks: torch.Tensor
    logits: torch.Tensor
    recording: Recording
    arguments: tuple[Any, Any]


class Replay:
    """compute: what turns decode inputs into logits; max_blocks: of one request."""

    def __init__(self, kernels: Kernels, compute: Callable[[StepInputs], torch.Tensor], max_blocks: int) -> None:
        self._kernels, self._compute, self._max_blocks = kernels, compute, max_blocks
        self._steps: dict[int, _Step] = {}
        self._refused = False

    def logits(self, inputs: StepInputs) -> tuple[torch.Tensor, int]:
        """[rows, own ids] fp32, good until the next step of as many rows, and the status of the kernels."""
        if self._refused or inputs.metadata.prefill is not None or len(inputs.token_ids) > MOST_ROWS:
            return self._compute(inputs), 0
        step = self._steps.get(len(inputs.token_ids))
        if step is None:
            return self._record(inputs), 0
        decode = inputs.metadata.decode
        step.token_ids.copy_(inputs.token_ids)
        step.positions.copy_(inputs.positions)
        step.slots.copy_(inputs.metadata.slot_mapping)
        step.contexts.copy_(decode.context_lens)
        step.blocks[:, : decode.block_table.shape[1]] = decode.block_table
        kernels, arrays = map(ctypes.addressof, step.arguments)
        return step.logits, call(self._kernels.replay, len(step.recording.calls), kernels, arrays)

    def _record(self, inputs: StepInputs) -> torch.Tensor:
        """Computes the step on copies of its inputs and keeps the calls, if they are all there was to it."""
        decode, slots = inputs.metadata.decode, inputs.metadata.slot_mapping.clone()
        rows, width = decode.block_table.shape
        blocks = torch.zeros((rows, max(width, self._max_blocks)), dtype=torch.int32)
        blocks[:, :width] = decode.block_table
        contexts = decode.context_lens.clone()
        lasting = replace(
            inputs,
            token_ids=inputs.token_ids.clone(),
            positions=inputs.positions.clone(),
            metadata=AttentionMetadata(
                slots, inputs.metadata.block_size, None, DecodeMetadata(contexts, blocks, decode.max_seq_len)
            ),
        )
        recording, watch = Recording(), _Watch()
        with recording.record(), watch:
            logits = self._compute(lasting)
        if watch.computing:
            self._refused = True
            logger.info("decode steps are not replayed: %s is no kernel", ", ".join(sorted(watch.computing)))
            return logits
        self._steps[rows] = _Step(
            lasting.token_ids, lasting.positions, slots, contexts, blocks, logits, recording, recording.as_arguments()
        )
        return logits


class _Watch(TorchDispatchMode):
    """Notes operations of torch that compute something: a replay would leave them out."""

    def __init__(self) -> None:
        super().__init__()
        self.computing: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func.overloadpacket is torch.ops.aten.empty):
            self.computing.add(str(func))
        return func(*args, **(kwargs or {}))
