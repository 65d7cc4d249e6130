"""What backends can do and what a model asks of them, so that a mismatch is refused by name before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GRAPHS = ("none", "decode", "mixed")


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The rank's own heads: query head h reads key/value head h // (num_q_heads // num_kv_heads).

    soft_cap: scores become soft_cap * tanh(score / soft_cap) before the softmax; None leaves them.
    alibi_slopes: one per query head; slope * distance is taken off each score (ALiBi, arXiv 2108.12409).
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a model and its settings ask, beyond the heads.

    dtype: of queries, keys and values. cache_dtype: of the cache, None for the same. block_size: None lets the backend
    choose. window: some layer has one.
    """

    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    block_size: int | None = None
    window: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one backend can do on one device.

    cache_dtypes: what its caches may be in besides the dtype of queries. cache_head_dim_multiple: with these.
    block_multiple, preferred_block: which block sizes it takes, in tokens, and which it is given when nobody asks.
    block_reason: why, for whoever asked for another one.
    one_call: prefill and decode rows of a step may go through one call.
    note: what the user should know when this one is taken.
    graphs: what may be replayed from a CUDA graph: "none", "decode" for steps of decodes alone, or "mixed" for all.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    cache_dtypes: tuple[torch.dtype, ...] = ()
    cache_head_dim_multiple: int = 1
    block_multiple: int = 1
    preferred_block: int = 16
    block_reason: str = ""
    window: bool = True
    soft_cap: bool = False
    alibi: bool = False
    one_call: bool = False
    graphs: str = "none"
    note: str = ""

    def refusal(self, layout: HeadLayout, demand: Demand) -> str | None:
        """Why this cannot be served, or None when it can."""
        if demand.dtype not in self.dtypes:
            return f"it computes in {_names(self.dtypes)}, the model runs in {_names((demand.dtype,))}"
        if self.max_head_dim is not None and layout.head_dim > self.max_head_dim:
            return f"its heads have at most {self.max_head_dim} dimensions, the model's have {layout.head_dim}"
        other_cache, multiple, caches = demand.cache_dtype is not None, self.head_dim_multiple, ""
        if other_cache and demand.cache_dtype not in self.cache_dtypes:
            known = f" or {_names(self.cache_dtypes)}" if self.cache_dtypes else ""
            return f"its caches are in the model's dtype{known}, not in {_names((demand.cache_dtype,))}"
        if other_cache:
            multiple, caches = (
                max(multiple, self.cache_head_dim_multiple),
                f" with caches in {_names(self.cache_dtypes)}",
            )
        if layout.head_dim % multiple:
            return f"its head dimensions are multiples of {multiple}{caches}, the model's heads have {layout.head_dim}"
        for has, asked, name in (
            (self.window, demand.window, "sliding windows"),
            (self.soft_cap, layout.soft_cap is not None, "soft caps on scores"),
            (self.alibi, layout.alibi_slopes is not None, "ALiBi slopes"),
        ):
            if asked and not has:
                return f"it has no {name}, which the model needs"
        if demand.block_size is not None and demand.block_size % self.block_multiple:
            return (
                f"block_size {demand.block_size} is not a multiple of {self.block_multiple}"
                f"{': ' + self.block_reason if self.block_reason else ''}"
            )
        return None


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
