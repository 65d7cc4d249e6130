"""Sampling: the right distribution, the same tokens whatever the company, and the same on any number of ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from parallel.group import TensorParallelGroup
from parallel.split import deal_lanes
from tests.ranks import run_ranks
from tests.workers.limits import make_rows
from workers.noise import gumbel_noise, noise_keys
from workers.sampler import Sampler
from workers.truncation import SamplingRows

CPU = torch.device("cpu")
VOCAB = 301
SIZES = [1, 2, 3]


def keys_of(rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    return noise_keys(rows.seeds, rows.positions)


def random_logits(count: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


def sample(logits: torch.Tensor, rows: SamplingRows, size: int = 1) -> list[int]:
    """The tokens, after checking that all ranks chose the same."""
    vocab = logits.shape[1]

    def run(group: TensorParallelGroup) -> list[int]:
        own = deal_lanes(vocab, size)[group.rank]
        return Sampler(vocab, group, CPU).sample(logits[:, own.start : own.stop].clone(), rows).tolist()

    results = run_ranks(size, run)
    assert all(result == results[0] for result in results)
    return results[0]


MIXED = {
    "seeds": [1, 2, 3, 4, 5, 2**64 - 1, 1, 8],
    "positions": [5, 6, 7, 8, 9, 10, 6, 12],
    "temperature": [0.0, 1.0, 0.7, 1.3, 1.0, 2.0, 1.0, 0.0],
    "top_k": [0, 0, 5, 0, 0, 40, 0, 3],
    "top_p": [1.0, 1.0, 1.0, 0.8, 1.0, 0.9, 1.0, 0.5],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.05, 0.01, 0.0, 0.3],
}


@pytest.mark.parametrize("size", SIZES)
def test_greedy_takes_the_most_likely_token_of_all_ranks(size: int) -> None:
    logits = random_logits(40)
    assert sample(logits, make_rows(40, temperature=0.0), size) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("size", SIZES)
def test_of_equals_the_lowest_id_wins(size: int) -> None:
    """Ties within a rank's range, across ranges, at both ends, and of all tokens."""
    tied = [[3, 250], [299, 300], [0, 300], [100, 101, 102], [160, 200], list(range(VOCAB))]
    logits = torch.full((len(tied), VOCAB), -1.0)
    for row, ids in enumerate(tied):
        logits[row, ids] = 2.0
    assert sample(logits, make_rows(len(tied), temperature=0.0), size) == [ids[0] for ids in tied]


@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_of_row_gets_the_same_token_on_any_number_of_ranks(size: int) -> None:
    logits, rows = random_logits(8), make_rows(8, **MIXED)
    assert sample(logits, rows, size) == sample(logits, rows)


def test_a_row_gets_the_same_token_alone_and_in_company() -> None:
    logits, together = random_logits(8), make_rows(8, **MIXED)
    tokens = sample(logits, together)
    for row in range(8):
        alone = make_rows(1, **{name: values[row] for name, values in MIXED.items()})
        assert sample(logits[row : row + 1], alone) == [tokens[row]]
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    shuffled = make_rows(8, **{name: [values[row] for row in order] for name, values in MIXED.items()})
    assert sample(logits[order], shuffled) == [tokens[row] for row in order]


def test_positions_and_seeds_give_other_tokens() -> None:
    flat = torch.zeros(200, VOCAB)
    by_position = sample(flat, make_rows(200, positions=np.arange(200)))
    by_seed = sample(flat, make_rows(200, seeds=np.arange(200)))
    # 200 draws out of 301 tokens leave some 146 different ones.
    for tokens in (by_position, by_seed):
        assert 125 < len(set(tokens)) < 170
    assert by_position != by_seed
    assert sample(flat, make_rows(200, positions=np.arange(200))) == by_position


@pytest.mark.parametrize("temperature", [1.0, 5.0])
def test_top_k_of_one_is_greedy(temperature: float) -> None:
    logits = random_logits(30)
    rows = make_rows(30, top_k=1, temperature=temperature, positions=np.arange(30))
    assert sample(logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-39, 1e-300])
