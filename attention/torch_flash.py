"""Attention by torch's own FlashAttention, `torch.nn.attention.varlen.varlen_attn`: a plain torch install is enough."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from attention.backend import BackendError
from attention.capabilities import Capabilities, HeadLayout
from attention.ragged import FLASH2_PAGES, FLASH2_REASON, RaggedBackend, RaggedRows, unusable_device

_NEEDED = {"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}


class TorchFlashBackend(RaggedBackend):
    """FlashAttention 2 as torch ships it, or the implementation that was activated in its place.

    varlen_attn: torch's function, or in tests what stands in for it.
    split_decodes: let the kernel split long contexts of decodes among thread blocks where torch computes that rightly.
    Off, because splitting was seen to leave rows unwritten for paged keys (pytorch issue 194167).
    """

    name = "torch_flash"

    def __init__(
        self,
        layout: HeadLayout,
        scale: float,
        calls: str = "auto",
        varlen_attn: Callable[..., torch.Tensor] | None = None,
        split_decodes: bool = False,
    ) -> None:
        super().__init__(layout, scale, calls, _capabilities())
        self._varlen_attn = varlen_attn or _find()
        self._split_decodes = split_decodes
        self._plain = _activated() is None

    @classmethod
    def on(cls, device: torch.device) -> Capabilities:
        reason = unusable_device(device)
        if reason is not None:
            raise BackendError(f"attention backend {cls.name}: {reason}")
        _find()
        return _capabilities()

    def _call(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: RaggedRows,
        window: int | None,
    ) -> torch.Tensor:
        grouped = self.layout.group_size > 1
        # Version 2 folds a group's heads into the query length, and so reads each key once for all of them, only where
        # the window is (-1, -1). A decode is its context's last token: that sees what (-1, 0), causal, would show it.
        folded = rows.decode and grouped and window is None
        # Folded rows are no longer ragged, and only then does version 2's split-KV write every one of them. What may
        # be activated in its place splits rightly.
        may_split = not self._plain or (self._split_decodes and folded)
        return self._varlen_attn(
            query,
            *cache,
            rows.query_start_loc,
            # Version 2 takes key starts even for paged keys, later ones refuse them there.
            rows.key_start_loc if self._plain else None,
            rows.max_query_len,
            rows.max_seq_len,
            scale=self.scale,
            window_size=(-1, -1) if folded else (-1 if window is None else window - 1, 0),
            enable_gqa=grouped,
            seqused_k=rows.context_lens,
            block_table=rows.block_table,
            num_splits=None if may_split else 1,
        )


def _activated() -> str | None:
    """The implementation that `torch.nn.attention.activate_flash_attention_impl` put in place of version 2."""
    current: Any = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return current() if current is not None else None


def _capabilities() -> Capabilities:
    plain = _activated() is None
    return Capabilities(
        dtypes=(torch.bfloat16, torch.float16),
        max_head_dim=256,
        head_dim_multiple=8,
        block_multiple=FLASH2_PAGES if plain else 1,
        preferred_block=FLASH2_PAGES if plain else 128,
        block_reason=FLASH2_REASON if plain else "",
        one_call=True,
        graphs="mixed",
    )


def _find() -> Callable[..., torch.Tensor]:
    problem = f"attention backend {TorchFlashBackend.name}: torch {torch.__version__}"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise BackendError(f"{problem} has no varlen_attn; it needs 2.13 or newer") from error
    missing = _NEEDED - set(inspect.signature(varlen_attn).parameters)
    if missing:
        raise BackendError(f"{problem} has a varlen_attn without {', '.join(sorted(missing))}; it needs 2.13 or newer")
    return varlen_attn
