"""The parts of gpu_check.py. Each takes the settings and returns what it found, `problems` among it."""

from __future__ import annotations

import itertools
import multiprocessing
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from attention.backend import Backend, BackendError, make_backend
from attention.cache import Scales
from attention.capabilities import Demand
from attention.flash import FlashAttnBackend, Kernels
from attention.torch_flash import TorchFlashBackend, TorchKernel
from parallel.group import TensorParallelGroup, join_store, open_store
from scheduler.blocks import BlockPool
from scheduler.frame import StepResult, tokens_crc
from scheduler.limits import Limits
from scheduler.params import SamplingParams
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.attention import contracts
from tests.attention.poisoned import Batch, Case
from tests.workers.recording import Recorder
from workers.architecture import Architecture, RopeSpec
from workers.graphs import CudaGraphMaker, GraphMaker
from workers.runner import ModelRunner
from workers.spec import WorkerSpec

FP8_SCALES = Scales(key=0.05, value=0.02, query=0.1)
NUM_BLOCKS, MAX_LEN, BUDGET, ROWS = 24, 512, 48, 6
STAND_INS: dict[str, Callable[..., Backend]] = {
    "torch_flash": lambda layout, scale, calls="auto": TorchFlashBackend(
        layout, scale, calls, kernel=TorchKernel(contracts.varlen_attn)
    ),
    "flash_attn": lambda layout, scale, calls="auto": FlashAttnBackend(
        layout, scale, calls, kernels=Kernels(2, contracts.flash_attn_with_kvcache, contracts.flash_attn_varlen_func)
    ),
}


# ---- what the parts share


def build_backend(name: str, layout: Any, scale: float, demand: Demand, calls: str, settings: Any) -> Backend:
    """The named backend on the GPU; in the reduced form the same code over its stand-in. Raises BackendError."""
    if settings.full or name == "reference":
        return make_backend(name, layout, scale, settings.device, demand, calls)
    return STAND_INS[name](layout, scale, calls)


class RandomWeights:
    """In place of a checkpoint: every tensor from its name alone, so that ranks and devices get the same model."""

    def __contains__(self, name: str) -> bool:
        return not name.endswith("_scale")  # nothing is quantised

    def read(self, name: str, shape: tuple[int, ...], cut: dict[int, range] | None = None) -> torch.Tensor:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if "norm" in name:
            tensor = 1 + 0.25 * noise
        elif "embed" in name or "lm_head" in name:
            tensor = 0.7 * noise  # logits far enough apart that rounding does not decide
        else:
            gain = {"q_proj": 2.0, "o_proj": 4.0, "down_proj": 6.0}.get(name.split(".")[-2], 1.0)
            tensor = gain * noise / shape[-1] ** 0.5
        for dim, taken in (cut or {}).items():
            tensor = tensor.narrow(dim, taken.start, len(taken))
        return tensor

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def finish(self, ignorable: Iterable[str] = ()) -> None:
        pass


def architecture(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, vocab: int
) -> Architecture:
    return Architecture(
        name="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope=RopeSpec(500_000.0, "default", {}),
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None,) * layers,
        rotary_layers=(True,) * layers,
        dtype="bfloat16",
        eos_token_ids=frozenset(),
    )


TINY = architecture(layers=3, hidden=96, heads=9, kv_heads=3, head_dim=32, mlp=160, vocab=301)


def make_runner(
    arch: Architecture,
    device: torch.device,
    dtype: str,
    backend: str = "reference",
    group: TensorParallelGroup | None = None,
    maker: GraphMaker | None = None,
    **changes: Any,
) -> ModelRunner:
    spec = WorkerSpec(
        model="random",
        rank=0,
        size=1,
        device=device.type,
        dtype=dtype,
        attention_backend=backend,
        block_size=None,
        num_rows=ROWS,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=BUDGET,
        kv_cache_bytes=None,
        num_kv_blocks=NUM_BLOCKS,
        gpu_memory_utilization=0.9,
        start_timeout_seconds=60.0,
        step_timeout_seconds=60.0,
        enforce_eager=maker is None,
    )
    return ModelRunner(arch, replace(spec, **changes), group or TensorParallelGroup(), device, maker)


