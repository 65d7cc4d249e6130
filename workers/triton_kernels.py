"""The few fused kernels that are worth having on CUDA, in Triton. Each computes what its torch counterpart does.

Rounding is that of the counterparts, operation by operation in the tensors' dtype, so that turning the kernels off
changes no more than the order of sums. With TRITON_INTERPRET=1 set before this module is imported they run on CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.inputs import to_device

_NOISE_BLOCK = 1024


@triton.jit
def _rounded(x, like):
    """To the dtype of `like` and back to fp32: arithmetic itself is fp32, which every dtype is exact in."""
    return x.to(like.dtype).to(tl.float32)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., heads, size] or [tokens, size], any strides but 1 in the last -> its normalisation, and x + residual.

    Without a residual the second is x itself. Counterpart: workers.ops.TorchOps.norm and add_norm.
    """
    shaped = x if x.dim() == 3 else x.unsqueeze(1)
    tokens, heads, size = shaped.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        _rms_norm[(tokens * heads,)](
            shaped,
            x if residual is None else residual.contiguous(),
            weight,
            out,
            total,
            heads,
            size,
            shaped.stride(0),
            shaped.stride(1),
            eps,
            add=residual is not None,
            block=triton.next_power_of_2(size),
        )
    return out, total


@triton.jit
def _rms_norm(
    x, residual, weight, out, total, heads, size, stride_token, stride_head, eps, add: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < size
    value = tl.load(x + row // heads * stride_token + row % heads * stride_head + column, mask=inside, other=0.0)
    if add:
        added = tl.load(residual + row * size + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(total + row * size + column, value, mask=inside)
    wide = value.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (gain * _rounded(scaled, value)).to(value.dtype), mask=inside)


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    pages: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotates q [n, heads, head_dim] and k, v [n, kv_heads, head_dim] into a new q and the pages, in one launch.

    pages: keys and values, [blocks, block_size, kv_heads, head_dim], contiguous; slots: [n] int64, where in them.
    Counterpart: workers.rope.rotate, twice, then attention.cache.scatter.
    """
    cos, sin = rotary
    tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens:
        _rotate_and_store[(tokens, q_heads + 2 * kv_heads)](
            *(q, k, v, cos, sin, slots, out, *pages),
            *(q_heads, kv_heads),
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0)),
            half=head_dim // 2,
            block=triton.next_power_of_2(head_dim // 2),
        )
    return out


@triton.jit
def _rotate_and_store(
    q,
    k,
    v,
    cos,
    sin,
    slots,
    q_out,
    key_pages,
    value_pages,
    q_heads,
    kv_heads,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    angle_token,
    half: tl.constexpr,
    block: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, block)
    inside = column < half
    if head < q_heads:
        source = q + token * q_token + head * q_head
    elif head < q_heads + kv_heads:
        source = k + token * k_token + (head - q_heads) * k_head
    else:
        source = v + token * v_token + (head - q_heads - kv_heads) * v_head
    left = tl.load(source + column, mask=inside, other=0.0)
    right = tl.load(source + half + column, mask=inside, other=0.0)
    if head < q_heads + kv_heads:
        first, second = left.to(tl.float32), right.to(tl.float32)
        # Both halves of an angle row are equal.
        c = tl.load(cos + token * angle_token + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + token * angle_token + column, mask=inside, other=0.0).to(tl.float32)
        turned = _rounded(first * c, left) - _rounded(second * s, left)
        right = (_rounded(second * c, left) + _rounded(first * s, left)).to(left.dtype)
        left = turned.to(left.dtype)
    if head < q_heads:
        target = q_out + (token * q_heads + head) * 2 * half
    elif head < q_heads + kv_heads:
        target = key_pages + (tl.load(slots + token) * kv_heads + head - q_heads) * 2 * half
    else:
        target = value_pages + (tl.load(slots + token) * kv_heads + head - q_heads - kv_heads) * 2 * half
    tl.store(target + column, left, mask=inside)
    tl.store(target + half + column, right, mask=inside)


def silu_multiply(x: torch.Tensor) -> torch.Tensor:
    """x [n, 2 * m], contiguous: gates, then what they let through -> [n, m]. Counterpart: F.silu(gate) * up."""
    tokens, width = x.shape
    size = width // 2
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    if tokens:
        _silu_multiply[(tokens, triton.cdiv(size, 1024))](x, out, size, block=1024)
    return out


@triton.jit
def _silu_multiply(x, out, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    gate = tl.load(x + row * 2 * size + column, mask=inside, other=0.0)
    up = tl.load(x + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    opened = _rounded(wide / (1.0 + tl.exp(-wide)), gate)
    tl.store(out + row * size + column, (opened * up).to(gate.dtype), mask=inside)


def gumbel_noise(high: torch.Tensor, low: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[n, ids] fp32 in one launch, for keys [n] int64 each, on the host. Counterpart: workers.noise.gumbel_noise."""
    noise = torch.empty(len(high), len(ids), dtype=torch.float32, device=ids.device)
    if noise.numel():
        high, low = (to_device(keys.numpy(), ids.device) for keys in (high, low))
        _gumbel[(len(high), triton.cdiv(len(ids), _NOISE_BLOCK))](noise, high, low, ids, len(ids), block=_NOISE_BLOCK)
    return noise


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(noise, high, low, ids, count, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < count
    token = tl.load(ids + column, mask=inside, other=0).to(tl.uint32)
    x = _mix32(token * 0x9E3779B1 + tl.load(high + row).to(tl.uint32))
    x = _mix32(x ^ tl.load(low + row).to(tl.uint32))
    uniform = (x.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    tl.store(noise + row * count + column, (-tl.log(-tl.log(uniform))).to(tl.float32), mask=inside)
