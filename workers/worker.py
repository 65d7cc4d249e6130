"""One rank: sets up its device, loads its shard, then carries out the plans that the channel brings."""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from parallel.channel import ChannelClosed
from parallel.group import TensorParallelGroup, join_group
from scheduler.frame import StepResult, decode_plan, encode_result, tokens_crc
from workers.architecture import read_architecture
from workers.cores import available_cores
from workers.faults import Faults, read_faults
from workers.runner import LaunchedStep, ModelRunner
from workers.source import resolve_model
from workers.spec import WorkerReady, WorkerSpec

logger = logging.getLogger("quadriga.worker")

DEFAULT_CPU_CACHE_BYTES = 2 << 30
_REMEMBERED_STEPS = 64


class TokensDiffer(RuntimeError):
    """This rank sampled other tokens than rank 0: the ranks no longer compute the same thing."""


class CacheTooSmall(ValueError):
    """The device has no room for even one KV block."""


class BlocksDiffer(ValueError):
    """The ranks' attention backends chose blocks of different sizes."""


class PlanSource(Protocol):
    """The worker's end of a channel."""

    def receive(self, timeout_seconds: float | None) -> bytes | None: ...

    def send(self, kind: bytes, body: bytes) -> None: ...


class Worker:
    """A rank of the model. Call `start`, then `serve`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.device = torch.device("cuda", 0) if spec.device == "cuda" else torch.device("cpu")
        if spec.device == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError(f"rank {spec.rank} was given no usable GPU: torch sees {torch.cuda.device_count()}")
            torch.cuda.set_device(self.device)
        self.group = TensorParallelGroup(spec.rank, spec.size)
        self.runner: ModelRunner | None = None
        self.ready: WorkerReady | None = None
        self._activation_bytes = 0
        self._crcs: dict[int, int] = {}
        self._faults = Faults(read_faults(spec.faults), spec.rank, spec.generation)

    def start(
        self, store: dist.Store | None, node_ip: str, ranks_here: int, on_share: Callable[[float], None] | None = None
    ) -> WorkerReady:
        """Joins the group, loads the weights and reserves the cache. Returns what the driver needs to know.

        ranks_here: ranks on this node; they share its CPU cores. on_share: told how much of the weights is loaded.

        Raises UnsupportedModel, BackendError, BlocksDiffer, CheckpointError or GroupError.
        """
        began = time.perf_counter()
        spec = self.spec
        self._join(store, node_ip, ranks_here)
        folder = resolve_model(spec.model)
        self.runner = ModelRunner(read_architecture(folder), spec, self.group, self.device)
        self._agree_on_blocks()
        self._faults.on_load()
        weight_bytes = self.runner.load(folder, on_share)
        num_blocks = self.group.smallest(self._affordable_blocks(), self.device)
        cache_bytes = self.runner.make_cache(num_blocks)
        self.ready = WorkerReady(
            rank=spec.rank,
            num_blocks=num_blocks,
            block_size=self.runner.rows.block_size,
            weight_bytes=weight_bytes,
            cache_bytes=cache_bytes,
            backend=self.runner.backend.name,
            transport=self.group.transport,
            load_seconds=time.perf_counter() - began,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            activation_bytes=self._activation_bytes,
            graph_bytes=self.runner.graph_bytes,
        )
        return self.ready

    def rejoin(self, store: dist.Store | None, node_ip: str, ranks_here: int) -> WorkerReady:
        """Joins the other ranks anew when the group has broken. Weights and the room for the cache stay.

        For a worker that was started and serves no more. Raises BlocksDiffer or GroupError.
        """
        began = time.perf_counter()
        self.group.close()
        self._join(store, node_ip, ranks_here)
        self._agree_on_blocks()
        num_blocks = self.group.smallest(self.ready.num_blocks, self.device)
        self.runner.regroup(num_blocks)
        self.ready = replace(
            self.ready,
            num_blocks=num_blocks,
            transport=self.group.transport,
            load_seconds=time.perf_counter() - began,
        )
        return self.ready

    def serve(self, channel: PlanSource) -> None:
        """Carries out plans until the channel closes. Keeps the device busy: launches a waiting plan before it
        waits for the one launched last."""
        launched: deque[LaunchedStep] = deque()
        try:
            while True:
                frame = channel.receive(0 if launched else None)
                if frame is not None:
                    launched.append(self._launch(frame))
                if launched and (frame is None or len(launched) > 1 or launched[0].ready):
                    self._finish(launched.popleft(), channel)
        except ChannelClosed:
            logger.debug("rank %d ends: the channel is closed", self.spec.rank)
            raise

    def _join(self, store: dist.Store | None, node_ip: str, ranks_here: int) -> None:
        spec = self.spec
        torch.set_num_threads(max(1, available_cores() // ranks_here))
        if store is not None:
            group = join_group(
                store, spec.rank, spec.size, self.device, node_ip, spec.step_timeout_seconds, spec.symmetric_memory
            )
            self.group.renew(group)

    def _launch(self, frame: bytes) -> LaunchedStep:
        started = time.perf_counter()
        plan = decode_plan(frame)
        agreed_step, agreed_crc = plan.agreed
        if self._crcs.get(agreed_step, agreed_crc) != agreed_crc:
            raise TokensDiffer(
                f"rank {self.spec.rank} sampled other tokens than rank 0 in step {agreed_step}, epoch {plan.epoch}"
            )
        if plan.step == 0:
            self._crcs.clear()
        self.runner.spoiled_rows = self._faults.on_plan(plan)
        return self.runner.launch(plan, started)

    def _finish(self, step: LaunchedStep, channel: PlanSource) -> None:
        tokens = step.tokens()
        plan = step.plan
        self._crcs[plan.step] = tokens_crc(tokens)
        self._crcs.pop(plan.step - _REMEMBERED_STEPS, None)
        if self.spec.rank == 0:
            extras = step.extras.read()
            result = StepResult(plan.epoch, plan.step, tokens, time.perf_counter() - step.started, extras)
            channel.send(b"result", encode_result(result))

    def _agree_on_blocks(self) -> None:
        size = self.runner.rows.block_size
        smallest, largest = (self.group.smallest(size, self.device), -self.group.smallest(-size, self.device))
        if smallest != largest:
            raise BlocksDiffer(
                f"rank {self.spec.rank}: attention backend {self.runner.backend.name} takes blocks of {size} tokens, "
                f"but the ranks' range from {smallest} to {largest}; install the same on all nodes, or name one "
                "attention_backend or block_size for all"
            )

    def _affordable_blocks(self) -> int:
        """How many KV blocks this rank can hold, no more than all rows at full length would fill."""
        spec, shape = self.spec, self.runner.cache_shape
        per_block = shape.bytes_per_block
        if spec.num_kv_blocks is not None:
            return spec.num_kv_blocks
        budget = spec.kv_cache_bytes
        if budget is None:
            budget = self._free_gpu_bytes() if spec.device == "cuda" else DEFAULT_CPU_CACHE_BYTES
        most = spec.num_rows * -(-spec.max_model_len // shape.block_size)
        blocks = min(budget // per_block, most)
        if blocks < 1:
            raise CacheTooSmall(
                f"rank {spec.rank}: {budget} bytes are left for the KV cache, one block of {shape.block_size} tokens "
                f"needs {per_block}; give it more memory or use a larger tensor-parallel size"
            )
        return blocks

    def _free_gpu_bytes(self) -> int:
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.runner.profile(self.spec.max_num_batched_tokens, self.spec.num_rows)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        self._activation_bytes = peak - before
        # Captured steps have memory of their own, as much as the largest of them takes, and a block for their padding.
        graphs = self._activation_bytes * self.runner.captured_tokens // self.spec.max_num_batched_tokens
        graphs += self.runner.cache_shape.bytes_per_block if self.runner.graph_maker else 0
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        # What other processes and the CUDA context hold is gone from `free` and counts against the share.
        others = total - free - torch.cuda.memory_reserved(self.device)
        return int(total * self.spec.gpu_memory_utilization) - others - peak - graphs
