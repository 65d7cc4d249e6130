"""A plan as the tensors of one step. Prefill chunks lie first, in plan order, decodes after them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from scheduler.plan import StepPlan
from workers.state import Rows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the model and the sampler need.

    token_ids, positions: [tokens] int64 on the device.
    sampled_tokens: [s] int64, which of the step's tokens yield a next token; sampled_rows: their rows, on the host.
    next_positions: [s] int64 on the host, the positions of the tokens to be sampled.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    sampled_tokens: torch.Tensor
    sampled_rows: np.ndarray
    next_positions: np.ndarray


def build_inputs(plan: StepPlan, rows: Rows, last_tokens: torch.Tensor, device: torch.device) -> StepInputs:
    """last_tokens: [rows] int64 on the device, each row's newest sampled token; decodes never wait for the host."""
    decoding, block_size = rows.decoding, rows.block_size
    chunk_rows = [chunk.row for chunk in plan.chunks]
    token_rows = np.concatenate([np.repeat(chunk_rows, [c.length for c in plan.chunks]), decoding]).astype(np.int64)
    positions = np.concatenate(
        [*(np.arange(c.start, c.start + c.length) for c in plan.chunks), rows.computed[decoding]]
    ).astype(np.int64)
    blocks = rows.block_table[token_rows, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size

    prompt = [rows.tokens[c.row][c.start : c.start + c.length] for c in plan.chunks]
    token_ids = to_device(np.concatenate(prompt) if prompt else np.empty(0, np.int64), device)
    if len(decoding):
        token_ids = torch.cat((token_ids, last_tokens[to_device(decoding, device)]))

    ends = np.cumsum([c.length for c in plan.chunks], dtype=np.int64)
    sampling = np.array([c.sample for c in plan.chunks], bool)
    num_prefill = int(ends[-1]) if len(ends) else 0
    sampled_tokens = np.concatenate([ends[sampling] - 1, num_prefill + np.arange(len(decoding))]).astype(np.int64)
    return StepInputs(
        token_ids=token_ids,
        positions=to_device(positions, device),
        metadata=AttentionMetadata(
            slot_mapping=to_device(slots, device),
            block_size=block_size,
            prefill=_prefill(plan, rows, ends, device) if plan.chunks else None,
            decode=_decode(rows, device) if len(decoding) else None,
        ),
        sampled_tokens=to_device(sampled_tokens, device),
        sampled_rows=token_rows[sampled_tokens],
        next_positions=positions[sampled_tokens] + 1,
    )


def _prefill(plan: StepPlan, rows: Rows, ends: np.ndarray, device: torch.device) -> PrefillMetadata:
    seq_lens = [chunk.start + chunk.length for chunk in plan.chunks]
    width = -(-max(seq_lens) // rows.block_size)
    return PrefillMetadata(
        query_start_loc=to_device(np.concatenate([[0], ends]).astype(np.int32), device),
        context_lens=to_device(np.array(seq_lens, np.int32), device),
        block_table=to_device(rows.block_table[[chunk.row for chunk in plan.chunks], :width], device),
        query_lens=[chunk.length for chunk in plan.chunks],
        seq_lens=seq_lens,
    )


def _decode(rows: Rows, device: torch.device) -> DecodeMetadata:
    seq_lens = rows.computed[rows.decoding] + 1
    width = -(-int(seq_lens.max()) // rows.block_size)
    return DecodeMetadata(
        context_lens=to_device(seq_lens.astype(np.int32), device),
        block_table=to_device(rows.block_table[rows.decoding, :width], device),
        max_seq_len=int(seq_lens.max()),
    )


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, or on CPU the array itself. Through pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy in pinned memory, and the event after which it may be read; of a tensor on CPU itself, at once."""
    if tensor.device.type != "cuda":
        return tensor, None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return host, done
