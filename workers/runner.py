"""Carries out step plans on one rank: plan -> inputs -> model shard -> logits -> sampled tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from attention.backend import make_backend
from attention.cache import CacheShape, KVCache, Scales
from attention.capabilities import Demand, HeadLayout
from attention.metadata import AttentionMetadata
from parallel.group import TensorParallelGroup
from parallel.loader import Checkpoint
from parallel.split import shard_heads
from parallel.upload import CudaLane, Upload
from scheduler.params import MAX_LOGPROBS
from scheduler.plan import StepPlan
from workers.adjust import Adjustments
from workers.architecture import Architecture
from workers.faults import FIRST
from workers.fp8 import check_fp8
from workers.grammar import GuideMaker
from workers.graphs import CudaGraphMaker, GraphMaker, GraphSizes, StepGraphs, capture_refusal
from workers.inputs import StepInputs, build_inputs, to_device, to_host
from workers.kernels import compile_all_reduce, find_kernels
from workers.kv_scales import cache_dtype, read_scales
from workers.model import Decoder, make_shard
from workers.ops import Rotary, make_ops
from workers.products import Packer, expect_stored, quantize, settle_products
from workers.replay import NotRecordable, Replay
from workers.sampler import Sampler
from workers.scores import PendingExtras, ScoredChunk, Scorer, scored_chunks
from workers.source import resolve_model
from workers.spec import WorkerSpec
from workers.state import Rows
from workers.truncation import SMALL_TOP_K, SamplingRows

logger = logging.getLogger("quadriga.runner")


@dataclass(slots=True)
class LaunchedStep:
    """A step handed to the device. `tokens()` waits for it and gives the sampled token ids; `extras` comes after."""

    plan: StepPlan
    started: float
    extras: PendingExtras
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
        self.group, self.quantization, self.stored = group, spec.quantization, arch.stored
        heads = shard_heads(arch.num_q_heads, arch.num_kv_heads, group.size)[group.rank]
        layout = HeadLayout(len(heads.q_heads), len(heads.kv_heads), arch.head_dim)
        stored = cache_dtype(spec.kv_cache_dtype)
        demand = Demand(dtype=dtype, cache_dtype=stored, block_size=spec.block_size, window=any(arch.windows))
        self.backend = make_backend(
            spec.attention_backend, layout, arch.head_dim**-0.5, device, demand, spec.attention_calls
        )
        self.graph_maker = graph_maker or self._cuda_graphs(spec.enforce_eager, group.transport)
        # What captures steps sees torch's operations only.
        self.kernels = None if self.graph_maker or spec.fused_kernels else find_kernels(device)
        self.ops = make_ops(device, self.kernels, spec.fused_kernels)
        self._compile_all_reduce()
        self.model = Decoder(arch, make_shard(arch, group, dtype, device, self.ops), spec.max_model_len)
        block_size = spec.block_size or self.backend.capabilities.preferred_block
        self.cache_shape = CacheShape(arch.num_layers, block_size, layout.num_kv_heads, arch.head_dim, stored or dtype)
        self.dtype = dtype
        self.scales = [Scales()] * arch.num_layers if stored else None  # of the KV cache
        self.sampler = Sampler(arch.vocab_size, group, device, self.kernels, self.ops.noise)
        guides = GuideMaker(lambda: resolve_model(spec.model), arch.vocab_size, spec.end_token_ids)
        self.adjustments = Adjustments(self.sampler.own_range, arch.vocab_size, device, guides)
        self.scorer = Scorer(self.sampler.own_range, arch.vocab_size, group, device)
        self.rows = Rows(spec.num_rows, -(-spec.max_model_len // block_size), block_size)
        self.last_tokens = torch.zeros(spec.num_rows, dtype=torch.int64, device=device)
        self.cache: KVCache | None = None
        self.graphs: StepGraphs | None = None
        self.graph_bytes = 0  # of a GPU's memory, for captured steps
        self.graph_sizes = GraphSizes(
            num_rows=spec.num_rows,
            max_tokens=spec.max_num_batched_tokens,
            max_model_len=spec.max_model_len,
            block_size=block_size,
            hidden_size=arch.hidden_size,
            kinds=self.backend.capabilities.graphs,
        )
        self.replay: Replay | None = None
        self.spoiled_rows: list[int] = []  # of the next step, as a fault on purpose; see workers.faults

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
        upload = Upload(CudaLane()) if self.device.type == "cuda" else None
        with Checkpoint(folder, upload) as checkpoint, torch.inference_mode():
            self.scales = read_scales(checkpoint, self.cache_shape.num_layers, wanted=self.scales is not None)
            if self.quantization == "fp8":
                check_fp8(self.device)
            if self.quantization:
                quantize(self.model, self.model.head.matrix, self.quantization)
            if self.stored:
                expect_stored(self.model, self.stored)
            self.model.load(checkpoint, on_share, self._packer() if self.quantization or self.stored else None)
            if self.kernels and not (self.quantization or self.stored):
                settle_products(self.model, self.kernels)
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    def _packer(self) -> Packer:
        on_gpu = self.device.type == "cuda"
        return Packer(self.kernels, torch.cuda.get_device_capability(self.device) if on_gpu else None)

    def make_cache(self, num_blocks: int) -> int:
        """Reserves the KV cache and captures the steps that are replayed. Returns the cache's size in bytes."""
        spare = 1 if self.graph_maker else 0  # a block that no request gets, for the padding of captured steps
        self.cache = KVCache(self.cache_shape, num_blocks + spare, self.device, self.scales)
        self._prepare_replays(num_blocks)
        return (num_blocks + spare) * self.cache_shape.bytes_per_block

    def regroup(self, num_blocks: int) -> None:
        """The group has become another; what was made for the old one's collectives is made anew.

        num_blocks: as in make_cache, or fewer.
        """
        self._compile_all_reduce()
        self._prepare_replays(num_blocks)

    def _compile_all_reduce(self) -> None:
        if self.kernels and self.group.shared:
            compile_all_reduce(self.group.shared, self.kernels)

    def _prepare_replays(self, num_blocks: int) -> None:
        if self.graph_maker:
            self._capture(self.graph_maker, spare_block=num_blocks)
        # Across hosts the ranks' sums are no kernels.
        if self.kernels and self.backend.name == "cpu" and (self.group.size == 1 or self.group.shared):
            self.replay = Replay(self.kernels, self.rows.max_blocks)

    @torch.inference_mode()
    def _capture(self, maker: GraphMaker, spare_block: int) -> None:
        self.graphs = StepGraphs(self._forward, maker, self.graph_sizes, spare_block, self.dtype, self.device)
        on_gpu = self.device.type == "cuda"
        before = torch.cuda.memory_reserved(self.device) if on_gpu else 0
        self.graphs.capture()
        self.graph_bytes = torch.cuda.memory_reserved(self.device) - before if on_gpu else 0

    @torch.inference_mode()
    def launch(self, plan: StepPlan, started: float) -> LaunchedStep:
        """Starts one step and returns without waiting for the device."""
        self.rows.apply(plan)
        self.adjustments.admit(plan.admissions)
        inputs = build_inputs(plan, self.rows, self.last_tokens, self.device)
        extras = PendingExtras()
        tokens = self._sample(plan, inputs, extras)
        self.rows.advance(plan)
        return LaunchedStep(plan, started, extras, *to_host(tokens))

    def hidden_states(self, inputs: StepInputs) -> torch.Tensor:
        """[tokens, hidden] after the last norm; fills the cache with the step's keys and values."""
        hidden = self.graphs.run(inputs) if self.graphs else None
        return self._forward(inputs.token_ids, inputs.positions, inputs.metadata) if hidden is None else hidden

    def _forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """wanted: as in Decoder.forward."""

        def attend(
            layer: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            rotary: Rotary | None,
            window: int | None,
        ) -> torch.Tensor:
            pages, scales = self.cache.layers[layer], self.cache.scales[layer]
            query = self.ops.store(query, key, value, rotary, pages, metadata.slot_mapping, self.backend, scales)
            return self.backend.attend(query, pages, metadata, window, scales)

        return self.model(token_ids, positions, attend, wanted)

    def _compute(self, function: Callable[[StepInputs], torch.Tensor], inputs: StepInputs) -> torch.Tensor:
        """function(inputs), in one go where that can be done. The result is good until the next step."""
        if self.replay:
            try:
                result, status = self.replay.run(function, inputs)
            except NotRecordable as reason:
                logger.warning("steps are computed kernel by kernel, because a part of the model is none: %s", reason)
                self.replay = None
            else:
                if status:
                    raise self.group.shared.missing(status - 1)
                return result
        return function(inputs)

    def _logits(self, inputs: StepInputs) -> torch.Tensor:
        """[s, own ids] fp32 logits of the sampled tokens."""
        wanted = inputs.sampled_tokens if inputs.metadata.prefill else None  # of decodes alone, every token is sampled
        hidden = self.graphs.run(inputs) if self.graphs else None
        if hidden is None:
            hidden = self._forward(inputs.token_ids, inputs.positions, inputs.metadata, wanted)
        elif wanted is not None:
            hidden = self.ops.gather(hidden, wanted)
        return self.model.head(hidden)

    def _sample(self, plan: StepPlan, inputs: StepInputs, extras: PendingExtras) -> torch.Tensor:
        """The sampled rows' next tokens, [s] int64, and what else is asked for; no logits that nobody needs."""
        scored = scored_chunks(plan, self.rows, self.device)
        logits = None
        if scored or len(inputs.sampled_rows) == 0:
            hidden = self._compute(self.hidden_states, inputs)
            if len(inputs.sampled_rows):
                logits = self.model.head(self.ops.gather(hidden, inputs.sampled_tokens))
            for chunk in scored:
                extras.prompts.append((chunk, self.scorer.score_prompt(hidden, self.model.head, chunk)))
        else:
            logits = self._compute(self._logits, inputs)
        return self.last_tokens[:0] if logits is None else self._choose(logits, inputs, extras)

    def _choose(self, logits: torch.Tensor, inputs: StepInputs, extras: PendingExtras) -> torch.Tensor:
        """[s] int64 tokens from [s, own ids] logits, which are changed."""
        picked, rows = inputs.sampled_rows, self.rows
        for row in self.spoiled_rows:
            logits[0 if row == FIRST else picked == row] = float("nan")
        asking = self.adjustments.asking(picked)
        scored = [(place, row.extras.logprobs) for place, row in asking if row.extras.logprobs is not None]
        if scored:
            extras.places, extras.widths = map(list, zip(*scored, strict=True))
            places = to_device(np.array(extras.places), self.device)
            kept = logits[places]
        self.adjustments.apply(logits, asking, inputs.next_positions)
        extras.failures = [(place, row.guide.failure) for place, row in asking if row.guide and row.guide.failure]
        sampling = SamplingRows(
            seeds=rows.seeds[picked],
            positions=inputs.next_positions,
            temperature=rows.temperature[picked],
            top_k=rows.top_k[picked],
            top_p=rows.top_p[picked],
            min_p=rows.min_p[picked],
        )
        sampled = self.sampler.sample(logits, sampling)
        tokens = sampled.clamp(min=0)  # a row that has failed goes on with any token until the driver knows
        self.adjustments.count(tokens, asking)
        if scored:
            extras.sampled = self.scorer.score(kept, tokens[places], max(extras.widths))
        self.last_tokens[to_device(picked, self.device)] = tokens
        return sampled

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_rows: int) -> None:
        """Runs the largest step without a cache, so that its activations show up in the device's memory statistics.

        All rows are sampled and scored in the ways that take the most memory, and prompt tokens are scored; what that
        makes of the logits is made of a few rows at a time (workers/pieces.py). All ranks call it.
        """
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        hidden = self.model(token_ids, token_ids, lambda layer, query, key, value, rotary, window: query)
        logits = self.model.head(hidden[: min(num_rows, num_tokens)])
        piece = ScoredChunk(0, 0, 0, token_ids[: self.scorer.prompt_piece], MAX_LOGPROBS)
        self.scorer.score_prompt(hidden, self.model.head, piece)
        kept, rows = logits.clone(), len(logits)
        whole = {"seeds": np.zeros(rows, np.uint64), "positions": np.zeros(rows, np.int64)}
        limits = {"top_p": np.full(rows, 0.9), "min_p": np.full(rows, 0.01)}
        for top_k in (SMALL_TOP_K, SMALL_TOP_K + 1):  # what small and what large ones take
            how = SamplingRows(temperature=np.ones(rows), top_k=np.full(rows, top_k), **whole, **limits)
            tokens = self.sampler.sample(logits, how)
        self.scorer.score(kept, tokens, MAX_LOGPROBS)
