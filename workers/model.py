"""The decoder: one definition for the Llama family, told apart by configuration alone.

Covers Llama 2 and 3.x, Mistral, Qwen2/2.5, Qwen3, SmolLM2 and SmolLM3. Tensors are [tokens, features]: a step's tokens
lie flat, whatever request they belong to, and only attention knows about requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from parallel.group import TensorParallelGroup
from parallel.layers import ColumnParallelLinear, Matrix, ParallelHead, RowParallelLinear, VocabParallelEmbedding
from parallel.loader import Checkpoint
from parallel.split import HeadShard, deal_lanes, shard_heads
from workers.architecture import Architecture
from workers.ops import Ops, Rotary, TorchOps
from workers.rope import RotaryTable


class Attend(Protocol):
    """Rotates queries and keys, stores keys and values of one layer, attends: [n, heads, head_dim] each -> like query.

    rotary: the step's angles, or None for a layer without positions.
    """

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: Rotary | None,
        window: int | None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of the model, and where it lives."""

    heads: HeadShard
    mlp: range
    vocab: range
    group: TensorParallelGroup
    dtype: torch.dtype
    device: torch.device
    ops: Ops


def make_shard(
    arch: Architecture, group: TensorParallelGroup, dtype: torch.dtype, device: torch.device, ops: Ops | None = None
) -> Shard:
    return Shard(
        heads=shard_heads(arch.num_q_heads, arch.num_kv_heads, group.size)[group.rank],
        mlp=deal_lanes(arch.intermediate_size, group.size)[group.rank],
        vocab=deal_lanes(arch.vocab_size, group.size)[group.rank],
        group=group,
        dtype=dtype,
        device=device,
        ops=ops or TorchOps(),
    )


class RMSNorm(nn.Module):
    """Root mean square normalisation (arXiv 1910.07467), in fp32, over the last dimension."""

    def __init__(self, name: str, size: int, eps: float, shard: Shard) -> None:
        super().__init__()
        self.name, self.eps, self.ops = name, eps, shard.ops
        self.weight = nn.Parameter(torch.empty(size, dtype=shard.dtype, device=shard.device), requires_grad=False)

    def load(self, checkpoint: Checkpoint) -> None:
        checkpoint.copy(checkpoint.read(f"{self.name}.weight", tuple(self.weight.shape)), self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + delta, that normalised); x is given up."""
        return self.ops.add_norm(x, delta, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, name: str, layer: int, arch: Architecture, shard: Shard) -> None:
        super().__init__()
        self.layer, self.head_dim, self.ops = layer, arch.head_dim, shard.ops
        self.window, self.rotary = arch.windows[layer], arch.rotary_layers[layer]
        q, kv = _columns(shard.heads.q_heads, arch.head_dim), _columns(shard.heads.kv_heads, arch.head_dim)
        q_size, kv_size = arch.num_q_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.qkv = ColumnParallelLinear(
            arch.hidden_size,
            [(f"{name}.q_proj", q_size, q), (f"{name}.k_proj", kv_size, kv), (f"{name}.v_proj", kv_size, kv)],
            arch.qkv_bias,
            shard.dtype,
            shard.device,
        )
        self.out = RowParallelLinear(
            f"{name}.o_proj",
            q_size,
            q,
            arch.hidden_size,
            arch.output_bias,
            shard.group,
            shard.dtype,
            shard.device,
        )
        self.q_norm = RMSNorm(f"{name}.q_norm", arch.head_dim, arch.rms_norm_eps, shard) if arch.qk_norm else None
        self.k_norm = RMSNorm(f"{name}.k_norm", arch.head_dim, arch.rms_norm_eps, shard) if arch.qk_norm else None

    def forward(
        self, x: torch.Tensor, rotary: Rotary, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """wanted: as in DecoderLayer."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x).split(self.qkv.sizes, dim=-1))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        attended = attend(self.layer, q, k, v, rotary if self.rotary else None, self.window).flatten(1)
        return self.out(attended if wanted is None else self.ops.gather(attended, wanted))


