"""Rows to sample, and what their limits keep, by a sort of the whole row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from workers.truncation import SamplingRows

DEFAULTS = {"seeds": 7, "positions": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
DTYPES = {"seeds": np.uint64, "positions": np.int64, "top_k": np.int64}


def make_rows(count: int, **given: Any) -> SamplingRows:
    """`count` rows; a value given once holds for all of them."""
    columns = {**DEFAULTS, **given}
    return SamplingRows(
        **{
            name: np.broadcast_to(np.asarray(value, DTYPES.get(name, np.float64)), (count,)).copy()
            for name, value in columns.items()
        }
    )


def truncate(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """[n, vocabulary] fp32 logits -> fp64, divided by the temperature from the maximum down, -inf where top-k, then
    top-p, then min-p exclude a token."""
    column = lambda values: torch.from_numpy(values).unsqueeze(-1)  # noqa: E731
    top_k, top_p, min_p = column(rows.top_k), column(rows.top_p), column(rows.min_p)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / column(rows.temperature)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[-1]
    rank = torch.arange(vocab)
    keep = rank < torch.where(top_k > 0, top_k, vocab)
    probabilities = ordered.masked_fill(~keep, float("-inf")).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep &= (before < top_p) | (top_p >= 1)
    keep &= probabilities >= min_p * probabilities[:, :1]
    keep[:, 0] = True
    return scaled.masked_fill(~torch.zeros_like(keep).scatter_(-1, order, keep), float("-inf"))
