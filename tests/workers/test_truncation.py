"""Top-k, top-p and min-p leave what a sort of the whole row says, on any number of ranks, and send little for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.group import TensorParallelGroup
from parallel.split import deal_lanes
from tests.ranks import run_ranks
from tests.workers.limits import make_rows, truncate
from tests.workers.recording import Recorder
from tests.workers.test_waits import Watch
from workers import truncation
from workers.kernels import Kernels, find_kernels
from workers.noise import gumbel_noise, noise_keys
from workers.sampler import NOT_FINITE, Sampler
from workers.truncation import SamplingRows

CPU = torch.device("cpu")
KERNELS = find_kernels(CPU)
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="no compiled kernels here")
EITHER = pytest.mark.parametrize(
    "kernels", [None, pytest.param(KERNELS, marks=needs_kernels)], ids=["torch", "compiled"]
)


class Counting:
    """A rank's group that counts what it gives to others, in bytes."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group, self.rank, self.size, self.sent = group, group.rank, group.size, []

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent.append(tensor.numel() * tensor.element_size())
        return self.group.all_gather(tensor)


def left(
    logits: torch.Tensor, rows: SamplingRows, size: int, at_once: int = 0, kernels: Kernels | None = None
) -> tuple[torch.Tensor, list[int]]:
    """[n, vocab] of what all ranks make of the logits, and the tokens. at_once: rows, where that is not 0."""
    vocab = logits.shape[1]

    def run(group: TensorParallelGroup) -> tuple[torch.Tensor, list[int]]:
        own = deal_lanes(vocab, size)[group.rank]
        sampler = Sampler(vocab, group, CPU, kernels)
        sampler.truncation.rows_at_once = at_once or sampler.truncation.rows_at_once
        part = logits[:, own.start : own.stop].clone()
        tokens = sampler.sample(part, rows).tolist()
        mine = logits[:, own.start : own.stop].clone() if own else logits.new_full((len(logits), 1), -math.inf)
        sampler.truncation.apply(mine, rows, np.ones(len(logits), bool))
        return mine[:, : len(own)], tokens

    results = run_ranks(size, run)
    assert all(tokens == results[0][1] for _, tokens in results)
    return torch.cat([mine for mine, _ in results], dim=-1), results[0][1]


def bounds(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """What must stay and what may, bool [n, vocab]: fp64 sums in the order of a sort are off in their last bits."""
    some = lambda shift: truncate(  # noqa: E731
        logits,
        replace(
            rows,
            top_p=np.where(rows.top_p < 1, np.maximum(rows.top_p + shift * 1e-9, 0.0), rows.top_p),
            min_p=np.minimum(rows.min_p * (1 - shift * 1e-12), 1.0),
        ),
    ).isfinite()
    return some(-1), some(1)


ROW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-300, 1e-30, 1e-3, 0.3, 1.0, 1.7, 1000.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 19, 40, 10**6]),
        "top_p": st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.62, 0.5, 0.1, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.0, 1e-9, 0.01, 0.3, 1.0]),
        "seeds": st.integers(0, 2**64 - 1),
        "seed": st.integers(0, 2**32 - 1),
        "scale": st.sampled_from([0.0, 0.3, 2.0, 8.0, 1e4, 1e37]),
        "steps": st.sampled_from([0, 1, 4]),  # distinct numbers per unit; 0: all there are
        "masked": st.sampled_from([0.0, 0.5, 0.98]),
        "base": st.sampled_from([0.0, -1000.0, 25.0]),
    }
)


