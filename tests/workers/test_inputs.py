"""A plan as tensors, on an example computed by hand with blocks of four tokens."""

from __future__ import annotations

import numpy as np
import torch

from scheduler.plan import Admission, Chunk, StepPlan
from workers.inputs import StepInputs, build_inputs
from workers.state import Rows

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def make_rows(
    tokens: dict[int, list[int]], computed: dict[int, int], blocks: dict[int, list[int]], decoding: list[int]
) -> Rows:
    """Rows in the middle of their lives."""
    rows = Rows(num_rows=6, max_blocks=8, block_size=BLOCK_SIZE)
    for row, known in tokens.items():
        rows.tokens[row] = np.array(known, np.int64)
        rows.computed[row] = computed[row]
        rows.block_table[row, : len(blocks[row])] = blocks[row]
        rows.num_blocks[row] = len(blocks[row])
    rows.decoding = np.array(decoding, np.int64)
    return rows


def mixed() -> tuple[StepPlan, Rows, torch.Tensor]:
    """Rows 3 and 1 prefill, 4 and 0 decode.

    row  chunk of tokens  blocks      slots
    3    5 to 8 of 9      9, 2, 6     2*4+1, 2*4+2, 2*4+3
    1    2 to 4 of 4      5           5*4+2, 5*4+3           ends its prompt
    4    token 6          1, 8        8*4+2
    0    token 4          7, 3        3*4
    """
    rows = make_rows(
        tokens={3: list(range(30, 39)), 1: [10, 11, 12, 13], 4: [40, 41], 0: [50, 51, 52]},
        computed={3: 5, 1: 2, 4: 6, 0: 4},
        blocks={3: [9, 2, 6], 1: [5], 4: [1, 8], 0: [7, 3]},
        decoding=[4, 0],
    )
    plan = StepPlan(0, 0, chunks=[Chunk(3, 5, 3, sample=False), Chunk(1, 2, 2, sample=True)], num_decodes=2)
    last_tokens = torch.tensor([90, 91, 92, 93, 94, 95])
    return plan, rows, last_tokens


def build(plan: StepPlan, rows: Rows, last_tokens: torch.Tensor) -> StepInputs:
    return build_inputs(plan, rows, last_tokens, CPU)


def test_tokens_lie_flat_chunks_first_then_decodes() -> None:
    inputs = build(*mixed())
    assert inputs.token_ids.tolist() == [35, 36, 37, 12, 13, 94, 90]
    assert inputs.positions.tolist() == [5, 6, 7, 2, 3, 6, 4]
    assert inputs.token_ids.dtype == inputs.positions.dtype == torch.int64


def test_every_token_has_its_slot() -> None:
    metadata = build(*mixed()).metadata
    assert metadata.slot_mapping.tolist() == [9, 10, 11, 22, 23, 34, 12]
    assert metadata.slot_mapping.dtype == torch.int64
    assert metadata.block_size == BLOCK_SIZE


def test_the_prefill_part_describes_the_chunks() -> None:
    part = build(*mixed()).metadata.prefill
    assert part.query_lens == [3, 2]
    assert part.seq_lens == [8, 4]
    assert part.query_start_loc.tolist() == [0, 3, 5]
    assert part.context_lens.tolist() == [8, 4]
    assert part.block_table[0].tolist() == [9, 2]
    assert part.block_table[1, :1].tolist() == [5]
    assert part.query_start_loc.dtype == part.context_lens.dtype == part.block_table.dtype == torch.int32


def test_the_decode_part_counts_each_rows_new_token() -> None:
    part = build(*mixed()).metadata.decode
    assert part.context_lens.tolist() == [7, 5]
    assert part.max_seq_len == 7
    assert part.block_table.tolist() == [[1, 8], [7, 3]]
    assert part.context_lens.dtype == part.block_table.dtype == torch.int32


def test_only_rows_whose_last_token_was_computed_are_sampled() -> None:
    """Row 3's chunk ends inside its prompt; row 1's ends it; both decodes yield a token."""
    inputs = build(*mixed())
    assert inputs.sampled_tokens.tolist() == [4, 5, 6]
    assert inputs.sampled_rows.tolist() == [1, 4, 0]
    assert inputs.next_positions.tolist() == [4, 7, 5]


def test_a_step_inside_a_prompt_samples_nothing() -> None:
    plan, rows, last_tokens = mixed()
    rows.decoding = rows.decoding[:0]
    plan.chunks = plan.chunks[:1]
    inputs = build(plan, rows, last_tokens)
    assert inputs.metadata.decode is None
    assert inputs.token_ids.tolist() == [35, 36, 37]
    assert inputs.sampled_tokens.shape == (0,)
    assert inputs.sampled_rows.shape == inputs.next_positions.shape == (0,)


def test_a_last_chunk_of_one_token_counts_as_prefill() -> None:
    """Its token comes from the prompt, not from what the row sampled last."""
    plan, rows, last_tokens = mixed()
    rows.computed[3] = 8
    plan.chunks = [Chunk(3, 8, 1, sample=True)]
    inputs = build(plan, rows, last_tokens)
    assert inputs.metadata.num_prefill_tokens == 1
    assert inputs.metadata.prefill.query_lens == [1]
    assert inputs.metadata.prefill.seq_lens == [9]
    assert inputs.metadata.decode.context_lens.tolist() == [7, 5]
    assert inputs.token_ids.tolist() == [38, 94, 90]
    assert inputs.metadata.slot_mapping.tolist() == [6 * 4, 34, 12]
    assert inputs.sampled_rows.tolist() == [3, 4, 0]
    assert inputs.next_positions.tolist() == [9, 7, 5]


def test_a_step_of_decodes_alone_has_no_prefill_part() -> None:
    plan, rows, last_tokens = mixed()
    plan.chunks = []
    inputs = build(plan, rows, last_tokens)
    assert inputs.metadata.prefill is None
    assert inputs.token_ids.tolist() == [94, 90]
    assert inputs.sampled_tokens.tolist() == [0, 1]
    assert inputs.sampled_rows.tolist() == [4, 0]


def test_positions_and_slots_go_on_from_step_to_step() -> None:
    """A prompt of six tokens in two chunks, then its first decode."""
    rows, last_tokens = Rows(2, 4, BLOCK_SIZE), torch.tensor([0, 77])
    first = StepPlan(
        0,
        0,
        admissions=[Admission(1, [1, 2, 3, 4, 5, 6], 0, 0.0, 0, 1.0, 0.0)],
        new_blocks=[(1, [3])],
        chunks=[Chunk(1, 0, 4, sample=False)],
    )
    rows.apply(first)
    assert build(first, rows, last_tokens).metadata.slot_mapping.tolist() == [12, 13, 14, 15]
    rows.advance(first)
    second = StepPlan(0, 1, new_blocks=[(1, [0])], chunks=[Chunk(1, 4, 2, sample=True)])
    rows.apply(second)
    inputs = build(second, rows, last_tokens)
    assert inputs.token_ids.tolist() == [5, 6]
    assert inputs.metadata.slot_mapping.tolist() == [0, 1]
    assert inputs.next_positions.tolist() == [6]
    rows.advance(second)
    rows.decoding = np.array([1])
    inputs = build(StepPlan(0, 2, num_decodes=1), rows, last_tokens)
    assert inputs.token_ids.tolist() == [77]
    assert inputs.positions.tolist() == [6]
    assert inputs.metadata.slot_mapping.tolist() == [2]
    assert inputs.next_positions.tolist() == [7]
