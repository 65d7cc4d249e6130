"""From a configuration to a running engine, phase by phase."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from driver.config import ConfigError, EngineConfig
from driver.engine import Engine
from driver.errors import end_anyway
from driver.executor import Executor, InlineExecutor, WorkerFailed
from driver.profile import profile_steps
from driver.tokenizer import Tokenizer, load_tokenizer
from driver.trace import StepTrace
from driver.watchdog import Watchdog
from parallel.split import SplitError, shard_heads
from scheduler.blocks import BlockPool
from scheduler.budget import TokenBudget
from scheduler.limits import Limits
from scheduler.scheduler import Scheduler
from scheduler.step_time import StepTimeModel
from workers.architecture import Architecture, read_architecture
from workers.faults import VARIABLE, read_faults
from workers.source import resolve_model
from workers.spec import DTYPES, QUANTIZATIONS, WorkerReady, WorkerSpec

logger = logging.getLogger("quadriga.start")

PROFILES = 3  # attempts


@dataclass(frozen=True, slots=True)
class Model:
    """What the driver knows of a model before any worker runs.

    max_model_len: prompt plus output tokens of one request.
    end_token_ids: every token id that ends a text, from configuration, generation settings and tokenizer.
    """

    folder: Path
    arch: Architecture
    tokenizer: Tokenizer | None
    max_model_len: int
    dtype: str
    end_token_ids: frozenset[int]


@dataclass(slots=True)
class Phases:
    """Names and durations in seconds of the start's phases, in order.

    on_begin is told each name as it begins, on_share how much of the phase is done, in [0, 1], where that is known.
    """

    times: dict[str, float] = field(default_factory=dict)
    on_begin: Callable[[str], None] = lambda name: None
    on_share: Callable[[float], None] = lambda share: None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.on_begin(name)
        began = time.perf_counter()
        yield
        self.times[name] = time.perf_counter() - began
        logger.info("%s: %.1f s", name, self.times[name])


def read_model(config: EngineConfig) -> Model:
    """Resolves and reads the model, and checks the configuration against it; starts nothing.

    Raises ModelNotFound, UnsupportedModel, TokenizerError or ConfigError.
    """
    folder = resolve_model(config.model)
    arch = read_architecture(folder)
    tokenizer = load_tokenizer(folder)
    try:
        shard_heads(arch.num_q_heads, arch.num_kv_heads, config.tensor_parallel_size)
    except SplitError as error:
        raise ConfigError(str(error)) from error
    if config.max_model_len is not None and config.max_model_len > arch.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the {arch.max_position_embeddings} positions "
            f"that {config.model} was made for"
        )
    if config.quantization and arch.stored:
        raise ConfigError(f"quantization {config.quantization} needs plain weights, {config.model} has {arch.stored}")
    dtype = arch.dtype if config.dtype == "auto" else config.dtype
    if dtype not in DTYPES:
        raise ConfigError(f"the model's dtype {dtype!r} is not one of {', '.join(DTYPES)}; choose one with dtype")
    end_token_ids = arch.eos_token_ids | (tokenizer.end_token_ids if tokenizer else frozenset())
    return Model(folder, arch, tokenizer, config.max_model_len or arch.max_position_embeddings, dtype, end_token_ids)


def start_engine(config: EngineConfig, model: Model, phases: Phases) -> tuple[Engine, list[WorkerReady]]:
    """Brings up cluster, workers and engine loop. When it raises, nothing of it is left running.

    Raises ConfigError, CheckpointError or WorkerFailed.
    """
    with phases.phase("cluster" if config.uses_ray else "torch"):
        executor = make_executor(config)
    try:
        if config.quantization and executor.device != QUANTIZATIONS[config.quantization]:
            fitting = [name for name, device in QUANTIZATIONS.items() if device == executor.device]
            raise ConfigError(
                f"quantization {config.quantization} has no kernels on {executor.device}; "
                f"leave it out, or take {' or '.join(fitting)}"
            )
        if config.quantization == "fp8" and model.dtype != "bfloat16":
            raise ConfigError(f"quantization fp8 computes in bfloat16, not in {model.dtype}; choose dtype bfloat16")
        limits = config.limits(executor.device, model.max_model_len)
        with phases.phase("weights and cache"):
            ready = executor.start(worker_specs(config, model, limits, executor), phases.on_share)
        config = replace(config, block_size=ready[0].block_size)
        _report(model, ready, config.block_size)
        if config.target_tbt_ms is None:
            engine = make_engine(config, executor, limits, ready[0].num_blocks)
        else:
            with phases.phase("step-time profile"):
                ready, epoch, step_time = _profiled(config, model, executor, limits, ready)
            engine = make_engine(config, executor, limits, ready[0].num_blocks, epoch, step_time)
    except BaseException:
        end_anyway("the executor", executor.close)
        raise
    return engine, ready


def _profiled(
    config: EngineConfig, model: Model, executor: Executor, limits: Limits, ready: list[WorkerReady]
) -> tuple[list[WorkerReady], int, StepTimeModel]:
    """The step-time model, with the ranks and the epoch to go on with: one that is lost meanwhile is replaced."""
    epoch = 0
    while True:
        try:
            size = (ready[0].num_blocks, config.block_size, model.max_model_len)
            return ready, epoch + 1, profile_steps(executor, limits, *size, _watchdog(config), epoch)
        except WorkerFailed as failure:
            if epoch + 1 == PROFILES:
                raise
            logger.error("epoch %d has ended: %s; the profile begins anew", epoch, failure)
            ready, epoch = executor.recover(), epoch + 1


def _watchdog(config: EngineConfig) -> Watchdog:
    return Watchdog(config.hang_seconds, config.step_timeout_seconds)


def make_engine(
    config: EngineConfig,
    executor: Executor,
    limits: Limits,
    num_blocks: int,
    epoch: int = 0,
    step_time: StepTimeModel | None = None,
) -> Engine:
    """A running engine loop on an executor that has been started. step_time: what is known of it so far."""
    target = None if config.target_tbt_ms is None else config.target_tbt_ms / 1000
    budget = TokenBudget(limits.max_num_batched_tokens, target, step_time)
    scheduler = Scheduler(limits, BlockPool(num_blocks, config.block_size), epoch, config.prefix_caching, budget)
    trace = StepTrace(config.trace_steps) if config.trace_steps else None
    engine = Engine(executor, scheduler, config.async_depth, _watchdog(config), trace)
    engine.start()
    return engine


def make_executor(config: EngineConfig) -> Executor:
    """An executor whose device is known and whose workers are not up yet. Raises ConfigError."""
    if not config.uses_ray:
        return InlineExecutor(config.device)
    from driver.ray_executor import RayExecutor  # importing ray takes most of a second, for nothing when inline

    size, timeout = config.tensor_parallel_size, config.start_timeout_seconds
    return RayExecutor(config.ray_address, config.device, size, timeout, config.service_name)


def worker_specs(config: EngineConfig, model: Model, limits: Limits, executor: Executor) -> list[WorkerSpec]:
    """One rank's orders each."""
    size, faults = config.tensor_parallel_size, os.environ.get(VARIABLE, "")
    read_faults(faults)  # its errors belong to the user
    if faults:
        logger.warning("faults will be committed on purpose: %s=%s", VARIABLE, faults)
    return [
        WorkerSpec(
            model=config.model,
            rank=rank,
            size=size,
            device=executor.device,
            dtype=model.dtype,
            attention_backend=config.attention_backend,
            attention_calls=config.attention_calls,
            enforce_eager=config.enforce_eager,
            fused_kernels=None if config.fused_kernels else False,
            quantization=config.quantization,
            end_token_ids=tuple(sorted(model.end_token_ids)),
            symmetric_memory=config.symmetric_memory,
            kv_cache_dtype=config.kv_cache_dtype,
            block_size=config.block_size,
            num_rows=limits.num_rows,
            max_model_len=model.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            kv_cache_bytes=int(config.kv_cache_gib * 2**30) if config.kv_cache_gib else None,
            num_kv_blocks=config.num_kv_blocks,
            gpu_memory_utilization=config.gpu_memory_utilization,
            start_timeout_seconds=config.start_timeout_seconds,
            step_timeout_seconds=config.step_timeout_seconds,
            faults=faults,
        )
        for rank in range(size)
    ]


def _report(model: Model, ready: list[WorkerReady], block_size: int) -> None:
    for worker in ready:
        sizes = {
            "weights": worker.weight_bytes,
            "activations": worker.activation_bytes,
            "graphs": worker.graph_bytes,
            "KV cache up to": worker.cache_bytes,
            "peak RSS": worker.peak_rss_bytes,
        }
        logger.info(
            "rank %d: %s, attention %s, collectives %s",
            worker.rank,
            ", ".join(f"{what} {size / 2**20:.0f} MiB" for what, size in sizes.items() if size),  # 0: nobody measured
            worker.backend,
            worker.transport,
        )
    capacity = ready[0].num_blocks * block_size
    per_request = -(-model.max_model_len // block_size)
    logger.info(
        "the KV cache holds %d blocks of %d tokens: %d requests of full length, %d tokens each, fit at once",
        ready[0].num_blocks,
        block_size,
        ready[0].num_blocks // per_request,
        model.max_model_len,
    )
    if capacity < model.max_model_len:
        logger.warning(
            "the KV cache holds %d tokens, fewer than the model's context of %d; longer requests will be refused "
            "(more memory: kv_cache_gib)",
            capacity,
            model.max_model_len,
        )
