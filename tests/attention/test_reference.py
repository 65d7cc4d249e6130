"""The reference backend against attention written token by token, on ragged mixed batches in a shuffled cache."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from attention.backend import BackendError, HeadLayout, make_backend
from attention.cache import quantise
from attention.metadata import AttentionMetadata, PrefillMetadata
from attention.reference import QUERY_TILE, ReferenceBackend
from tests.attention.batches import HEAD_DIM, SCALE, Batch, Case, cases, padded


@settings(max_examples=60, deadline=None)
@given(cases())
def test_ragged_mixed_batches_match_attention_by_its_definition(case: Case) -> None:
    """Every slot that no context reaches holds NaN, so that reading one shows."""
    batch = Batch(case)
    torch.testing.assert_close(batch.run().double(), batch.expected(), rtol=1e-4, atol=1e-5)


MIXED = Case(chunks=[(3, 3), (2, 9), (1, 6)], decodes=[14, 1, 6])


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_a_mixed_batch_in_bf16_is_within_its_rounding(window: int | None) -> None:
    batch = Batch(Case(MIXED.chunks, MIXED.decodes, window=window), torch.bfloat16)
    result = batch.run()
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), batch.expected(), rtol=0.01, atol=0.01)


def test_a_window_of_one_sees_only_the_token_itself() -> None:
    batch = Batch(Case([(4, 7)], [5], window=1, group=1))
    values = torch.cat(batch.new_values)
    torch.testing.assert_close(batch.run(), values)


@pytest.mark.parametrize("window", [None, 40])
def test_a_chunk_longer_than_a_tile_of_queries(window: int | None) -> None:
    """Tiles must look at absolute positions: each sees what lies before it, in the chunk and in the cache."""
    query_len, total = 2 * QUERY_TILE + 37, 2 * QUERY_TILE + 90
    batch = Batch(Case([(3, 3), (query_len, total), (2, 5)], [4], block_size=16, group=1, kv_heads=1, window=window))
    result = batch.run()
    queries, keys, values = (x[:, 0] for x in batch.requests[1])
    positions = torch.arange(total - query_len, total).unsqueeze(1)
    distance = positions - torch.arange(total)
    visible = (distance >= 0) & (distance < (window or total))
    scores = (queries.double() @ keys.double().T * SCALE).masked_fill(~visible, -math.inf)
    expected = scores.softmax(-1) @ values.double()
    torch.testing.assert_close(result[3 : 3 + query_len, 0].double(), expected, rtol=1e-4, atol=1e-5)


def test_the_result_of_a_request_is_the_same_however_its_prompt_is_cut() -> None:
    prompt = Case(chunks=[(13, 13)], decodes=[])
    whole = Batch(prompt).run()
    for first in range(1, 13):
        torch.testing.assert_close(_attend_in_two(Batch(prompt), first), whole, rtol=1e-5, atol=1e-6)


def _attend_in_two(batch: Batch, first: int) -> torch.Tensor:
    """The batch's one prompt as two chunks, of `first` tokens and of the rest, in two steps."""
    backend = ReferenceBackend(HeadLayout(4, 2, HEAD_DIM), SCALE)
    queries, keys, values = batch.requests[0]
    table, outs = padded(batch.tables), []
    for start, stop in ((0, first), (first, len(keys))):
        slots = torch.tensor(batch.slots[start:stop])
        starts, contexts = torch.tensor([0, stop - start]).int(), torch.tensor([stop]).int()
        metadata = AttentionMetadata(slots, 4, PrefillMetadata(starts, contexts, table, [stop - start], [stop]))
        backend.write(keys[start:stop], values[start:stop], batch.cache, slots)
        outs.append(backend.attend(queries[start:stop], batch.cache, metadata, None))
    return torch.cat(outs)


def test_write_puts_each_token_in_its_slot_and_nothing_else() -> None:
    backend = ReferenceBackend(HeadLayout(2, 2, HEAD_DIM), SCALE)
    cache = (torch.full((5, 4, 2, HEAD_DIM), -1.0), torch.full((5, 4, 2, HEAD_DIM), -2.0))
    key, value = torch.randn(3, 2, HEAD_DIM), torch.randn(3, 2, HEAD_DIM)
    backend.write(key, value, cache, torch.tensor([18, 0, 7]))
    for pages, tensor, untouched in ((cache[0], key, -1.0), (cache[1], value, -2.0)):
        assert torch.equal(pages[4, 2], tensor[0])
        assert torch.equal(pages[0, 0], tensor[1])
        assert torch.equal(pages[1, 3], tensor[2])
        rest = torch.ones(5, 4, dtype=torch.bool)
        rest[[4, 0, 1], [2, 0, 3]] = False
        assert bool((pages[rest] == untouched).all())


def test_the_named_backend_is_made() -> None:
    assert make_backend("reference", HeadLayout(2, 1, HEAD_DIM), SCALE, torch.device("cpu")).name == "reference"


def test_auto_says_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        backend = make_backend("auto", HeadLayout(2, 1, HEAD_DIM), SCALE, torch.device("cpu"))
    assert f"attention backend: {backend.name}" in caplog.text


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(BackendError, match=r"'fast'; known: auto, .*reference"):
        make_backend("fast", HeadLayout(2, 1, HEAD_DIM), SCALE, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_exceeds_fp8_becomes_its_largest_number_and_nan_stays(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    found = quantise(torch.tensor([1e9, -1e9, math.inf, 3.0, math.nan]), 0.5, dtype)
    assert found.dtype == dtype
    assert found[:4].float().tolist() == [most, -most, most, 6.0]
    assert found[4].float().isnan()
