"""The compiled half of truncation against plain torch: keys, counts and cuts to the bit, masses to a few units."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.compiled import kernels_or_skip, poisoned
from workers.keys import turned_ids
from workers.ranges import BINS, CompiledRange, TorchRange, order_of

KERNELS = kernels_or_skip()
pytestmark = pytest.mark.usefixtures(poisoned.__name__)
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FIRST_ID = 31_000
UNIT = 2.0**46

logits_ = st.builds(
    lambda count, scale, steps, masked, seed: make_logits(count, scale, steps, masked, seed),
    st.sampled_from([1, 2, 15, 16, 17, 100, 5000, 30_000]),
    st.sampled_from([0.0, 0.5, 3.0, 1e4, 1e36]),
    st.sampled_from([0, 1, 8]),
    st.sampled_from([0.0, 0.9]),
    st.integers(0, 10_000),
)


def make_logits(count: int, scale: float, steps: int, masked: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(5, count, generator=generator)
    if steps:
        logits = (logits * steps).round() / steps
    forbidden = torch.rand(5, count, generator=generator) < masked
    return logits.masked_fill(forbidden, -math.inf)


def both(logits: torch.Tensor, index: list[int], above: float = 0.0) -> tuple[TorchRange, CompiledRange]:
    """Of copies of the logits. above: how much higher another rank's largest logit is."""
    places = torch.tensor(index)
    top = logits.amax(dim=-1, keepdim=True)[places] + above
    turned = turned_ids(FIRST_ID, FIRST_ID + logits.shape[1], torch.device("cpu"))
    plain = TorchRange(logits.clone(), places, top, turned)
    return plain, CompiledRange(KERNELS, logits.clone(), places, top, FIRST_ID)


def logits_of(some: CompiledRange) -> torch.Tensor:
    return some._tensors[1]


@relaxed
@given(logits_, st.sampled_from([1, 2, 20, 1024]), st.sampled_from([0.0, 0.25, 7.0]))
def test_the_nearest(logits: torch.Tensor, width: int, above: float) -> None:
    logits = logits.clamp(min=-1e30)  # rows without any number are not looked at
    plain, compiled = both(logits, [4, 0, 2], above)
    assert torch.equal(compiled.nearest(width), plain.nearest(width))


@relaxed
@given(logits_, st.sampled_from([1e-300, 0.01, 0.8, 1.0, 100.0]), st.sampled_from([0.0, 0.25, 7.0]), st.integers(0, 99))
def test_weights_of_every_round(logits: torch.Tensor, temperature: float, above: float, pick: int) -> None:
    """Round for round below the order of some token."""
    logits[:, 0] = 0.0
    plain, compiled = both(logits, [1, 3], above)
    order = plain.order[:, pick % logits.shape[1]].unsqueeze(-1)
    heat = torch.full((2, 1), temperature, dtype=torch.float64)
    for shift in (24, 16, 8, 0):
        cut = torch.zeros_like(order) if shift == 24 else order >> shift + 8
        counts = compiled.weigh(cut, shift, None, 1.0)
        assert torch.equal(counts, plain.weigh(cut, shift, None, 1.0))
        assert counts.shape == (2, BINS)
        masses, expected = compiled.weigh(cut, shift, heat, UNIT), plain.weigh(cut, shift, heat, UNIT)
        assert ((masses - expected).abs() <= 2 * counts).all()  # units, of which the most likely token weighs 2**46


@relaxed
@given(logits_, st.integers(0, 99), st.sampled_from([-3, 0, 1, 2, 5, 2**62]))
def test_cuts(logits: torch.Tensor, pick: int, quota: int) -> None:
    logits[:, 0] = 0.0
    plain, compiled = both(logits, [3, 1, 4])
    order = plain.order[:, pick % logits.shape[1]].unsqueeze(-1).contiguous()
    quotas = torch.tensor([[quota], [1], [2]])
    plain.cut(order, quotas)
    compiled.cut(order, quotas)
    assert torch.equal(logits_of(compiled), plain.logits)
    assert torch.equal(plain.logits[[0, 2]], logits[[0, 2]])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_holds_no_number_is_never_cut_to_one(value: float) -> None:
    logits = torch.randn(3, 200)
    logits[1] = value
    logits[1, :50] = -3.0 if value != -math.inf else value
    for some in both(logits, [0, 1, 2]):
        some.cut(order_of(torch.full((3, 1), -0.5)), torch.zeros(3, 1, dtype=torch.int64))
        result = some.logits if isinstance(some, TorchRange) else logits_of(some)
        assert not result[1].amax().isfinite()
        assert result[[0, 2]].amax(dim=-1).tolist() == [0.0, 0.0]
