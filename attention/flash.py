"""Attention by the flash-attn package: version 2, or version 3 on Hopper where its interface is installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention.backend import BackendError
from attention.cache import Scales, quantise
from attention.capabilities import Capabilities, HeadLayout
from attention.ragged import FLASH2_PAGES, FLASH2_REASON, RaggedBackend, RaggedRows, unusable_device

_HALVES = (torch.bfloat16, torch.float16)
_CAPABILITIES = {
    2: Capabilities(
        dtypes=_HALVES,
        max_head_dim=256,
        head_dim_multiple=8,  # others it would pad, and with them the whole cache at each call
        block_multiple=FLASH2_PAGES,
        preferred_block=FLASH2_PAGES,
        block_reason=FLASH2_REASON,
        soft_cap=True,
        alibi=True,
        one_call=True,
        graphs="mixed",
    ),
    3: Capabilities(
        dtypes=_HALVES,
        max_head_dim=256,
        head_dim_multiple=8,
        cache_dtypes=(torch.float8_e4m3fn,),
        cache_head_dim_multiple=16,
        preferred_block=128,
        soft_cap=True,
        one_call=True,
        graphs="mixed",
    ),
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The package's functions. varlen: of version 2; version 3 attends to ragged queries with `with_kvcache` alone."""

    version: int
    with_kvcache: Callable[..., torch.Tensor]
    varlen: Callable[..., torch.Tensor] | None = None


class FlashAttnBackend(RaggedBackend):
    """kernels: what is installed, or in tests what stands in for it."""

    name = "flash_attn"

    def __init__(self, layout: HeadLayout, scale: float, calls: str = "auto", kernels: Kernels | None = None) -> None:
        self._kernels = kernels or find_kernels(torch.device("cuda"))
        super().__init__(layout, scale, calls, _CAPABILITIES[self._kernels.version])
        self._slopes: torch.Tensor | None = None
        self._descales: dict[float, torch.Tensor] = {}

    @classmethod
    def on(cls, device: torch.device) -> Capabilities:
        return _CAPABILITIES[find_kernels(device).version]

    def _call(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        rows: RaggedRows,
        window: int | None,
        scales: Scales | None,
    ) -> torch.Tensor:
        scoring = {
            "softmax_scale": self.scale,
            "causal": True,
            # Without a window (-1, -1), never (-1, 0): only then are the heads of a group folded into one tile.
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": self.layout.soft_cap or 0.0,
        }
        if self._kernels.version == 3:
            asked = query.dtype
            if scales is not None:  # the kernel multiplies fp8 with fp8, so the queries have to be that too
                query = quantise(query, scales.query, cache[0].dtype)
                shape = (len(rows.context_lens), self.layout.num_kv_heads)
                for name in ("query", "key", "value"):
                    scoring[f"{name[0]}_descale"] = self._descale(getattr(scales, name), query.device).expand(shape)
            attended = self._kernels.with_kvcache(
                query,
                *cache,
                cache_seqlens=rows.context_lens,
                page_table=rows.block_table,
                cu_seqlens_q=rows.query_start_loc,
                max_seqlen_q=rows.max_query_len,
                **scoring,
            )
            return attended.to(asked)  # of fp8 it makes bf16
        scoring["alibi_slopes"] = self._alibi_slopes(query.device)
        if rows.decode:  # it splits long contexts among thread blocks, which the ragged function does not
            return self._kernels.with_kvcache(
                query.unsqueeze(1), *cache, cache_seqlens=rows.context_lens, block_table=rows.block_table, **scoring
            ).squeeze(1)
        return self._kernels.varlen(
            query,
            *cache,
            rows.query_start_loc,
            rows.key_start_loc,
            rows.max_query_len,
            rows.max_seq_len,
            block_table=rows.block_table,
            **scoring,
        )

    def _descale(self, scale: float, device: torch.device) -> torch.Tensor:
        """[1, 1] fp32, made once: a captured step must find it where it was."""
        if scale not in self._descales:
            self._descales[scale] = torch.full((1, 1), scale, dtype=torch.float32, device=device)
        return self._descales[scale]

    def _alibi_slopes(self, device: torch.device) -> torch.Tensor | None:
        """[num_q_heads] fp32."""
        if self.layout.alibi_slopes is not None and self._slopes is None:
            self._slopes = torch.tensor(self.layout.alibi_slopes, dtype=torch.float32, device=device)
        return self._slopes


def find_kernels(device: torch.device) -> Kernels:
    """The newest interface that is installed and runs on this device. Raises BackendError when there is none."""
    problem = f"attention backend {FlashAttnBackend.name}: "
    reason = unusable_device(device)
    if reason is not None:
        raise BackendError(problem + reason)
    if torch.cuda.get_device_capability(device)[0] == 9:
        try:
            from flash_attn_interface import flash_attn_with_kvcache

            return Kernels(3, flash_attn_with_kvcache)
        except ImportError:
            pass  # version 2 runs on Hopper too
    try:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    except ImportError as error:
        raise BackendError(f"{problem}the flash-attn package cannot be imported ({error})") from error
    for function in (flash_attn_varlen_func, flash_attn_with_kvcache):
        missing = {"block_table", "softcap", "window_size", "alibi_slopes"} - set(
            inspect.signature(function).parameters
        )
        if missing:
            raise BackendError(
                f"{problem}the installed flash-attn's {function.__name__} has no {', '.join(sorted(missing))}; "
                "it needs 2.6 or newer"
            )
    return Kernels(2, flash_attn_with_kvcache, flash_attn_varlen_func)
