"""The FlashAttention backends, unchanged, over stand-ins that do what the kernels document, against `reference`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn as real_varlen_attn

from attention.backend import Backend
from attention.cache import Scales
from attention.flash import FlashAttnBackend, Kernels
from attention.torch_flash import TorchFlashBackend, TorchKernel
from tests.attention import contracts
from tests.attention.poisoned import Batch, Case

FLASH_2 = Kernels(2, contracts.flash_attn_with_kvcache, contracts.flash_attn_varlen_func)
FLASH_3 = Kernels(3, contracts.flash_attn_3_with_kvcache)
KINDS = ("torch_flash", "flash_attn_2", "flash_attn_3")


def make(kind: str, case: Case, calls: str = "two", **options: object) -> Backend:
    if kind == "torch_flash":
        options.setdefault("kernel", TorchKernel(contracts.varlen_attn))
        return TorchFlashBackend(case.layout, case.scale, calls, **options)
    options.setdefault("kernels", FLASH_2 if kind == "flash_attn_2" else FLASH_3)
    return FlashAttnBackend(case.layout, case.scale, calls, **options)


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    """Contexts that end before, at and after page borders, chunks of one token, rows of any number."""
    block_size = draw(st.sampled_from([1, 16, 128])) if kind == "flash_attn_3" else 256
    near = st.builds(lambda pages, off: max(1, pages * block_size + off), st.integers(0, 2), st.integers(-2, 9))
    totals = st.one_of(st.integers(1, 30), near)
    chunks = []
    for total in draw(st.lists(totals, max_size=3)):
        chunks.append((draw(st.one_of(st.just(1), st.integers(1, total))), total))
    return Case(
        tuple(chunks),
        tuple(draw(st.lists(totals, min_size=0 if chunks else 1, max_size=4))),
        block_size,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        window=draw(st.sampled_from([None, 1, 5, 300])),
        filler=draw(st.sampled_from([-1, 0, 2**31 - 1])),
        soft_cap=None if kind == "torch_flash" else draw(st.sampled_from([None, 1.5])),
        alibi=kind == "flash_attn_2" and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def assert_as_reference(batch: Batch, result: torch.Tensor) -> None:
    torch.testing.assert_close(result, batch.expected(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("calls", ["one", "two"])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_mixed_batches_match_the_reference(kind: str, calls: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(cases(kind))
    def check(case: Case) -> None:
        batch = Batch(case)
        assert_as_reference(batch, batch.run(make(kind, case, calls)))

    check()


MIXED = Case(chunks=((3, 3), (2, 259), (1, 513)), decodes=(14, 1, 512, 300))


@pytest.mark.parametrize("calls", ["one", "two"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_in_bf16_is_within_its_rounding(kind: str, calls: str) -> None:
    batch = Batch(MIXED, torch.bfloat16)
    result = batch.run(make(kind, MIXED, calls))
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, batch.expected(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("calls", ["one", "two"])
def test_a_torch_that_reads_no_pages_is_given_copies(calls: str, grouped: bool) -> None:
    kernel = TorchKernel(contracts.unpaged_varlen_attn, paged=False, grouped=grouped)

    @settings(max_examples=25, deadline=None)
    @given(cases("flash_attn_3"))
    def check(case: Case) -> None:
        batch = Batch(replace(case, soft_cap=None))
        assert_as_reference(batch, batch.run(make("torch_flash", batch.case, calls, kernel=kernel)))

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_ragged_batch_gives_the_real_rows_what_they_get_alone(kind: str) -> None:
    """As a graph for mixed steps is captured: padding rows without queries, padding tokens that no row owns."""
    batch = Batch(MIXED)
    backend = make(kind, MIXED)
    backend.write(batch.new_keys, batch.new_values, batch.cache, batch.slots)
    query = torch.cat((batch.query, torch.full_like(batch.query[:5], float("nan"))))
    result = backend.attend(query, batch.cache, batch.ragged_metadata(padding_rows=3, padding_tokens=5), None)
    assert_as_reference(batch, result[: len(batch.query)])


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_and_two_make_one_and_two(kind: str) -> None:
    for calls, count in (("one", 1), ("two", 2)):
        backend, made = make(kind, MIXED, calls), []
        inner = backend._call
        backend._call = lambda *args, inner=inner, made=made: made.append(1) or inner(*args)
        Batch(MIXED).run(backend)
        assert len(made) == count


@pytest.mark.parametrize("kind", ["torch_flash", "flash_attn_2"])
@pytest.mark.parametrize(("window", "group", "folds"), [(None, 4, True), (None, 1, False), (7, 4, False)])
def test_decodes_are_folded_where_version_2_can(kind: str, window: int | None, group: int, folds: bool) -> None:
    """Folded, a key is read once for all heads of its group; a window of (-1, 0) would quietly prevent it."""
    case = Case((), (300, 5), group=group, window=window)
    contracts.folded_calls.clear()
    Batch(case).run(make(kind, case))
    assert contracts.folded_calls == [folds]


def test_decodes_that_may_be_split_come_out_whole() -> None:
    for group in (1, 4):
        for window in (None, 7):
            case = Case(((2, 300),), (300, 5, 70), group=group, window=window)
            batch = Batch(case)
            assert_as_reference(batch, batch.run(make("torch_flash", case, split_decodes=True)))


def test_the_stand_in_has_the_signature_of_the_real_function() -> None:
    """That of flash-attn cannot be looked up where it is not installed."""
    assert contracts.same_signature(contracts.varlen_attn, real_varlen_attn)


# Faults that the tests above must not let pass: each is built into a stand-in or a backend, and has to be seen.


def broken(fault: str) -> Callable[..., torch.Tensor]:
    """torch's function as if the backend had asked it wrongly."""

    def varlen_attn(*args: object, **kwargs: object) -> torch.Tensor:
        args = list(args)
        if fault == "causal mask aligned to the top left":
            starts, lens = args[3], kwargs["seqused_k"]
            return _top_left(*args[:3], starts, lens, kwargs)
        if fault == "one key too few":
            kwargs["seqused_k"] = (kwargs["seqused_k"] - 1).clamp(min=1)
        if fault == "one key too many":
            kwargs["seqused_k"] = kwargs["seqused_k"] + 1
            args[6] += 1
        if fault == "stale block table":
            kwargs["block_table"] = kwargs["block_table"].roll(1, 0)
        if fault == "window off by one" and kwargs["window_size"][0] >= 0:
            kwargs["window_size"] = (kwargs["window_size"][0] + 1, kwargs["window_size"][1])
        if fault == "splits":
            kwargs["num_splits"] = None
        if fault == "queries shorter than they are":
            args[5] = max(1, args[5] - 1)
        if fault in ("one key too few", "one key too many"):
            args[4] = torch.nn.functional.pad(kwargs["seqused_k"].cumsum(0, dtype=torch.int32), (1, 0))
        return contracts.varlen_attn(*args, **kwargs)

    return varlen_attn


