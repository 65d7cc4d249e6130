"""Accelerators as their makers describe them, and how long a step should take on N of them.

The step time is a roofline: each part takes what computing or what memory traffic takes, whichever is more; the parts
run one after another. docs/simulate.md has the formulas and says what they leave out.
"""

from __future__ import annotations

from dataclasses import dataclass

from driver.config import ConfigError
from parallel.split import deal_lanes, shard_heads
from scheduler.limits import Limits
from scheduler.step_time import StepWork
from workers.architecture import Architecture

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUERY_TILE = 128  # queries of a chunk that share one pass over the keys and values
RESERVED_BYTES = 1.5e9  # assumed: the device's context, buffers of the collectives, workspaces
GB = 1e9


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device. All figures are the maker's peaks; GB and TB are decimal.

    flops: dense bf16 and fp16 matrix FLOP/s, without the doubling for 2:4 sparsity.
    memory_bandwidth: bytes/s. memory: bytes.
    link_bandwidth: bytes/s to the other devices in each direction, all links together.
    mesh: peers among which the links are dealt out; 0 where a switch or a bus gives any of them the whole.
    source: the maker's document.
    """

    name: str
    flops: float
    memory_bandwidth: float
    memory: float
    link_bandwidth: float
    source: str
    mesh: int = 0

    def group_bandwidth(self, size: int) -> float:
        """Bytes/s in each direction that a device has to the others of a group of `size`."""
        return self.link_bandwidth * (min(size - 1, self.mesh) / self.mesh if self.mesh else 1)


ACCELERATORS = (
    Accelerator("a100-80g", 312e12, 2.039e12, 80e9, 300e9, "NVIDIA A100 Tensor Core GPU datasheet, A100 80GB SXM"),
    Accelerator("h100", 989.5e12, 3.35e12, 80e9, 450e9, "NVIDIA H100 Tensor Core GPU datasheet, H100 SXM"),
    Accelerator("h200", 989.5e12, 4.8e12, 141e9, 450e9, "NVIDIA H200 Tensor Core GPU datasheet, H200 SXM"),
    Accelerator(
        "b200",
        2250e12,
        8.0e12,
        180e9,
        900e9,
        "NVIDIA HGX platform specifications, HGX B200, and NVIDIA DGX B200 datasheet, an eighth of each",
    ),
    Accelerator("l40s", 362.05e12, 864e9, 48e9, 32e9, "NVIDIA L40S GPU datasheet; PCIe Gen4 x16"),
    Accelerator("l4", 121e12, 300e9, 24e9, 32e9, "NVIDIA L4 Tensor Core GPU datasheet; PCIe Gen4 x16"),
    Accelerator("a10", 125e12, 600e9, 24e9, 32e9, "NVIDIA A10 Tensor Core GPU datasheet; PCIe Gen4 x16"),
    Accelerator("mi300x", 1307.4e12, 5.3e12, 192e9, 448e9, "AMD Instinct MI300X Accelerator data sheet", mesh=7),
)


def find_accelerator(name: str) -> Accelerator:
    """Raises ConfigError, listing the names, for one that is not in the table."""
    for accelerator in ACCELERATORS:
        if accelerator.name == name.lower():
            return accelerator
    names = ", ".join(accelerator.name for accelerator in ACCELERATORS)
    raise ConfigError(f"hardware must be one of {names}, got {name!r}")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of the peaks is reached. Assumptions, not measurements; raises ConfigError outside their ranges.

    compute, memory, link: shares of the device's FLOP/s, memory bandwidth and link bandwidth, in (0, 1].
    all_reduce_seconds: of each all-reduce, however little it carries.
    step_seconds: of each step whatever is in it: launching, sampling, the frame's way.
    """

    compute: float = 0.6
    memory: float = 0.8
    link: float = 0.7
    all_reduce_seconds: float = 15e-6
    step_seconds: float = 2e-3

    def __post_init__(self) -> None:
        for name in ("compute", "memory", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} efficiency must be in (0, 1], got {getattr(self, name):g}")
        for name in ("all_reduce_seconds", "step_seconds"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {getattr(self, name):g}")


class Roofline:
    """A model on `size` devices. All figures are of the rank with the largest shard, for which the others wait.

    layer_weights, head_weights: parameters in all layers' matrices, and in the output head.
    kv_bytes: keys and values of one token.
    """

    def __init__(
        self, device: Accelerator, arch: Architecture, size: int, dtype: str, efficiency: Efficiency | None = None
    ) -> None:
        self.device, self.arch, self.size = device, arch, size
        self.efficiency = efficiency or Efficiency()
        self._bytes = DTYPE_BYTES[dtype]
        heads = shard_heads(arch.num_q_heads, arch.num_kv_heads, size)
        self._q_heads = max(len(shard.q_heads) for shard in heads)
        kv_heads = max(len(shard.kv_heads) for shard in heads)
        self._columns = max(map(len, deal_lanes(arch.intermediate_size, size)))
        self._vocab = max(map(len, deal_lanes(arch.vocab_size, size)))
        attention = 2 * arch.head_dim * (self._q_heads + kv_heads)  # columns of q, k and v, and rows of the output
        self.layer_weights = arch.num_layers * arch.hidden_size * (attention + 3 * self._columns)
        self.head_weights = arch.hidden_size * self._vocab
        self.kv_bytes = 2 * arch.num_layers * kv_heads * arch.head_dim * self._bytes
        # fp32 matrix products run in TF32, whose rate is half of bf16's on every device of the table.
        self._flops = device.flops * self.efficiency.compute * (0.5 if dtype == "float32" else 1)
        self._memory_bandwidth = device.memory_bandwidth * self.efficiency.memory

    def step_seconds(self, work: StepWork, sampled: int) -> float:
        """Seconds that a step with this work takes, `sampled` of whose rows go through the head."""
        pair_flops = 4 * self.arch.num_layers * self._q_heads * self.arch.head_dim
        tile_passes = work.prefill_pairs / QUERY_TILE
        return (
            self.efficiency.step_seconds
            + self._matrix_seconds(self.layer_weights, work.tokens)
            + self._matrix_seconds(self.head_weights, sampled)
            + self._longer(pair_flops * work.prefill_pairs, self.kv_bytes * tile_passes)
            + self._longer(pair_flops * work.decode_context, self.kv_bytes * work.decode_context)
            + (2 * self.arch.num_layers + 1) * self._all_reduce_seconds(work.tokens)
        )

    def _matrix_seconds(self, weights: int, rows: int) -> float:
        """`rows` rows times matrices of `weights` parameters, which are read once; none is read for no row."""
        return self._longer(2 * rows * weights, weights * self._bytes) if rows else 0.0

    def _longer(self, flops: float, num_bytes: float) -> float:
        return max(flops / self._flops, num_bytes / self._memory_bandwidth)

    def _all_reduce_seconds(self, tokens: int) -> float:
        """A ring: every device sends 2 (N - 1) / N of the [tokens, hidden] array."""
        if self.size == 1:
            return 0.0
        sent = 2 * (self.size - 1) / self.size * tokens * self.arch.hidden_size * self._bytes
        bandwidth = self.device.group_bandwidth(self.size) * self.efficiency.link
        return self.efficiency.all_reduce_seconds + sent / bandwidth

    @property
    def weight_bytes(self) -> int:
        """Of the matrices; norms and biases are left out."""
        tables = 1 if self.arch.tie_word_embeddings else 2
        return (self.layer_weights + tables * self.head_weights) * self._bytes

    def activation_bytes(self, limits: Limits) -> float:
        """What the largest step needs beside weights and cache: a few hidden states, the MLP, logits in fp32."""
        per_token = (4 * self.arch.hidden_size + 3 * self._columns) * self._bytes
        return limits.max_num_batched_tokens * per_token + 8 * limits.num_rows * self._vocab

    def num_blocks(self, limits: Limits, block_size: int, max_model_len: int, utilization: float) -> int:
        """KV blocks that fit, no more than all rows at full length would fill. Raises ConfigError when none does."""
        usable = self.device.memory * utilization
        needed = self.weight_bytes + self.activation_bytes(limits) + RESERVED_BYTES
        blocks = int((usable - needed) // (block_size * self.kv_bytes))
        if blocks < 1:
            raise ConfigError(
                f"{self.device.name} has {self.device.memory / GB:g} GB, of which {utilization:g} is "
                f"{usable / GB:.1f} GB; with tp {self.size} the weights need {self.weight_bytes / GB:.1f} GB on each, "
                f"a step of {limits.max_num_batched_tokens} tokens {self.activation_bytes(limits) / GB:.1f} GB, "
                f"and {RESERVED_BYTES / GB:.1f} GB are reserved: nothing is left for the KV cache; use a larger tp"
            )
        return min(blocks, limits.num_rows * -(-max_model_len // block_size))
