"""How many rows of logits are looked at together, where what is made of them takes several times their memory."""

from __future__ import annotations

import torch

PIECE_ELEMENTS = 1 << 21  # logits that something is made of at once
CACHED_ELEMENTS = 1 << 17  # of these, as many as a CPU's cache holds with all that is made of them


def rows_at_once(width: int, device: torch.device) -> int:
    """width: logits of a row."""
    elements = CACHED_ELEMENTS if device.type == "cpu" else PIECE_ELEMENTS
    return max(1, elements // max(1, width))