def make_logits(row: dict[str, Any], vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(row["seed"])
    logits = torch.randn(vocab, generator=generator) * row["scale"]
    if row["steps"]:
        logits = (logits * row["steps"]).round() / row["steps"]
    forbidden = torch.rand(vocab, generator=generator) < row["masked"]
    forbidden[row["seed"] % vocab] = False
    return (logits + row["base"]).masked_fill(forbidden, -math.inf)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(ROW, min_size=1, max_size=5),
    st.sampled_from([1, 2, 3, 5, 23, 64, 301]),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([0, 3, 1024]),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
)
def test_the_same_is_kept_as_by_a_sort(
    given_rows: list[dict[str, Any]], vocab: int, size: int, small: int, at_once: int, is_compiled: bool
) -> None:
    logits = torch.stack([make_logits(row, vocab) for row in given_rows])
    names = ("temperature", "top_k", "top_p", "min_p", "seeds")
    rows = make_rows(len(logits), **{name: [row[name] for row in given_rows] for name in names})
    with patch.object(truncation, "SMALL_TOP_K", small):
        masked, tokens = left(logits, rows, size, at_once, KERNELS if is_compiled else None)
    must, may = bounds(logits, rows)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / torch.from_numpy(rows.temperature).unsqueeze(-1)
    possible = scaled.isfinite()  # of the others, which no noise can bring up, more may be kept
    assert not (must & possible & ~masked.isfinite()).any()
    assert not (masked.isfinite() & possible & ~may).any()
    truncated = torch.from_numpy((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).unsqueeze(-1)
    distances = logits - logits.amax(dim=-1, keepdim=True)
    assert torch.equal(masked, torch.where(truncated, distances, logits).masked_fill(~masked.isfinite(), -math.inf))
    scores = truncate(logits, rows) + gumbel_noise(*noise_keys(rows.seeds, rows.positions), torch.arange(vocab))
    for row, token in enumerate(tokens):
        assert may[row, token]
        # Of a temperature that is 0 in fp32, noise is, too: the lowest id among equals is as good as any.
        if truncated[row] and torch.equal(must[row], may[row]) and rows.temperature[row] > 1e-38:
            assert scores[row, token] >= scores[row].max() - 1e-4


@pytest.mark.parametrize("small", [0, 1024])
@pytest.mark.parametrize("size", [1, 2, 3])
@EITHER
def test_of_equal_logits_the_lowest_ids_are_kept(
    monkeypatch: pytest.MonkeyPatch, size: int, small: int, kernels: Kernels | None
) -> None:
    """Also where the cut lies among them, on another rank than the first, and to the token."""
    monkeypatch.setattr(truncation, "SMALL_TOP_K", small)
    rows = make_rows(6, top_k=[3, 0, 200, 5, 150, 0], top_p=[1.0, 0.5, 1.0, 1.0, 0.5, 1e-9])
    logits = torch.zeros(6, 256)
    logits[3, ::2] = -0.0
    logits[4, [250, 255]] = -1e-3
    kept = left(logits, rows, size, kernels=kernels)[0].isfinite()
    counts = [3, 128, 200, 5, 75, 1]
    assert torch.equal(kept, torch.arange(256) < torch.tensor(counts).unsqueeze(-1))


@EITHER
def test_real_vocabularies_are_cut_to_the_token(kernels: Kernels | None) -> None:
    """Where no limit falls on a border between two tokens; bounds coincide."""
    vocab, generator = 49_152, torch.Generator().manual_seed(5)
    logits = 2.5 * torch.randn(10, vocab, generator=generator)
    logits[5:] = logits[5:].bfloat16()  # many ties
    top_k, top_p = [0, 0, 50, 3000, 0] * 2, [0.9, 0.999, 0.8, 0.95, 1.0] * 2
    rows = make_rows(10, temperature=0.8, top_k=top_k, top_p=top_p, min_p=[0.0, 1e-4, 0.0, 0.0, 0.02] * 2)
    must, may = bounds(logits, rows)
    assert torch.equal(must, may)
    for size in (1, 3):
        assert torch.equal(left(logits, rows, size, kernels=kernels)[0].isfinite(), may)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("limits", [{"top_k": 4}, {"top_k": 5000}, {"top_p": 0.9}, {"min_p": 0.1}])
@EITHER
def test_a_row_that_holds_no_number_spoils_no_other(
    limits: dict[str, float], size: int, kernels: Kernels | None
) -> None:
    logits = torch.randn(5, 301, generator=torch.Generator().manual_seed(3))
    logits[0, 150] = math.nan
    logits[2, 300] = math.inf
    logits[4] = -math.inf
    tokens = left(logits, make_rows(5, **limits), size, kernels=kernels)[1]
    assert [token == NOT_FINITE for token in tokens] == [True, False, True, False, True]
    for row in (1, 3):
        assert truncate(logits[row : row + 1], make_rows(1, **limits))[0, tokens[row]].isfinite()


def test_min_p_cuts_between_two_neighbouring_numbers() -> None:
    """Its distance is rounded to fp32 so that no token changes sides."""
    min_p = np.linspace(0.001, 0.999, 200)
    near = torch.from_numpy((1.3 * np.log(min_p)).astype(np.float32))
    logits = torch.stack([torch.zeros(200), near, near.nextafter(torch.tensor(0.0))], dim=-1)
    kept = left(logits, make_rows(200, temperature=1.3, min_p=min_p), 1)[0].isfinite()
    assert torch.equal(kept, logits.double() >= torch.from_numpy(1.3 * np.log(min_p)).unsqueeze(-1))


LIMITS = {
    "top-k": {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
    "large top-k": {"top_k": 1025, "top_p": 0.9, "min_p": 0.1},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.1},
}


@pytest.mark.parametrize(("kind", "most"), [("top-k", 180), ("large top-k", 16_500), ("top-p", 8300), ("min-p", 20)])
def test_what_the_ranks_tell_one_another_does_not_grow_with_the_vocabulary(kind: str, most: int) -> None:
    rows = make_rows(6, seeds=np.arange(6), **LIMITS[kind])

    def sent(vocab: int) -> list[int]:
        logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1))

        def run(group: TensorParallelGroup) -> list[int]:
            own, counting = deal_lanes(vocab, 2)[group.rank], Counting(group)
            Sampler(vocab, counting, CPU).sample(logits[:, own.start : own.stop].clone(), rows)
            return counting.sent

        return run_ranks(2, run)[0]

    assert sent(2048) == sent(20_000)
    assert sum(sent(2048)) <= 6 * most


