"""Carries out step plans on one rank: plan -> inputs -> model shard -> logits -> sampled tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from attention.backend import make_backend
from attention.cache import CacheShape, KVCache
from attention.capabilities import Demand, HeadLayout
from attention.metadata import AttentionMetadata
from parallel.group import TensorParallelGroup
from parallel.loader import Checkpoint
from scheduler.plan import StepPlan
from workers.architecture import Architecture
from workers.graphs import CudaGraphMaker, GraphMaker, GraphSizes, StepGraphs, capture_refusal
from workers.inputs import StepInputs, build_inputs, to_device
from workers.model import Decoder, make_shard
from workers.sampler import Sampler, SamplingRows
from workers.spec import WorkerSpec
from workers.state import Rows

logger = logging.getLogger("quadriga.runner")


@dataclass(slots=True)
class LaunchedStep:
    """A step handed to the device. `tokens()` waits for it and gives the sampled token ids."""

    plan: StepPlan
    started: float
    _tokens: torch.Tensor
    _done: torch.cuda.Event | None = None

    @property
    def ready(self) -> bool:
        return self._done is None or self._done.query()

    def tokens(self) -> list[int]:
        if self._done is not None:
            self._done.synchronize()
        return self._tokens.tolist()


class ModelRunner:
    """One rank's model shard, KV cache, rows and sampler. Steps run in the order of their plans.

    graph_maker: what captures steps, or None to launch all of them; not given, CUDA graphs where they can be had.
    """

    def __init__(
        self,
        arch: Architecture,
        spec: WorkerSpec,
        group: TensorParallelGroup,
        device: torch.device,
        graph_maker: GraphMaker | None = None,
    ) -> None:
        self.device = device
        dtype = getattr(torch, spec.dtype)
        kernels = _fused_kernels(device, spec.fused_kernels)
        self.fused = kernels is not None
        shard = make_shard(arch, group, dtype, device, kernels)
        self.model = Decoder(arch, shard, spec.max_model_len)
        layout = HeadLayout(len(shard.heads.q_heads), len(shard.heads.kv_heads), arch.head_dim)
        demand = Demand(dtype=dtype, block_size=spec.block_size, window=any(arch.windows))
        self.backend = make_backend(
            spec.attention_backend, layout, arch.head_dim**-0.5, device, demand, spec.attention_calls
        )
        block_size = spec.block_size or self.backend.capabilities.preferred_block
        self.cache_shape = CacheShape(arch.num_layers, block_size, layout.num_kv_heads, arch.head_dim, dtype)
        self.sampler = Sampler(arch.vocab_size, group, device, kernels)
        self.rows = Rows(spec.num_rows, -(-spec.max_model_len // block_size), block_size)
        self.last_tokens = torch.zeros(spec.num_rows, dtype=torch.int64, device=device)
        self.cache: KVCache | None = None
        self.graphs: StepGraphs | None = None
        self.graph_maker = graph_maker or self._cuda_graphs(spec.enforce_eager, group.transport)
        self.graph_sizes = GraphSizes(
            num_rows=spec.num_rows,
            max_tokens=spec.max_num_batched_tokens,
            max_model_len=spec.max_model_len,
            block_size=block_size,
            hidden_size=arch.hidden_size,
            kinds=self.backend.capabilities.graphs,
        )

    @property
    def captured_tokens(self) -> int:
        """Tokens of the largest step that is captured; 0 when none is."""
        return self.graph_sizes.most_tokens if self.graph_maker else 0

    def _cuda_graphs(self, enforce_eager: bool, transport: str) -> GraphMaker | None:
        refusal = capture_refusal(self.device, self.backend.capabilities.graphs, transport, enforce_eager)
        if refusal is None:
            return CudaGraphMaker(self.device)
        logger.log(logging.INFO if self.device.type == "cuda" else logging.DEBUG, "no CUDA graphs: %s", refusal)
        return None

    def load(self, folder: Path, on_share: Callable[[float], None] | None = None) -> int:
        """Reads this rank's slices of the weights. Returns their size in bytes. on_share: as in Worker.start."""
        with Checkpoint(folder) as checkpoint, torch.inference_mode():
            self.model.load(checkpoint, on_share)
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    def make_cache(self, num_blocks: int) -> int:
        """Reserves the KV cache and captures the steps that are replayed. Returns the cache's size in bytes."""
        spare = 1 if self.graph_maker else 0  # a block that no request gets, for the padding of captured steps
        self.cache = KVCache(self.cache_shape, num_blocks + spare, self.device)
        if self.graph_maker:
            self._capture(self.graph_maker, spare_block=num_blocks)
        return (num_blocks + spare) * self.cache_shape.bytes_per_block

    @torch.inference_mode()
    def _capture(self, maker: GraphMaker, spare_block: int) -> None:
        dtype = self.cache_shape.dtype
        self.graphs = StepGraphs(self._forward, maker, self.graph_sizes, spare_block, dtype, self.device)
        self.graphs.capture()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, started: float) -> LaunchedStep:
        """Starts one step and returns without waiting for the device."""
        self.rows.apply(plan)
        inputs = build_inputs(plan, self.rows, self.last_tokens, self.device)
        tokens = self._sample(inputs)
        self.rows.advance(plan)
        if self.device.type != "cuda":
            return LaunchedStep(plan, started, tokens)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return LaunchedStep(plan, started, host, done)

    def hidden_states(self, inputs: StepInputs) -> torch.Tensor:
        """[tokens, hidden] after the last norm; fills the cache with the step's keys and values."""
        hidden = self.graphs.run(inputs) if self.graphs else None
        return self._forward(inputs.token_ids, inputs.positions, inputs.metadata) if hidden is None else hidden

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
        ) -> torch.Tensor:
            pages = self.cache.layers[layer]
            self.backend.write(key, value, pages, metadata.slot_mapping)
            return self.backend.attend(query, pages, metadata, window)

        return self.model(token_ids, positions, attend)

    def _sample(self, inputs: StepInputs) -> torch.Tensor:
        """The sampled rows' next tokens, [s] int64; a step without sampled rows computes no logits."""
        hidden = self.hidden_states(inputs)
        if len(inputs.sampled_rows) == 0:
            return self.last_tokens[:0]
        logits = self.model.head(hidden[inputs.sampled_tokens])
        picked, rows = inputs.sampled_rows, self.rows
        sampling = SamplingRows(
            seeds=rows.seeds[picked],
            positions=inputs.next_positions,
            temperature=rows.temperature[picked],
            top_k=rows.top_k[picked],
            top_p=rows.top_p[picked],
            min_p=rows.min_p[picked],
        )
        tokens = self.sampler.sample(logits, sampling)
        self.last_tokens[to_device(picked, self.device)] = tokens
        return tokens

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_rows: int) -> None:
        """Runs the largest step without a cache, so that its activations show up in the device's memory statistics."""
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        hidden = self.model(token_ids, token_ids, lambda layer, query, key, value, window: query)
        self.model.head(hidden[: min(num_rows, num_tokens)])


def _fused_kernels(device: torch.device, wanted: bool | None) -> ModuleType | None:
    """The Triton kernels, on CUDA where Triton is installed, or anywhere when they are asked for."""
    if wanted is False or (wanted is None and device.type != "cuda"):
        return None
    try:
        from workers import triton_kernels as kernels
    except ImportError as error:
        if wanted:
            raise
        logger.info("no fused kernels: %s", error)
        return None
    return kernels
