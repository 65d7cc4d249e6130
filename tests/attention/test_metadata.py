"""The invariants of a mixed batch, each with a message that names the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from attention.metadata import AttentionMetadata, DecodeMetadata, MetadataError, PrefillMetadata


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(rows: int, blocks: int) -> torch.Tensor:
    return torch.zeros((rows, blocks), dtype=torch.int32)


def prefill(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    starts: int | None = None,
    contexts: int | None = None,
    block_table: torch.Tensor | None = None,
) -> PrefillMetadata:
    """A prefill part; `starts` and `contexts` give these tensors another length than fits."""
    count = len(query_lens)
    return PrefillMetadata(
        query_start_loc=int32(range(count + 1 if starts is None else starts)),
        context_lens=int32(range(count if contexts is None else contexts)),
        block_table=table(count, 8) if block_table is None else block_table,
        query_lens=query_lens,
        seq_lens=seq_lens,
    )


def decode(context_lens: list[int], blocks: int = 8) -> DecodeMetadata:
    return DecodeMetadata(int32(context_lens), table(len(context_lens), blocks), max(context_lens))


def slots(count: int) -> torch.Tensor:
    return torch.arange(count)


def test_a_mixed_batch_counts_its_parts() -> None:
    """The example of the module's own drawing."""
    metadata = AttentionMetadata(slots(7), 4, prefill([3, 2], [3, 9]), decode([14, 6]))
    assert (metadata.num_prefill_tokens, metadata.num_decode_tokens) == (5, 2)
    assert (metadata.prefill.max_query_len, metadata.prefill.max_seq_len) == (3, 9)
    assert metadata.decode.max_seq_len == 14


def test_either_part_may_be_absent() -> None:
    only_prefill = AttentionMetadata(slots(3), 4, prefill=prefill([3], [3]))
    assert (only_prefill.num_prefill_tokens, only_prefill.num_decode_tokens) == (3, 0)
    only_decode = AttentionMetadata(slots(2), 4, decode=decode([1, 5]))
    assert (only_decode.num_prefill_tokens, only_decode.num_decode_tokens) == (0, 2)


def test_a_chunk_of_one_token_may_be_prefill() -> None:
    assert prefill([1], [17]).num_tokens == 1


def test_a_context_may_fill_its_blocks_to_the_last_slot() -> None:
    AttentionMetadata(slots(1), 4, decode=decode([32], blocks=8))
    AttentionMetadata(slots(1), 4, prefill=prefill([1], [32]))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"seq_lens": [3]}, r"2 chunks, but 1 lengths"),
        ({"starts": 2}, r"2 chunks, .*query_start_loc \(2,\)"),
        ({"contexts": 3}, r"2 chunks, .*context_lens \(3,\)"),
        ({"block_table": table(3, 8)}, r"2 chunks, .*block_table \(3, 8\)"),
        ({"block_table": int32([0, 1])}, r"2 chunks, .*block_table \(2,\)"),
        ({"query_lens": [3, 0]}, r"a chunk of 0 tokens in a context of 9"),
        ({"query_lens": [4, 2]}, r"a chunk of 4 tokens in a context of 3"),
        ({"query_lens": [3, -1]}, r"a chunk of -1 tokens"),
    ],
)
def test_a_prefill_part_that_contradicts_itself_is_refused(broken: dict, message: str) -> None:
    with pytest.raises(MetadataError, match=message):
        prefill(**{"query_lens": [3, 2], "seq_lens": [3, 9], **broken})


def test_an_empty_prefill_part_is_refused() -> None:
    with pytest.raises(MetadataError, match="at least one chunk"):
        prefill([], [])


def test_an_empty_decode_part_is_refused() -> None:
    with pytest.raises(MetadataError, match="at least one row"):
        DecodeMetadata(int32([]), table(0, 1), 1)


@pytest.mark.parametrize(
    ("context_lens", "block_table", "message"),
    [
        (int32([4, 5]), table(3, 2), r"2 decodes, but block_table \(3, 2\)"),
        (int32([4, 5]), int32([0, 1]), r"2 decodes, but block_table \(2,\)"),
        (int32([4, 5]).unsqueeze(1), table(2, 2), r"must be \[rows\], got \(2, 1\)"),
    ],
)
def test_a_decode_part_of_unequal_rows_is_refused(
    context_lens: torch.Tensor, block_table: torch.Tensor, message: str
) -> None:
    with pytest.raises(MetadataError, match=message):
        DecodeMetadata(context_lens, block_table, 5)


@pytest.mark.parametrize("largest", [0, -3])
def test_a_decode_part_without_context_is_refused(largest: int) -> None:
    with pytest.raises(MetadataError, match=f"at least 1, got {largest}"):
        DecodeMetadata(int32([0]), table(1, 1), largest)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(MetadataError, match="at least one token"):
        AttentionMetadata(slots(0), 4)


@pytest.mark.parametrize("slot_mapping", [slots(6), slots(8), slots(7).unsqueeze(0)])
def test_a_slot_mapping_of_another_length_is_refused(slot_mapping: torch.Tensor) -> None:
    with pytest.raises(MetadataError, match=r"5 prefill and 2 decode tokens, but slot_mapping \("):
        AttentionMetadata(slot_mapping, 4, prefill([3, 2], [3, 9]), decode([14, 6]))


def test_a_context_longer_than_its_block_table_is_refused() -> None:
    with pytest.raises(MetadataError, match=r"context of 33 tokens .* 8 blocks of 4"):
        AttentionMetadata(slots(1), 4, prefill=prefill([1], [33]))
    with pytest.raises(MetadataError, match=r"context of 9 tokens .* 2 blocks of 4"):
        AttentionMetadata(slots(1), 4, decode=decode([9], blocks=2))