def generate(runner: ModelRunner, lengths: Iterable[int], max_tokens: int) -> list[list[int]]:
    """Output tokens of greedy and seeded requests that come in as the scheduler lets them, chunked and mixed."""
    scheduler = Scheduler(Limits(BUDGET, ROWS), BlockPool(NUM_BLOCKS, runner.rows.block_size))
    requests = []
    for at, length in enumerate(lengths):
        tokens = torch.randint(0, 301, (length,), generator=torch.Generator().manual_seed(at)).tolist()
        params = SamplingParams(temperature=0.0 if at % 2 == 0 else 0.8)
        requests.append(Request(str(at), tokens, params, max_tokens, frozenset(), seed=at))
        scheduler.add(requests[-1])
    while (plan := scheduler.schedule()) is not None:
        tokens = runner.launch(plan, 0.0).tokens()
        scheduler.update(StepResult(plan.epoch, plan.step, tokens, 0.0), tokens_crc(tokens))
    return [request.output_token_ids for request in requests]


LENGTHS = (5, 70, 33, 1, 120, 17, 48)


def tiny_tokens(device: torch.device, dtype: str, **options: Any) -> list[list[int]]:
    runner = make_runner(TINY, device, dtype, **options)
    runner.model.load(RandomWeights())
    runner.make_cache(NUM_BLOCKS)
    return generate(runner, LENGTHS, max_tokens=12)


def agreement(found: list[list[int]], expected: list[list[int]]) -> float:
    """Share of the tokens that are equal before the first difference of each request."""
    same = total = 0
    for ours, theirs in zip(found, expected, strict=True):
        total += len(theirs)
        same += next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(theirs))
    return same / total


# ---- the parts


def check_backends(settings: Any) -> dict[str, Any]:
    """Outputs against `reference` over the same cache, in which whatever was not written is NaN."""
    problems, errors, absent = [], {}, {}
    dtypes = (torch.bfloat16, torch.float16) if settings.full else (torch.float32,)
    for case, dtype in itertools.product(_cases(settings.full), dtypes):
        batch = Batch(case, dtype).to(settings.device)
        expected = batch.expected().float()
        demand = Demand(dtype=dtype, window=case.window is not None)
        for name, calls in itertools.product(STAND_INS, ("one", "two")):
            try:
                backend = build_backend(name, case.layout, case.scale, demand, calls, settings)
            except BackendError as error:
                absent[name] = str(error)
                continue
            error = float((batch.run(backend).float() - expected).abs().max())
            key = f"{name} {calls} {str(dtype).removeprefix('torch.')}"
            errors[key] = max(errors.get(key, 0.0), error)
            if not error <= {torch.float32: 1e-4, torch.float16: 5e-3}.get(dtype, 3e-2):
                problems.append(f"{key}: off by {error:.3g} on {case}")
    problems += _check_fp8(settings, errors, absent)
    tested = sorted({key.split()[0] for key in errors})
    if not tested:
        problems.append("no FlashAttention backend could be tested")
    return {"problems": problems, "largest_error": errors, "tested": tested, "absent": absent}


def _check_fp8(settings: Any, errors: dict[str, float], absent: dict[str, str]) -> list[str]:
    """A cache in fp8 where FlashAttention 3 is; its kernels round the weights of the values to fp8 too."""
    problems = []
    for case in _cases(settings.full) if settings.full else [Case(((3, 3), (2, 259)), (14, 300), head_dim=16)]:
        demand = Demand(dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, window=case.window is not None)
        try:
            if settings.full:
                backend = make_backend("flash_attn", case.layout, case.scale, settings.device, demand)
            else:
                kernels = Kernels(3, contracts.flash_attn_3_with_kvcache)
                backend = FlashAttnBackend(case.layout, case.scale, kernels=kernels)
        except BackendError as error:
            absent["flash_attn fp8"] = str(error)
            break
        batch = Batch(case, torch.bfloat16, FP8_SCALES).to(settings.device)
        error = float((batch.run(backend).float() - batch.expected().float()).abs().max())
        errors["flash_attn fp8"] = max(errors.get("flash_attn fp8", 0.0), error)
        if not error <= 0.15:
            problems.append(f"flash_attn with a cache in fp8: off by {error:.3g} on {case}")
    return problems


def _cases(full: bool) -> list[Case]:
    chunks, decodes = ((3, 3), (2, 259), (1, 513)), (14, 1, 512, 300)
    if not full:
        return [Case(chunks, decodes), Case((), decodes, group=4), Case(chunks, (), window=6)]
    found = []
    for head_dim, kv_heads, group in ((64, 3, 3), (128, 8, 4), (128, 8, 1), (256, 1, 8)):
        for window in (None, 1, 100):
            shape = {"head_dim": head_dim, "kv_heads": kv_heads, "group": group, "window": window}
            found.append(Case(((700, 700), (300, 2000), (1, 1025)), (3000, *decodes), **shape))
            found.append(Case((), (1, 255, 256, 257, 4000), **shape))
            found.append(Case(((1, 1), (512, 512)), (), **shape))
    return found