class MLP(nn.Module):
    def __init__(self, name: str, arch: Architecture, shard: Shard) -> None:
        super().__init__()
        size, columns, self.ops = arch.intermediate_size, shard.mlp, shard.ops
        self.gate_up = ColumnParallelLinear(
            arch.hidden_size,
            [(f"{name}.gate_proj", size, columns), (f"{name}.up_proj", size, columns)],
            arch.mlp_bias,
            shard.dtype,
            shard.device,
        )
        self.down = RowParallelLinear(
            f"{name}.down_proj",
            size,
            columns,
            arch.hidden_size,
            arch.mlp_bias,
            shard.group,
            shard.dtype,
            shard.device,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.ops.gated(self.gate_up, x))


class DecoderLayer(nn.Module):
    def __init__(self, name: str, layer: int, arch: Architecture, shard: Shard) -> None:
        super().__init__()
        self.input_norm = RMSNorm(f"{name}.input_layernorm", arch.hidden_size, arch.rms_norm_eps, shard)
        self.attention = Attention(f"{name}.self_attn", layer, arch, shard)
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", arch.hidden_size, arch.rms_norm_eps, shard)
        self.mlp = MLP(f"{name}.mlp", arch, shard)
        self.ops = shard.ops

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rotary: Rotary,
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x: the residual stream; delta: what the layer before adds to it. Returns both for the next layer.

        wanted: [s] int64, the tokens that are computed to the end; of the others only keys and values are left.
        """
        x, normed = self.input_norm.add(x, delta)
        delta = self.attention(normed, rotary, attend, wanted)
        x = x if wanted is None else self.ops.gather(x, wanted)
        x, normed = self.mlp_norm.add(x, delta)
        return x, self.mlp(normed)


class Decoder(nn.Module):
    """Token ids and positions, [tokens] int64 each, to final hidden states [tokens, hidden]; `head` gives logits."""

    def __init__(self, arch: Architecture, shard: Shard, max_positions: int) -> None:
        super().__init__()
        placement = (shard.dtype, shard.device)
        self.embed = VocabParallelEmbedding(
            "model.embed_tokens", arch.vocab_size, shard.vocab, arch.hidden_size, shard.group, *placement
        )
        self.rotary = RotaryTable(arch.rope, arch.head_dim, max_positions, *placement, shard.ops.gather)
        self.layers = nn.ModuleList(
            DecoderLayer(f"model.layers.{layer}", layer, arch, shard) for layer in range(arch.num_layers)
        )
        self.norm = RMSNorm("model.norm", arch.hidden_size, arch.rms_norm_eps, shard)
        tied = self.embed if arch.tie_word_embeddings else None
        self.head = ParallelHead("lm_head", arch.vocab_size, shard.vocab, arch.hidden_size, tied, *placement)

    def load(
        self,
        checkpoint: Checkpoint,
        on_share: Callable[[float], None] | None = None,
        pack: Callable[[Matrix], None] | None = None,
    ) -> None:
        """Every part reads its own slices. Raises CheckpointError for tensors missing, misshapen or left over.

        on_share: told after each part how many of the parts are read, in [0, 1].
        pack: given each matrix once it is read, so that only one at a time takes the room of what is not packed yet.
        """
        parts = [part for part in self.modules() if part is not self and hasattr(part, "load")]
        packed: set[Matrix] = set()
        for number, part in enumerate(parts, 1):
            part.load(checkpoint)
            fresh = {matrix for matrix in part.modules() if isinstance(matrix, Matrix)} - packed if pack else set()
            for matrix in fresh:
                pack(matrix)
            packed |= fresh
            if on_share:
                on_share(number / len(parts))
        # A tied head may be stored twice, and old checkpoints carry their rotary frequencies.
        checkpoint.finish(ignorable=("rotary_emb.inv_freq", *(["lm_head.weight"] if self.head.tied else [])))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """wanted: [s] int64, the tokens whose hidden states are asked for, [s, hidden]; None for all. The last layer
        leaves the others' out, a prompt's but for its last token's."""
        x, delta = self.embed(token_ids), None
        rotary = self.rotary(positions)
        *before, last = self.layers
        for layer in before:
            x, delta = layer(x, delta, rotary, attend)
        x, delta = last(x, delta, rotary, attend, wanted)
        return self.norm.add(x, delta)[1]


def _columns(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