class Pretended:
    """Rank 1 of three, all of which have the same to say."""

    rank, size = 1, 3

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor] * self.size)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("group", [TensorParallelGroup(), Pretended()], ids=["alone", "three ranks"])
def test_truncating_waits_for_no_device(monkeypatch: pytest.MonkeyPatch, group: Any, limits: dict) -> None:
    """On a device whose tensors have no contents; see test_waits."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    meta, rows = torch.device("meta"), make_rows(4, **limits)
    sampler = Sampler(5000, group, meta)
    sampler.truncation.rows_at_once = 3
    own = len(sampler.own_range)
    with torch.inference_mode(), Watch() as watch:
        tokens = sampler.sample(torch.empty(4, own, device=meta), rows)
    assert tokens.device == meta
    assert watch.copies > 4


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("group", [TensorParallelGroup(), Pretended()], ids=["alone", "three ranks"])
def test_its_operations_are_the_same_whatever_the_logits(
    monkeypatch: pytest.MonkeyPatch, group: Any, limits: dict
) -> None:
    """Recorded on one batch's logits and replayed on another's, they cut those right: nothing was decided in Python."""
    known: dict[bytes, torch.Tensor] = {}  # the rows' settings, which lie on the device before the recording

    def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
        if array.tobytes() not in known:
            known[array.tobytes()] = torch.from_numpy(array)
        return known[array.tobytes()]

    monkeypatch.setattr(truncation, "to_device", to_device)
    rows, chosen = make_rows(3, **limits), np.ones(3, bool)
    made = truncation.Truncation(range(2000), 2000, 2000, group, CPU)
    first, second = torch.randn(2, 3, 2000, generator=torch.Generator().manual_seed(4)) * torch.tensor([[[1.0]], [[4]]])
    expected, room = second.clone(), first.clone()
    made.apply(expected, rows, chosen)
    recorder = Recorder()
    with torch.inference_mode():
        graph = recorder.capture(lambda: made.apply(room, rows, chosen))
        room.copy_(second)
        graph.replay()
    assert torch.equal(room, expected)
    assert not torch.equal(expected.isfinite(), first.isfinite())