def check_tokens(settings: Any) -> dict[str, Any]:
    """fp32 on this device must give the CPU's tokens; in bf16 close choices may tip, most must not."""
    expected = tiny_tokens(torch.device("cpu"), "float32")
    problems, shares = [], {}
    if settings.full:
        for way, fused in (("float32", False), ("float32 with fused kernels", None)):
            shares[way] = agreement(tiny_tokens(settings.device, "float32", fused_kernels=fused), expected)
            if shares[way] < 1:
                problems.append(f"{way}: only {shares[way]:.2f} of the tokens are the CPU's")
        bf16 = tiny_tokens(settings.device, "bfloat16")
        for name in STAND_INS:
            try:
                shares[name] = agreement(tiny_tokens(settings.device, "bfloat16", backend=name), bf16)
            except BackendError as error:
                shares[name] = str(error)
                continue
            if shares[name] < 0.6:
                problems.append(f"{name}: only {shares[name]:.2f} of the bf16 tokens are those of reference")
    else:
        shares["again"] = agreement(tiny_tokens(settings.device, "float32"), expected)
        if shares["again"] < 1:
            problems.append("the same run gave other tokens")
    return {"problems": problems, "agreement": shares}


def check_graphs(settings: Any) -> dict[str, Any]:
    """Decodes of `reference` in fp32 always; every step where a backend that allows it is there."""
    problems, found = [], {}
    kinds = [("reference", "float32", "decode")]
    kinds += [(name, "bfloat16", "mixed") for name in STAND_INS] if settings.full else []
    for name, dtype, kind in kinds:
        try:
            eager = make_runner(TINY, settings.device, dtype, name)
        except BackendError as error:
            found[name] = str(error)
            continue
        if kind == "mixed" and eager.backend.capabilities.graphs != "mixed":
            found[name] = "this backend is not captured here"
            continue
        maker = CudaGraphMaker(settings.device) if settings.full else Recorder()
        replayed = make_runner(TINY, settings.device, dtype, name, maker=maker)
        replayed.graph_sizes = replace(replayed.graph_sizes, kinds=kind)
        tokens = []
        for runner in (eager, replayed):
            runner.model.load(RandomWeights())
            runner.make_cache(NUM_BLOCKS)
            tokens.append(generate(runner, LENGTHS, max_tokens=12))
        share = agreement(tokens[1], tokens[0])
        replays = {f"{kind} {size}": count for (kind, size), count in sorted(replayed.graphs.replays.items())}
        found[name] = {"agreement": share, "replays": replays}
        # Padded rows may be multiplied by another kernel, which in bf16 can tip a close choice.
        if share < (1.0 if dtype == "float32" else 0.6) or not replays:
            problems.append(f"{name}: {share:.2f} of the replayed steps' tokens are those of launched ones")
    return {"problems": problems, "backends": found}


class StagedGroup(TensorParallelGroup):
    """Two ranks on one GPU, which NCCL refuses: collectives go through the host, over Gloo."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        staged = tensor.cpu()
        dist.all_reduce(staged)
        return tensor.copy_(staged)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        staged = tensor.cpu().contiguous()
        parts = [torch.empty_like(staged) for _ in range(self.size)]
        dist.all_gather(parts, staged)
        return torch.stack(parts).to(tensor.device)


def check_shards(settings: Any) -> dict[str, Any]:
    """9 query and 3 key heads over two ranks, unevenly, against one rank; in fp32, so token for token."""
    alone = tiny_tokens(settings.device, "float32")
    store, port = open_store("127.0.0.1", 2, 60.0)
    child = multiprocessing.get_context("spawn").Process(target=_rank_1, args=(port, settings.device.type), daemon=True)
    child.start()
    tokens = _run_rank(store, 0, settings.device)
    child.join(30)
    share = agreement(tokens, alone)
    problems = [] if share == 1 else [f"two ranks: {share:.2f} of the tokens are those of one rank"]
    if child.exitcode != 0:
        problems.append(f"rank 1 ended with {child.exitcode}")
    return {"problems": problems, "agreement": share}


def _rank_1(port: int, device: str) -> None:
    with torch.inference_mode():
        _run_rank(join_store("127.0.0.1", port, 2, 60.0), 1, torch.device(device))


def _run_rank(store: dist.Store, rank: int, device: torch.device) -> list[list[int]]:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        return tiny_tokens(device, "float32", group=StagedGroup(rank, 2))
    finally:
        dist.destroy_process_group()
