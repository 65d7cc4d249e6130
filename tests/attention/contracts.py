"""What the FlashAttention functions document, in plain torch on CPU, to stand in for them in tests.

Written from the documentation of flash-attn 2 (`flash_attn_varlen_func`, `flash_attn_with_kvcache`) and 3
(`flash_attn_with_kvcache`) and of torch 2.13 (`varlen_attn`):

    causal     aligned to the bottom right: query i of q sees keys j <= i + seqlen_k - seqlen_q
    window     (left, right): i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right, -1 for no bound
    paged      k, v [pages, page_size, kv_heads, D] with block_table [rows, pages], of which only what holds the row's
               keys is read; any other entry may be anything
    descale    (version 3) q, k and v all fp8 (e4m3); each stands for itself times its descale, [rows, kv_heads] fp32;
               the result is bf16. Other dtypes take none
    soft cap   score = cap * tanh(score / cap);  ALiBi: score -= slope * |i + seqlen_k - seqlen_q - j|

They check what the kernels check, and leave NaN in rows that the kernels would not write. Unlike the kernels they take
fp32 as well, so that rounding hides no error.
"""

from __future__ import annotations

import inspect

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
folded_calls: list[bool] = []  # of each call: were the heads of a group folded into the query length?


@torch.library.custom_op("quadriga_contracts::paged_attention", mutates_args=())
def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_starts: torch.Tensor,
    key_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    slopes: torch.Tensor | None,
    rows_written: int,
    max_key_len: int,
    key_starts: torch.Tensor | None,
) -> torch.Tensor:
    """q [tokens, heads, D] -> the same, NaN where nothing is written. One opaque operation, as a kernel is."""
    _check(int(key_lens.max()) <= max_key_len, f"rows have {key_lens.tolist()} keys, but the longest is {max_key_len}")
    if key_starts is not None:
        _check(torch.equal(key_starts.diff(), key_lens), "cu_seq_k and seqused_k contradict each other")
    out = torch.full_like(q, float("nan"))
    page_size, group = k.shape[1], q.shape[1] // k.shape[2]
    starts, lens = query_starts.tolist(), key_lens.tolist()
    for row in range(min(len(lens), rows_written)):
        first, stop, seqlen_k = starts[row], starts[row + 1], lens[row]
        seqlen_q = stop - first
        pages = block_table[row, : -(-seqlen_k // page_size)].long()
        if bool(((pages < 0) | (pages >= len(k))).any()):
            raise IndexError(f"row {row} reads pages {pages.tolist()} of {len(k)}")
        keys, values = (x[pages].flatten(0, 1)[:seqlen_k].double().repeat_interleave(group, 1) for x in (k, v))
        i = torch.arange(seqlen_q).unsqueeze(1) + seqlen_k - seqlen_q
        j = torch.arange(seqlen_k)
        scores = torch.einsum("qhd,khd->hqk", q[first:stop].double(), keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            scores = scores - slopes.double().view(-1, 1, 1) * (i - j).abs()
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        if left >= 0:
            visible &= j >= i - left
        if right >= 0:
            visible &= j <= i + right
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
        # What no query sees is not multiplied either: memory that was never written may hold NaN.
        values = values.masked_fill(~visible.any(0).view(-1, 1, 1), 0.0)
        result = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        out[first : min(stop, first + max_query_len)] = result[:max_query_len]
    return out


@paged_attention.register_fake
def _(q: torch.Tensor, *_others: object) -> torch.Tensor:
    return torch.empty_like(q)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def _check_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    rows: int,
    multiple: int,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> None:
    _check(q.dtype in dtypes and q.dtype == k.dtype == v.dtype, "query, key and value must have one dtype")
    _check(k.dim() == 4 and k.shape == v.shape, "k and v must be [pages, page_size, heads, D]")
    _check(k.shape[1] % multiple == 0, f"Paged KV cache block size must be divisible by {multiple}")
    _check(q.shape[-1] == k.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, "bad head dimension")
    _check(q.shape[-2] % k.shape[2] == 0, "Number of heads in key/value must divide number of heads in query")
    _check(all(x.stride(-1) == 1 for x in (q, k, v)), "Input tensor must have contiguous last dimension")
    _check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    _check(table.shape[0] == rows and table.stride(-1) == 1, "block_table must be [rows, pages]")


def _check_starts(name: str, starts: torch.Tensor | None, rows: int) -> None:
    _check(starts is not None, f"{name} must be set")
    _check(starts.dtype == torch.int32 and starts.is_contiguous(), f"{name} must be contiguous int32")
    _check(starts.shape == (rows + 1,), f"{name} must have shape (batch_size + 1)")


def _check_lens(name: str, lens: torch.Tensor, rows: int) -> None:
    _check(lens.dtype == torch.int32 and lens.is_contiguous() and lens.shape == (rows,), f"{name} must be [rows] int32")


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """torch 2.13's, over FlashAttention 2, with a block table."""
    assert return_aux is None, "the backends ask for no log-sum-exp"
    assert block_table is not None, "the backends always page"
    assert seqused_k is not None, "block_table requires seqused_k"
    rows, heads, kv_heads = len(cu_seq_q) - 1, query.shape[1], key.shape[2]
    if not enable_gqa and heads != kv_heads:
        raise ValueError(f"got Hq={heads} and Hkv={kv_heads}. Try setting enable_gqa=True for GQA.")
    _check_starts("cu_seq_q", cu_seq_q, rows)
    _check_starts("cu_seq_k", cu_seq_k, rows)
    _check_pages(query, key, value, block_table, rows, multiple=256)
    _check_lens("seqused_k", seqused_k, rows)
    folded = max_q == 1 and heads > kv_heads and tuple(window_size) == (-1, -1)
    folded_calls.append(folded)
    # Split-KV over ragged paged rows writes the first row only (pytorch issue 194167).
    written = rows if num_splits == 1 or folded else 1
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    flat = (query, key, value, cu_seq_q, seqused_k, block_table)
    return paged_attention(*flat, max_q, scale, *window_size, 0.0, None, written, max_k, cu_seq_k)


def unpaged_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """An older torch's, with ragged keys [keys, heads, D]: here each a page of its own."""
    rows = len(cu_seq_q) - 1
    _check_starts("cu_seq_q", cu_seq_q, rows)
    _check_starts("cu_seq_k", cu_seq_k, rows)
    _check(enable_gqa or query.shape[1] == key.shape[1], "the same number of heads")
    width = int(cu_seq_k.diff().max())
    table = cu_seq_k[:-1, None] + torch.arange(width, dtype=torch.int32)
    flat = (query, key[:, None], value[:, None], cu_seq_q, cu_seq_k.diff(), table)
    return paged_attention(*flat, max_q, scale, *window_size, 0.0, None, rows, max_k, cu_seq_k)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash-attn 2's. The lengths of paged keys are the differences of cu_seqlens_k."""
    assert not any((dropout_p, deterministic, return_attn_probs)), "not for inference"
    assert block_table is not None, "the backends always page"
    rows = len(cu_seqlens_q) - 1
    _check_starts("cu_seqlens_q", cu_seqlens_q, rows)
    _check_starts("cu_seqlens_k", cu_seqlens_k, rows)
    _check_pages(q, k, v, block_table, rows, multiple=256)
    lens = cu_seqlens_k.diff()
    bounds = (window_size[0], 0 if causal else window_size[1])
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    flat = (q, k, v, cu_seqlens_q, lens, block_table)
    return paged_attention(*flat, max_seqlen_q, scale, *bounds, softcap, alibi_slopes, rows, max_seqlen_k, None)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """flash-attn 2's: q [rows, queries, heads, D], every row with equally many."""
    unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad)
    assert all(x is None for x in unused), "the backends write keys and values themselves"
    assert rotary_interleaved, "left as it is"
    assert not return_softmax_lse, "not asked for"
    assert num_splits == 0, "left to the kernel, which splits dense rows rightly"
    assert block_table is not None, "the backends always page"
    rows, queries = q.shape[:2]
    _check_pages(q, k_cache, v_cache, block_table, rows, multiple=256)
    _check_lens("cache_seqlens", cache_seqlens, rows)
    folded_calls.append(queries == 1 and q.shape[2] > k_cache.shape[2] and tuple(window_size) == (-1, -1))
    starts = torch.arange(rows + 1, dtype=torch.int32) * queries
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    bounds = (window_size[0], 0 if causal else window_size[1])
    flat = (q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table)
    reach = block_table.shape[1] * k_cache.shape[1]
    return paged_attention(*flat, queries, scale, *bounds, softcap, alibi_slopes, rows, reach, None).view(q.shape)


def flash_attn_3_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
) -> torch.Tensor:
    """flash-attn 3's, with ragged queries. Pages may have any size; there are no ALiBi slopes."""
    assert num_splits == 0, "left to the kernel"
    rows = len(cu_seqlens_q) - 1
    _check_starts("cu_seqlens_q", cu_seqlens_q, rows)
    fp8 = q.dtype == torch.float8_e4m3fn
    _check_pages(q, k_cache, v_cache, page_table, rows, 1, (*DTYPES, torch.float8_e4m3fn))
    _check_lens("cache_seqlens", cache_seqlens, rows)
    descales = (q_descale, k_descale, v_descale)
    assert all((x is not None) == fp8 for x in descales), "descales belong to fp8"
    if fp8:
        _check(q.shape[-1] % 16 == 0, "head_size should be a multiple of 16")
        for x in descales:
            _check(x.dtype == torch.float32 and x.shape == (rows, k_cache.shape[2]), "descale must be [rows, kv_heads]")
        tokens = torch.arange(len(q), dtype=torch.int32)
        row = torch.searchsorted(cu_seqlens_q[1:], tokens, right=True).clamp(max=rows - 1)
        per_head = lambda x: x[row].repeat_interleave(q.shape[1] // x.shape[1], dim=1).unsqueeze(-1)  # noqa: E731
        q = q.float() * per_head(q_descale * k_descale)
        k_cache, v_cache = k_cache.float(), v_cache.float()
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    bounds = (window_size[0], 0 if causal else window_size[1])
    flat = (q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table)
    reach = page_table.shape[1] * k_cache.shape[1]
    out = paged_attention(*flat, max_seqlen_q, scale, *bounds, softcap, None, rows, reach, None)
    return (out * per_head(v_descale)).to(torch.bfloat16) if fp8 else out


def same_signature(ours: object, theirs: object) -> bool:
    """The same parameters in the same order, of the same kinds and with the same defaults."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(ours).parameters.values()] == [
        (p.name, p.kind, p.default) for p in inspect.signature(theirs).parameters.values()
    ]
