"""Attention by torch's own FlashAttention, `torch.nn.attention.varlen.varlen_attn`: a plain torch install is enough."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attention.backend import BackendError
from attention.cache import Scales
from attention.capabilities import Capabilities, HeadLayout
from attention.ragged import FLASH2_PAGES, FLASH2_REASON, RaggedBackend, RaggedRows, unusable_device

_PAGES_SINCE = (2, 13)  # before, FlashAttention 2 took no num_splits, without which it computes paged keys wrongly
_FOR_PAGES = {"seqused_k", "block_table", "num_splits", "enable_gqa"}
_ALWAYS = {"scale", "window_size"}


@dataclass(frozen=True, slots=True)
class TorchKernel:
    """torch's function and what this torch's version of it takes.

    paged: keys are read where they lie; if not, they are copied out of their pages first, in every layer.
    grouped: fewer key heads than query heads may be given; if not, they are repeated.
    plain: FlashAttention 2 as torch ships it, not an implementation that was activated in its place.
    """

    varlen_attn: Callable[..., torch.Tensor]
    paged: bool = True
    grouped: bool = True
    plain: bool = True


class TorchFlashBackend(RaggedBackend):
    """FlashAttention 2 as torch ships it, or the implementation that was activated in its place.

    kernel: what this torch has, or in tests what stands in for it.
    split_decodes: let the kernel split long contexts of decodes among thread blocks where torch computes that rightly.
    Off, because splitting was seen to leave rows unwritten for paged keys (pytorch issue 194167).
    """

    name = "torch_flash"

    def __init__(
        self,
        layout: HeadLayout,
        scale: float,
        calls: str = "auto",
        kernel: TorchKernel | None = None,
        split_decodes: bool = False,
    ) -> None:
        self._kernel = kernel or find_kernel()
        super().__init__(layout, scale, calls, _capabilities(self._kernel))
        self._split_decodes = split_decodes
        self._copied: tuple[RaggedRows, torch.Tensor] | None = None

    @classmethod
    def on(cls, device: torch.device) -> Capabilities:
        reason = unusable_device(device)
        if reason is not None:
            raise BackendError(f"attention backend {cls.name}: {reason}")
        return _capabilities(find_kernel())

    def _call(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: RaggedRows,
        window: int | None,
        scales: Scales | None,
    ) -> torch.Tensor:
        if not self._kernel.paged:
            return self._call_copied(query, cache, rows, window)
        plain, grouped = self._kernel.plain, self.layout.group_size > 1
        # Version 2 folds a group's heads into the query length, and so reads each key once for all of them, only where
        # the window is (-1, -1). A decode is its context's last token: that sees what (-1, 0), causal, would show it.
        folded = rows.decode and grouped and window is None
        # Folded rows are no longer ragged, and only then does version 2's split-KV write every one of them. What may
        # be activated in its place splits rightly.
        may_split = not plain or (self._split_decodes and folded)
        return self._kernel.varlen_attn(
            query,
            *cache,
            rows.query_start_loc,
            # Version 2 takes key starts even for paged keys, later ones refuse them there.
            rows.key_start_loc if plain else None,
            rows.max_query_len,
            rows.max_seq_len,
            scale=self.scale,
            window_size=(-1, -1) if folded else _reach(window),
            enable_gqa=grouped,
            seqused_k=rows.context_lens,
            block_table=rows.block_table,
            num_splits=None if may_split else 1,
        )

    def _call_copied(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: RaggedRows,
        window: int | None,
    ) -> torch.Tensor:
        if self._copied is None or self._copied[0] is not rows:
            self._copied = (rows, key_slots(rows, cache[0].shape[1]))
        slots = self._copied[1]
        keys, values = (pages.view(-1, *pages.shape[2:])[slots] for pages in cache)
        options: dict[str, Any] = {}
        if self.layout.group_size > 1:
            if self._kernel.grouped:
                options["enable_gqa"] = True
            else:
                keys, values = (x.repeat_interleave(self.layout.group_size, dim=1) for x in (keys, values))
        return self._kernel.varlen_attn(
            query,
            keys,
            values,
            rows.query_start_loc,
            rows.key_start_loc,
            rows.max_query_len,
            rows.max_seq_len,
            scale=self.scale,
            window_size=_reach(window),
            **options,
        )


def _reach(window: int | None) -> tuple[int, int]:
    """Keys to the left and right of a query's own; -1 for all."""
    return (-1 if window is None else window - 1, 0)


def key_slots(rows: RaggedRows, block_size: int) -> torch.Tensor:
    """The cache slots of all rows' contexts, one row after the other: [total keys] int64. Waits for the device."""
    positions = torch.arange(int(rows.key_start_loc[-1]), dtype=torch.int32, device=rows.key_start_loc.device)
    row = torch.searchsorted(rows.key_start_loc[1:], positions, right=True)
    offsets = positions - rows.key_start_loc[row]
    return rows.block_table[row, offsets // block_size].long() * block_size + offsets % block_size


def find_kernel() -> TorchKernel:
    """What this torch has. Raises BackendError where its function is missing or too old."""
    problem = f"attention backend {TorchFlashBackend.name}: torch {torch.__version__}"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise BackendError(f"{problem} has no varlen_attn; 2.13 or newer has all that is wanted") from error
    known = set(inspect.signature(varlen_attn).parameters)
    if not known >= _ALWAYS:
        raise BackendError(
            f"{problem} has a varlen_attn without {', '.join(sorted(_ALWAYS - known))}; "
            "2.13 or newer has all that is wanted"
        )
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    paged = known >= _FOR_PAGES and (version >= _PAGES_SINCE or current is not None)
    return TorchKernel(varlen_attn, paged, "enable_gqa" in known, current is None)


def _capabilities(kernel: TorchKernel) -> Capabilities:
    dtypes = (torch.bfloat16, torch.float16)
    common = {"dtypes": dtypes, "max_head_dim": 256, "head_dim_multiple": 8, "one_call": True}
    if not kernel.paged:
        note = (
            f"keys are copied out of their pages in every layer, since torch {torch.__version__} cannot read them there"
        )
        return Capabilities(**common, note=note)
    if not kernel.plain:
        return Capabilities(**common, preferred_block=128, graphs="mixed")
    pages = {"block_multiple": FLASH2_PAGES, "preferred_block": FLASH2_PAGES, "block_reason": FLASH2_REASON}
    return Capabilities(**common, **pages, graphs="mixed")
