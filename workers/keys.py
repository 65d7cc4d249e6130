"""The order of a row's tokens as one 64-bit key each: the logit, as an integer that sorts alike, above the id turned
round. So of equal logits the lowest id comes first on any number of ranks, and only a few keys of each have to meet.
"""

from __future__ import annotations

import torch

LOWEST = -(2**63)  # below every token's key
_ID_MASK = 0xFFFFFFFF


def turned_ids(start: int, stop: int, device: torch.device) -> torch.Tensor:
    """[ids] int64 for `make_keys`."""
    return _ID_MASK - torch.arange(start, stop, dtype=torch.int64, device=device)


def make_keys(logits: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
    """int64 keys of fp32 logits, whose tokens have these turned ids."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    return ordered.long().bitwise_left_shift_(32).bitwise_or_(turned)


def ids_of(keys: torch.Tensor) -> torch.Tensor:
    return _ID_MASK - (keys & _ID_MASK)


def values_of(keys: torch.Tensor) -> torch.Tensor:
    """The fp32 logits of keys, as fp64."""
    ordered = (keys >> 32).int()
    return ordered.bitwise_xor_((ordered >> 31).bitwise_and_(0x7FFFFFFF)).view(torch.float32).double()


def best_keys(keys: torch.Tensor, width: int) -> torch.Tensor:
    """[n, width]: the highest of [n, ids] first, then LOWEST where there are no more."""
    best = torch.full((len(keys), width), LOWEST, dtype=torch.int64, device=keys.device)
    if own := min(width, keys.shape[1]):
        best[:, :own] = keys.topk(own, dim=-1).values
    return best


def best_of_ranks(keys: torch.Tensor) -> torch.Tensor:
    """[ranks, n, width] of every rank's best -> [n, width] of all of them, the highest first."""
    return keys.permute(1, 0, 2).flatten(1).topk(keys.shape[2], dim=-1).values
