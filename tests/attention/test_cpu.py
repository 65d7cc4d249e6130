"""The compiled backend against the reference, on random ragged batches in every dtype, with poison wherever none may
look: in unwritten slots of the cache and in the output before the call."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attention.cpu
from attention.backend import HeadLayout
from attention.cpu import CpuBackend
from attention.native import NativeError, load_library
from tests.attention.batches import Batch, Case, cases

try:
    load_library(attention.cpu.SOURCE)
except NativeError as error:
    pytest.skip(f"no compiled kernels here: {error}", allow_module_level=True)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN."""
    fresh = torch.empty
    poison = lambda *shape, **kinds: fresh(*shape, **kinds).fill_(float("nan"))  # noqa: E731
    monkeypatch.setattr(torch, "empty", poison)


def assert_agrees(case: Case, dtype: torch.dtype) -> None:
    ours, reference = Batch(case, dtype), Batch(case, dtype)
    result, expected = ours.run(CpuBackend), reference.run()
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for pages, wanted in zip(ours.cache, reference.cache, strict=True):
        assert torch.equal(pages.view(torch.uint8), wanted.view(torch.uint8))


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from(DTYPES), st.sampled_from([8, 20, 33, 64, 128]))
def test_ragged_mixed_batches_match_the_reference(case: Case, dtype: torch.dtype, head_dim: int) -> None:
    assert_agrees(dataclasses.replace(case, head_dim=head_dim), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3, 100, 300])
@pytest.mark.parametrize("group", [1, 3, 7, 101])
def test_contexts_longer_than_tiles_and_spans(dtype: torch.dtype, window: int | None, group: int) -> None:
    case = Case([(70, 70), (33, 290), (1, 513), (2, 65)], [1, 64, 256, 257, 700], 16, 2, group, window, 4, 24)
    assert_agrees(case, dtype)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_to_the_bit_alone_and_in_a_crowd_on_any_number_of_threads(
    threads: int, dtype: torch.dtype
) -> None:
    crowd = Batch(Case([(40, 600), (5, 9)], [700, 300, 1], 16, 2, 3), dtype)
    everyone = crowd.run(CpuBackend)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for request, tokens in ((0, slice(0, 40)), (2, slice(45, 46)), (3, slice(46, 47))):
            alone = crowd.only(request)
            assert torch.equal(alone.run(CpuBackend), everyone[tokens])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", [24, 64, 128])
def test_a_row_is_the_same_to_the_bit_alone_and_among_many_decodes(
    dtype: torch.dtype, window: int | None, head_dim: int
) -> None:
    """Many streams read several heads in one go, and only contexts much longer than others are cut."""
    decodes = [3000, 700, 300, 1, 64, 65, 256, 257, 512, 2, 100, 513]
    crowd = Batch(Case([(40, 600)], decodes, 16, 5, 3, window, head_dim=head_dim), dtype)
    everyone = crowd.run(CpuBackend)
    for i in range(len(decodes)):
        assert torch.equal(crowd.only(1 + i).run(CpuBackend), everyone[40 + i : 41 + i]), decodes[i]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3, 100, 300])
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 16), (64, 256), (20, 16), (64, 24)])
def test_a_row_is_the_same_to_the_bit_decoded_and_in_any_chunk(
    dtype: torch.dtype, window: int | None, head_dim: int, block_size: int
) -> None:
    """Recomputed after a preemption or a lost worker, a request must not go on with another token."""
    batch = Batch(Case([(590, 600)], [], block_size, 2, 3, window, head_dim=head_dim), dtype)
    whole = batch.run(CpuBackend)
    for length in (1, 2, 7, 64, 77):
        for first in (0, 53, 244, 246, 400, 590 - length):
            assert torch.equal(batch.part(first, length).run(CpuBackend), whole[first : first + length]), (
                length,
                first,
            )


def test_queries_keys_and_values_may_be_slices_of_one_projection() -> None:
    case = Case([(5, 9)], [14, 3], head_dim=16)
    dense, sliced = Batch(case), Batch(case)
    expected = dense.run(CpuBackend)
    fused = torch.cat([torch.cat(x).flatten(1) for x in (sliced.queries, sliced.new_keys, sliced.new_values)], dim=1)
    query, key, value = (x.unflatten(1, (-1, 16)) for x in fused.split([4 * 16, 2 * 16, 2 * 16], dim=1))
    assert not query.is_contiguous()
    backend, metadata = CpuBackend(HeadLayout(4, 2, 16), sliced.scale), sliced.metadata()
    backend.write(key, value, sliced.cache, metadata.slot_mapping)
    assert torch.equal(backend.attend(query, sliced.cache, metadata, None), expected)


def test_nan_that_a_query_may_see_is_not_hidden() -> None:
    """Only what lies outside the contexts is ignored."""
    for poisoned_part in (0, 1):
        batch = Batch(Case([], [5, 6], group=1, kv_heads=1))
        parts = (batch.new_keys, batch.new_values)
        parts[poisoned_part][1].fill_(float("nan"))
        result = batch.run(CpuBackend)
        assert not result[0].isnan().any()
        assert result[1].isnan().all()
