"""Picking from few candidates is picking from the whole vocabulary, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.compiled import kernels_or_skip
from workers import picking
from workers.noise import noise_keys
from workers.picking import CompiledPicking, Noisy, TorchPicking

KERNELS = kernels_or_skip()


def noisy_rows(index: list[int], temperature: float, seed: int = 0) -> Noisy | None:
    if not index:
        return None
    seeds = np.arange(len(index)).astype(np.uint64) + np.uint64(seed)
    keys = noise_keys(seeds, np.arange(len(index)) * 7)
    return Noisy(torch.tensor(index), *keys, torch.full((len(index), 1), temperature, dtype=torch.float32))


def assert_same(logits: torch.Tensor, noisy: Noisy | None, first_id: int = 0) -> torch.Tensor:
    own_ids = torch.arange(first_id, first_id + logits.shape[1])
    before = logits.clone()
    values, local = CompiledPicking(KERNELS, own_ids).pick(logits, noisy)
    wanted_values, wanted_local = TorchPicking(own_ids).pick(before, noisy)
    assert torch.equal(local, wanted_local)
    assert torch.equal(values, wanted_values)
    return local


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 700),
    st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    st.sampled_from([1e-50, 1e-20, 1e-3, 0.3, 1.0, 2.5, 50.0, 1e6]),
    st.sampled_from([0, 5, 31_000]),
    st.integers(0, 10_000),
)
def test_any_logits_and_temperatures(size: int, scale: float, temperature: float, first_id: int, seed: int) -> None:
    logits = scale * torch.randn(5, size, generator=torch.Generator().manual_seed(seed))
    assert_same(logits, noisy_rows([0, 2, 3], temperature, seed), first_id)


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_real_vocabularies_have_few_candidates(scale: float, temperature: float) -> None:
    size, rows = 49_152, list(range(12))
    logits = scale * torch.randn(len(rows), size, generator=torch.Generator().manual_seed(1))
    noisy = noisy_rows(rows, temperature)
    candidates, is_full = CompiledPicking(KERNELS, torch.arange(size))._candidates(logits, noisy)
    assert not is_full.any()
    assert candidates.shape[1] < 100
    assert len(assert_same(logits, noisy).unique()) > 6


def test_of_equals_the_lowest_wins_with_and_without_noise() -> None:
    logits = torch.full((3, 100), -4.0)
    logits[:, [13, 40, 41, 99]] = 2.5
    assert assert_same(logits, noisy_rows([1], 1e-40)).tolist() == [13, 13, 13]
    flat = torch.zeros(2, 77)
    assert assert_same(flat, noisy_rows([1], 1e-50)).tolist() == [0, 0]


def test_infinite_logits() -> None:
    logits = torch.randn(4, 200)
    logits[:, ::3] = -math.inf
    logits[3] = -math.inf
    assert_same(logits, noisy_rows([0, 2], 1.0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("noisy", [None, noisy_rows([0, 1, 2], 1.0)])
def test_what_is_no_number_is_never_passed_over(value: float, noisy: Noisy | None) -> None:
    logits = torch.randn(3, 200)
    logits[1, 50] = value
    for picker in (TorchPicking(torch.arange(200)), CompiledPicking(KERNELS, torch.arange(200))):
        values, _ = picker.pick(logits.clone(), noisy)
        assert values.isfinite().tolist() == [True, False, True]


def test_more_candidates_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picking, "MOST_CANDIDATES", 2)
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1))
    own_ids, noisy = torch.arange(5000), noisy_rows([0, 1, 2, 3, 5], 2.0)
    assert CompiledPicking(KERNELS, own_ids)._candidates(logits, noisy)[1].all()
    assert_same(logits, noisy)


def test_a_row_with_too_many_candidates_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guide may leave nothing of a rank's range: all of its tokens are equally impossible there."""
    logits = 3 * torch.randn(6, 5000, generator=torch.Generator().manual_seed(2))
    logits[[1, 4]] = -math.inf
    rows = [0, 1, 2, 4, 5]
    assert_same(logits.clone(), noisy_rows(rows, 1.0))
    seen = []
    plain = TorchPicking.pick
    monkeypatch.setattr(
        TorchPicking, "pick", lambda self, some, noisy: (seen.append(len(some)), plain(self, some, noisy))[1]
    )
    CompiledPicking(KERNELS, torch.arange(5000)).pick(logits, noisy_rows(rows, 1.0))
    assert seen == [2]


def test_greedy_alone() -> None:
    for size in (1, 15, 16, 17, 70_000):
        assert_same(torch.randn(3, size), None)
