"""A rank's rows: what the deltas make of them, and that a plan which assumes other rows is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler.plan import Admission, Chunk, PlanMismatch, StepPlan, block_weight, row_weight, rows_checksum
from workers.state import Rows

MAX_BLOCKS, BLOCK_SIZE = 6, 8


def admission(row: int, tokens: list[int]) -> Admission:
    return Admission(row, tokens, seed=100 + row, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1)


def checksum(*decoding: tuple[int, int, list[int]]) -> int:
    """What the driver sends for decoding rows of (row, computed tokens, block ids)."""
    weights = (
        row_weight(row, computed, sum(block_weight(i, block) for i, block in enumerate(blocks)))
        for row, computed, blocks in decoding
    )
    return rows_checksum(sum(weights))


def run(rows: Rows, *plans: StepPlan) -> None:
    for plan in plans:
        rows.apply(plan)
        rows.advance(plan)


def prompts() -> StepPlan:
    """Rows 2 and 0 start: 5 tokens in one chunk, and the first 3 of 8."""
    return StepPlan(
        0,
        0,
        admissions=[admission(2, [10, 11, 12, 13, 14]), admission(0, [20, 21, 22, 23, 24, 25, 26, 27])],
        new_blocks=[(2, [7, 3]), (0, [1])],
        chunks=[Chunk(2, 0, 5, sample=True), Chunk(0, 0, 3, sample=False)],
    )


def first_decode() -> StepPlan:
    """Row 2 decodes; row 0 goes on with its prompt and gets another block."""
    return StepPlan(
        0,
        1,
        new_blocks=[(0, [5])],
        chunks=[Chunk(0, 3, 4, sample=False)],
        join=[2],
        num_decodes=1,
        checksum=checksum((2, 5, [7, 3])),
    )


def both_decode() -> StepPlan:
    """Row 0 ends its prompt with a chunk of one token; row 2 decodes on."""
    return StepPlan(0, 2, chunks=[Chunk(0, 7, 1, sample=True)], num_decodes=1, checksum=checksum((2, 6, [7, 3])))


@pytest.fixture
def rows() -> Rows:
    return Rows(4, MAX_BLOCKS, BLOCK_SIZE)


def test_deltas_add_up(rows: Rows) -> None:
    run(rows, prompts())
    assert rows.tokens[2].tolist() == [10, 11, 12, 13, 14]
    assert rows.computed.tolist() == [3, 0, 5, 0]
    assert rows.block_table[2, :2].tolist() == [7, 3]
    assert rows.decoding.tolist() == []
    run(rows, first_decode())
    assert rows.computed.tolist() == [7, 0, 6, 0]
    assert rows.block_table[0, :2].tolist() == [1, 5]
    assert rows.decoding.tolist() == [2]
    run(rows, both_decode())
    assert rows.computed.tolist() == [8, 0, 7, 0]
    assert rows.next_step == 3


def test_a_steady_step_needs_no_deltas(rows: Rows) -> None:
    run(rows, prompts(), first_decode(), both_decode())
    for step, computed in ((3, 7), (4, 8)):
        run(rows, StepPlan(0, step, num_decodes=1, checksum=checksum((2, computed, [7, 3]))))
    assert rows.computed[2] == 9


def test_rows_decode_in_the_order_in_which_they_joined(rows: Rows) -> None:
    run(rows, prompts(), first_decode(), both_decode())
    together = checksum((2, 7, [7, 3]), (0, 8, [1, 5, 4]))
    run(rows, StepPlan(0, 3, new_blocks=[(0, [4])], join=[0], num_decodes=2, checksum=together))
    assert rows.decoding.tolist() == [2, 0]


def test_sampling_parameters_are_kept_with_the_row(rows: Rows) -> None:
    plan = prompts()
    plan.admissions[0] = replace(plan.admissions[0], seed=2**64 - 1)
    run(rows, plan)
    assert int(rows.seeds[2]) == 2**64 - 1
    assert (rows.temperature[2], rows.top_k[2], rows.top_p[2], rows.min_p[2]) == (0.5, 7, 0.9, 0.1)
    assert int(rows.seeds[0]) == 100


def test_a_row_may_leave_and_be_admitted_anew_in_one_plan(rows: Rows) -> None:
    run(rows, prompts(), first_decode(), both_decode())
    again = StepPlan(
        0,
        3,
        leave=[2],
        admissions=[admission(2, [30, 31])],
        new_blocks=[(2, [9])],
        chunks=[Chunk(2, 0, 2, sample=True)],
    )
    run(rows, again)
    assert rows.decoding.tolist() == []
    assert rows.tokens[2].tolist() == [30, 31]
    assert (rows.computed[2], rows.num_blocks[2], rows.block_table[2, 0]) == (2, 1, 9)
    run(rows, StepPlan(0, 4, join=[2], num_decodes=1, checksum=checksum((2, 2, [9]))))
    assert rows.decoding.tolist() == [2]


def test_only_the_named_rows_leave(rows: Rows) -> None:
    run(rows, prompts(), first_decode(), both_decode())
    together = checksum((2, 7, [7, 3]), (0, 8, [1, 5, 4]))
    run(rows, StepPlan(0, 3, new_blocks=[(0, [4])], join=[0], num_decodes=2, checksum=together))
    run(rows, StepPlan(0, 4, leave=[2], num_decodes=1, checksum=checksum((0, 9, [1, 5, 4]))))
    assert rows.decoding.tolist() == [0]


@pytest.mark.parametrize("step", [0, 2, 5])
def test_a_step_that_does_not_follow_is_refused(rows: Rows, step: int) -> None:
    run(rows, prompts())
    with pytest.raises(PlanMismatch, match=f"step {step}, epoch 0, but step 1, epoch 0 comes next"):
        rows.apply(replace(first_decode(), step=step))


@pytest.mark.parametrize(("epoch", "step"), [(3, 1), (1, 1), (1, 0), (2, 0)])
def test_a_plan_of_another_epoch_is_refused(rows: Rows, epoch: int, step: int) -> None:
    """Of an older one always; of a newer one unless it starts it; of the same one not from its start again."""
    run(rows, replace(prompts(), epoch=2))
    with pytest.raises(PlanMismatch, match=f"step {step}, epoch {epoch}, but step 1, epoch 2 comes next"):
        rows.apply(replace(first_decode(), epoch=epoch, step=step))


def test_a_new_epoch_starts_from_nothing(rows: Rows) -> None:
    run(rows, prompts(), first_decode())
    run(rows, StepPlan(1, 0, admissions=[admission(1, [5])], new_blocks=[(1, [0])], chunks=[Chunk(1, 0, 1, True)]))
    assert rows.epoch == 1
    assert rows.computed.tolist() == [0, 1, 0, 0]
    assert [tokens is None for tokens in rows.tokens] == [True, False, True, True]
    assert rows.decoding.tolist() == []
    run(rows, StepPlan(1, 1, join=[1], num_decodes=1, checksum=checksum((1, 1, [0]))))


def test_a_wrong_checksum_is_refused_with_both(rows: Rows) -> None:
    run(rows, prompts())
    right = first_decode().checksum
    with pytest.raises(PlanMismatch, match=f"step 1 assumes 1 decoding rows with checksum 0x5, .* 1 with {right:#x}"):
        rows.apply(replace(first_decode(), checksum=5))


@pytest.mark.parametrize(
    "assumed",
    [(2, 4, [7, 3]), (2, 5, [3, 7]), (2, 5, [7]), (2, 5, [7, 3, 0]), (2, 5, [7, 4]), (1, 5, [7, 3])],
    ids=["count", "order", "fewer", "more", "other", "row"],
)
def test_every_difference_in_a_decoding_row_shows(rows: Rows, assumed: tuple[int, int, list[int]]) -> None:
    run(rows, prompts())
    with pytest.raises(PlanMismatch, match="checksum"):
        rows.apply(replace(first_decode(), checksum=checksum(assumed)))


def test_another_number_of_decoding_rows_is_refused(rows: Rows) -> None:
    run(rows, prompts())
    with pytest.raises(PlanMismatch, match=r"assumes 2 decoding rows .* holds 1"):
        rows.apply(replace(first_decode(), num_decodes=2))


def test_a_decoding_row_without_the_block_it_should_have_got_is_refused(rows: Rows) -> None:
    run(rows, prompts(), first_decode(), both_decode())
    with pytest.raises(PlanMismatch, match="checksum"):
        rows.apply(StepPlan(0, 3, num_decodes=1, checksum=checksum((2, 7, [7, 3, 8]))))


def test_a_chunk_of_a_row_without_any_block_is_refused(rows: Rows) -> None:
    """Else its keys would go to block 0, which may be another request's."""
    with pytest.raises(PlanMismatch, match="row 2"):
        rows.apply(replace(prompts(), new_blocks=[(0, [1])]))