@pytest.mark.parametrize("top_k", [0, 5])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float, top_k: int) -> None:
    """Division by it must not overflow, which would make several tokens equal."""
    logits = random_logits(10)
    logits[:, 17] = 0.0
    assert sample(logits, make_rows(10, temperature=temperature, top_k=top_k)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("limits", [{}, {"top_k": 290}, {"top_p": 0.999}])
def test_no_token_outside_an_odd_vocabulary_comes_out_at_high_temperature(size: int, limits: dict) -> None:
    """All real logits are far below zero, so that a padded column of zeros would win."""
    logits = random_logits(200) - 1000.0
    tokens = sample(logits, make_rows(200, temperature=5.0, positions=np.arange(200), **limits), size)
    assert 0 <= min(tokens) <= max(tokens) < VOCAB
    assert len(set(tokens)) > 50
    assert max(tokens) > 260  # the last range is reached


LOGITS = torch.tensor([2.0, 1.5, 1.0, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, range(12)),
        ({"temperature": 0.6}, range(12)),
        ({"top_k": 3}, range(3)),
        ({"top_p": 0.7}, range(4)),
        ({"min_p": 0.2}, range(5)),
        ({"temperature": 1.8, "top_k": 8, "top_p": 0.95, "min_p": 0.1}, range(8)),
    ],
)
def test_frequencies_follow_the_softmax_of_what_is_kept(settings: dict[str, float], kept: range) -> None:
    draws = 20_000
    rows = make_rows(draws, positions=np.arange(draws), **settings)
    tokens = Sampler(len(LOGITS), TensorParallelGroup(), CPU).sample(LOGITS.repeat(draws, 1), rows)
    counts = torch.bincount(tokens, minlength=len(LOGITS)).double()
    weights = (LOGITS.double() / settings.get("temperature", 1.0)).exp()
    weights[[i for i in range(len(LOGITS)) if i not in kept]] = 0
    expected = draws * weights / weights.sum()
    assert counts[expected == 0].sum() == 0
    seen, due = counts[expected > 0], expected[expected > 0]
    chi_square = ((seen - due) ** 2 / due).sum()
    p_value = torch.special.gammaincc(torch.tensor((len(due) - 1) / 2).double(), chi_square / 2)
    assert p_value > 0.001, f"counts {seen.tolist()}, expected {due.tolist()}"


def test_frequencies_over_seeds_follow_the_softmax_too() -> None:
    draws = 20_000
    rows = make_rows(draws, seeds=np.arange(draws), positions=3)
    tokens = Sampler(len(LOGITS), TensorParallelGroup(), CPU).sample(LOGITS.repeat(draws, 1), rows)
    due = draws * LOGITS.double().softmax(-1)
    chi_square = ((torch.bincount(tokens, minlength=12) - due) ** 2 / due).sum()
    assert torch.special.gammaincc(torch.tensor(5.5).double(), chi_square / 2) > 0.001


# (seed, position) = (0, 0), (42, 17), (2**64 - 1, 100000); noise for ids 0, 1, 2, 300, 150000.
GOLDEN_KEYS = [(2802244911, 1293516399), (3892737035, 693878964), (137273342, 2855139660)]
GOLDEN_NOISE = [
    [3.700133, 1.230619, 0.639157, -1.289756, 0.745305],
    [0.656236, -0.316774, 0.547651, 6.501865, 3.654517],
    [-0.174117, -0.050125, 0.685388, -0.105932, -0.112821],
]


def test_the_random_stream_stays_as_it_is() -> None:
    """A request sampled with a seed must give the same text in the next version."""
    rows = make_rows(3, seeds=[0, 42, 2**64 - 1], positions=[0, 17, 100_000])
    high, low = keys_of(rows)
    assert list(zip(high.tolist(), low.tolist(), strict=True)) == GOLDEN_KEYS
    noise = gumbel_noise(high, low, torch.tensor([0, 1, 2, 300, 150_000]))
    torch.testing.assert_close(noise, torch.tensor(GOLDEN_NOISE), rtol=1e-5, atol=1e-6)


def test_noise_is_gumbel_and_always_finite() -> None:
    high, low = keys_of(make_rows(20, positions=np.arange(20)))
    noise = gumbel_noise(high, low, torch.arange(50_000)).double()
    assert bool(torch.isfinite(noise).all())
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    correlation = torch.corrcoef(noise) - torch.eye(20)
    assert correlation.abs().max() < 0.03  # seven standard errors


def test_noise_of_a_range_of_ids_is_that_range_of_the_whole() -> None:
    keys = keys_of(make_rows(4, positions=np.arange(4)))
    whole = gumbel_noise(*keys, torch.arange(VOCAB))
    assert torch.equal(gumbel_noise(*keys, torch.arange(100, 205)), whole[:, 100:205])


def test_no_two_seeds_and_positions_share_their_keys() -> None:
    seeds, positions = np.meshgrid(np.arange(200), np.arange(200))
    rows = make_rows(40_000, seeds=seeds.ravel(), positions=positions.ravel())
    high, low = keys_of(rows)
    assert len(set(zip(high.tolist(), low.tolist(), strict=True))) == 40_000
