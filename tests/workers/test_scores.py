"""Log probabilities against log_softmax, on any number of ranks, ties included; and where a prompt's are computed."""

from __future__ import annotations

import pytest
import torch

from parallel.group import TensorParallelGroup
from parallel.split import deal_lanes
from scheduler.plan import Admission, Chunk, Extras, StepPlan
from tests.ranks import run_ranks
from workers import scores
from workers.scores import Scorer, Scores, scored_chunks
from workers.state import Rows

CPU = torch.device("cpu")


def score(logits: torch.Tensor, token_ids: torch.Tensor, width: int, size: int) -> Scores:
    vocab = logits.shape[1]

    def run(group: TensorParallelGroup) -> Scores:
        own = deal_lanes(vocab, size)[group.rank]
        return Scorer(own, vocab, group, CPU).score(logits[:, own.start : own.stop].contiguous(), token_ids, width)

    first, *others = run_ranks(size, run)
    for other in others:
        assert torch.equal(first.logprobs, other.logprobs)
        assert torch.equal(first.top_ids, other.top_ids)
    return first


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [0, 1, 20])
def test_they_are_those_of_log_softmax_likeliest_first(size: int, width: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = 5 * torch.randn(6, 301, generator=generator)
    token_ids = torch.tensor([0, 300, 150, 99, 100, 200])
    expected = logits.double().log_softmax(-1)
    got = score(logits, token_ids, width, size)
    assert torch.allclose(got.logprobs, expected.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1), atol=1e-9)
    values, ids = expected.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(got.top_ids, ids[:, :width])
    assert torch.allclose(got.top_logprobs, values[:, :width], atol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_of_equals_the_lowest_ids_come_first(size: int) -> None:
    logits = torch.zeros(2, 301)
    logits[0, ::2] = -0.0  # equal to 0.0
    logits[1, [7, 150, 299]] = 2.0
    got = score(logits, torch.tensor([5, 6]), 6, size)
    assert got.top_ids.tolist() == [[0, 1, 2, 3, 4, 5], [7, 150, 299, 0, 1, 2]]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_vocabulary_smaller_than_asked_for_gives_what_there_is(size: int) -> None:
    logits = torch.tensor([[0.5, -3.0, 2.0]])  # with five ranks two have no token
    got = score(logits, torch.tensor([1]), 20, size)
    assert got.top_ids.tolist() == [[2, 0, 1]]
    assert got.entries([20])[0].logprob == got.entries([20])[0].top[2][1]


def test_what_is_impossible_stays_a_number() -> None:
    got = score(torch.tensor([[0.0, float("-inf"), -1e30]]), torch.tensor([1]), 3, 1)
    assert got.entries([3])[0].logprob == -9999.0
    assert [logprob for _, logprob in got.entries([3])[0].top] == [0.0, -9999.0, -9999.0]


def test_every_row_gets_as_many_as_it_asked_for() -> None:
    entries = score(torch.randn(3, 40), torch.tensor([1, 2, 3]), 5, 1).entries([0, 5, 2])
    assert [len(entry.top) for entry in entries] == [0, 5, 2]


@pytest.mark.parametrize("piece", [1, 7, 10**6])
def test_a_prompt_is_scored_piece_by_piece(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(scores, "PIECE_ELEMENTS", piece * 11)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(20, 4, generator=generator), torch.randn(11, 4, generator=generator)
    sizes = []

    def head(some: torch.Tensor) -> torch.Tensor:
        sizes.append(len(some))
        return some @ weight.T

    chunk = scores.ScoredChunk(0, 1, hidden=3, token_ids=torch.arange(15) % 11, width=2)
    parts = Scorer(range(11), 11, TensorParallelGroup(), CPU).score_prompt(hidden, head, chunk)
    assert max(sizes) <= piece
    got = [entry.logprob for part in parts for entry in part.entries([2] * len(part.token_ids))]
    expected = (hidden[3:18] @ weight.T).double().log_softmax(-1)[range(15), chunk.token_ids]
    assert got == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("start", "length", "scored", "found"),
    [
        (0, 5, 1, (1, 5, 0)),  # the first token has none; the chunk's last token foretells the next one's
        (5, 3, 1, (6, 8, 0)),
        (8, 4, 1, (9, 9, 0)),  # the prompt ends before the chunk does, as after a preemption
        (10, 2, 1, None),
        (0, 8, 4, (4, 8, 3)),  # up to there they are known
        (5, 3, 9, (9, None, None)),
    ],
)
def test_chunks_are_scored_from_the_first_unknown_token_to_the_last_of_the_prompt(
    start: int, length: int, scored: int, found: tuple[int, int, int] | None
) -> None:
    rows = Rows(4, 8, 4)
    extras = Extras(num_prompt=10, prompt_logprobs=3, scored=scored)
    plan = StepPlan(0, 0, [Admission(2, list(range(100, 114)), 0, 0.0, 0, 1.0, 0.0, start, extras)])
    plan.new_blocks = [(2, [0, 1, 2, 3])]
    plan.admissions.append(Admission(1, [1, 2], 0, 0.0, 0, 1.0, 0.0))
    plan.new_blocks.append((1, [5]))
    plan.chunks = [Chunk(1, 0, 2, False), Chunk(2, start, length, False)]
    rows.apply(plan)
    chunks = scored_chunks(plan, rows, CPU)
    if found is None or found[1] is None:
        assert chunks == []
        return
    first, last, hidden = found
    (chunk,) = chunks
    assert (chunk.chunk, chunk.first, chunk.hidden, chunk.width) == (1, first, 2 + hidden, 3)
    assert chunk.token_ids.tolist() == list(range(100 + first, 100 + last + 1))