@pytest.mark.parametrize(("start", "length"), [(2, 4), (4, 4), (0, 3)])
def test_a_chunk_that_does_not_start_where_the_row_stands_is_refused(rows: Rows, start: int, length: int) -> None:
    run(rows, prompts())
    message = f"computes tokens {start} to {start + length} of row 0, which has 3 computed of 8"
    with pytest.raises(PlanMismatch, match=message):
        rows.apply(replace(first_decode(), chunks=[Chunk(0, start, length, False)]))


def test_a_chunk_beyond_the_known_tokens_is_refused(rows: Rows) -> None:
    run(rows, prompts())
    with pytest.raises(PlanMismatch, match="tokens 3 to 9 of row 0, which has 3 computed of 8"):
        rows.apply(replace(first_decode(), chunks=[Chunk(0, 3, 6, False)]))


def test_a_chunk_of_a_row_that_was_never_admitted_is_refused(rows: Rows) -> None:
    with pytest.raises(PlanMismatch, match="row 3, which has 0 computed of 0"):
        rows.apply(StepPlan(0, 0, chunks=[Chunk(3, 0, 1, False)]))


def test_more_blocks_than_a_request_may_have_are_refused(rows: Rows) -> None:
    run(rows, prompts())
    plan = replace(first_decode(), new_blocks=[(0, list(range(10, 10 + MAX_BLOCKS)))])
    with pytest.raises(PlanMismatch, match=f"row 0 would hold {MAX_BLOCKS + 1} blocks, .* {MAX_BLOCKS} at most"):
        rows.apply(plan)


def test_a_row_may_hold_as_many_blocks_as_a_request_may_have(rows: Rows) -> None:
    run(rows, replace(prompts(), new_blocks=[(2, [7, 3]), (0, list(range(10, 10 + MAX_BLOCKS)))]))
    assert np.array_equal(rows.block_table[0], np.arange(10, 10 + MAX_BLOCKS))