def _top_left(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, kw: dict
) -> torch.Tensor:
    """Each row cut to as many keys as it has queries: query i then sees keys j <= i."""
    cut = torch.minimum(lens, starts.diff())
    flat = (query, key, value, starts, cut, kw["block_table"])
    return contracts.paged_attention(*flat, len(query), kw["scale"], -1, 0, 0.0, None, len(lens), len(query), None)


FAULTS = (
    "causal mask aligned to the top left",
    "one key too few",
    "one key too many",
    "stale block table",
    "window off by one",
    "splits",
    "queries shorter than they are",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_call_shows(fault: str) -> None:
    case = Case(MIXED.chunks, MIXED.decodes, window=6 if "window" in fault else None)
    batch = Batch(case)
    assert_as_reference(batch, batch.run(make("torch_flash", case)))
    batch = Batch(case)
    with pytest.raises((AssertionError, IndexError)):
        assert_as_reference(batch, batch.run(make("torch_flash", case, kernel=TorchKernel(broken(fault)))))


SCALES = Scales(key=0.25, value=0.03, query=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("calls", ["one", "two"])
def test_an_fp8_cache_is_read_with_its_scales(calls: str, dtype: torch.dtype) -> None:
    """Version 3 alone can. The result has the dtype that the queries had."""
    for case in (replace(MIXED, head_dim=16, block_size=16), replace(MIXED, head_dim=32, group=3, window=7)):
        batch = Batch(case, dtype, SCALES)
        result = batch.run(make("flash_attn_3", case, calls))
        assert result.dtype == dtype
        torch.testing.assert_close(result, batch.expected(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("wrong", ["key", "value", "query"])
def test_a_wrong_descale_shows(wrong: str) -> None:
    """Each scale in another's place, or left out."""
    case = replace(MIXED, head_dim=16)
    batch = Batch(case, torch.bfloat16, SCALES)
    good, seen = make("flash_attn_3", case), []
    inner = good._kernels.with_kvcache

    def with_kvcache(*args: object, **kwargs: object) -> torch.Tensor:
        kwargs[f"{wrong[0]}_descale"] = kwargs["v_descale" if wrong == "key" else "k_descale"] * 1.5
        seen.append(wrong)
        return inner(*args, **kwargs)

    bad = make("flash_attn_3", case, kernels=Kernels(3, with_kvcache))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(batch.run(bad), batch.expected(), rtol=0.02, atol=0.02)
    assert seen


def test_descales_lie_where_a_captured_step_found_them() -> None:
    case = replace(MIXED, head_dim=16)
    places, backend = [], make("flash_attn_3", case)
    inner = backend._kernels.with_kvcache

    def with_kvcache(*args: object, **kwargs: object) -> torch.Tensor:
        places.append([kwargs[f"{x}_descale"].data_ptr() for x in "qkv"])
        return inner(*args, **kwargs)

    backend._kernels = Kernels(3, with_kvcache)
    for _ in range(2):
        Batch(case, torch.bfloat16, SCALES).run(backend)
    assert len(places) == 4
    assert all(place == places[0] for place in places)


def test_a_dtype_that_the_kernels_refuse_is_refused_by_the_stand_ins() -> None:
    batch = Batch(MIXED)
    batch.cache = tuple(pages.to(torch.bfloat16) for pages in batch.cache)
    with pytest.raises(RuntimeError, match="one dtype"):
        make("torch_flash", MIXED).attend(batch.query, batch.cache, batch.metadata(), None)


def test_pages_that_version_2_refuses_are_refused_by_the_stand_ins() -> None:
    case = Case(MIXED.chunks, MIXED.decodes, block_size=128)
    for kind in ("torch_flash", "flash_attn_2"):
        with pytest.raises(RuntimeError, match="divisible by 256"):
            Batch(case).run(make(kind, case))
