"""The command line's options that make up an EngineConfig, shared by all commands that run a model."""

from __future__ import annotations

import argparse

from driver.config import ATTENTION_CALLS, DEVICES, EXECUTORS, MAX_ASYNC_DEPTH, EngineConfig
from scheduler.limits import POLICIES
from workers.spec import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS


def add_engine_options(
    parser: argparse.ArgumentParser, executor_help: str = "auto: inline for one rank, else ray"
) -> None:
    """Adds them to a command's parser. executor_help: what --executor means to the command."""
    defaults = EngineConfig.__dataclass_fields__
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", required=True, help="model folder, GGUF file, Hugging Face id, or smollm2 (SmolLM2-135M-Instruct)"
    )
    group.add_argument(
        "--tp", type=int, default=1, metavar="N", help="tensor-parallel size in ranks; need not divide the heads"
    )
    group.add_argument("--executor", choices=EXECUTORS, default="auto", help=executor_help)
    group.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    group.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: the model's own")
    group.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="make linears int8, int4 in groups of 32 with the head in int8 (both cpu), or fp8 (cuda)",
    )
    add_scheduling_options(group)
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share computed KV blocks among requests with equal beginnings",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="of stored keys and values; auto: the model's own. fp8 halves the KV cache (flash_attn 3, reference)",
    )
    group.add_argument(
        "--kv-cache-gib",
        type=float,
        metavar="GIB",
        help="memory of each rank's KV cache in GiB; not given: 2 on cpu, what is left on cuda",
    )
    group.add_argument("--num-kv-blocks", type=int, metavar="N", help="exact number of KV blocks instead")
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=defaults["gpu_memory_utilization"].default,
        metavar="F",
        help="share of each GPU's memory to use, (0, 1]",
    )
    group.add_argument(
        "--attention-backend",
        default="auto",
        metavar="NAME",
        help="auto, cpu (compiled), flash_attn or torch_flash (both cuda), or reference",
    )
    group.add_argument(
        "--attention-calls",
        choices=ATTENTION_CALLS,
        default="auto",
        help="prefill and decode rows of a step in one call of the attention backend or in two",
    )
    group.add_argument(
        "--enforce-eager", action="store_true", help="launch every step anew instead of replaying captured CUDA graphs"
    )
    group.add_argument(
        "--fused-kernels",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use the Triton kernels on cuda, where Triton is installed",
    )
    group.add_argument(
        "--symmetric-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="add up small tensors between GPUs of one node through torch's symmetric memory, where it can be had",
    )
    group.add_argument("--trace-steps", metavar="FILE", help="write a record of every step, as JSON lines")
    group.add_argument(
        "--ray-address",
        default="auto",
        metavar="ADDRESS",
        help="a Ray cluster to join, or local for a private one; auto: a running one, else private",
    )
    group.add_argument(
        "--start-timeout",
        type=float,
        default=defaults["start_timeout_seconds"].default,
        metavar="S",
        help="seconds to wait for devices and ranks",
    )


def add_scheduling_options(group: argparse._ArgumentGroup) -> None:
    """Those that decide what a step holds; the simulator has them too."""
    defaults = EngineConfig.__dataclass_fields__
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="token budget of a step; not given: 2048 on cuda, 512 on cpu",
    )
    group.add_argument(
        "--target-tbt-ms",
        type=float,
        metavar="MS",
        help="time between tokens to hold, in milliseconds: the largest token budget that does is found for each step, "
        "and --max-num-batched-tokens only bounds it (not given: 8192 on cuda, 2048 on cpu)",
    )
    group.add_argument(
        "--max-num-seqs", type=int, default=defaults["max_num_seqs"].default, metavar="N", help="requests at once"
    )
    group.add_argument(
        "--policy",
        choices=POLICIES,
        default="fcfs",
        help="order of service; the last two age, so that no request starves",
    )
    group.add_argument(
        "--chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="cut prompts so that decodes never wait for them; without, prompts are computed whole and first",
    )
    group.add_argument(
        "--max-partial-prefills",
        type=int,
        default=0,
        metavar="N",
        help="prompts longer than the threshold in mid-prefill at once; 0 means any number",
    )
    group.add_argument(
        "--long-prefill-token-threshold",
        type=int,
        default=0,
        metavar="N",
        help="tokens of one prompt in a step while others could use the rest; 0 means any number",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="prompt plus output tokens of a request; not given: the model's own limit",
    )
    group.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="tokens per KV block; not given: the attention backend's choice (256 for FlashAttention 2, 16 on cpu)",
    )
    group.add_argument(
        "--async-depth",
        type=int,
        default=defaults["async_depth"].default,
        metavar="N",
        help=f"steps in flight at once, 0 to {MAX_ASYNC_DEPTH}; 0 waits for each",
    )


def engine_options(args: argparse.Namespace) -> dict[str, object]:
    """The parsed engine options under the names of EngineConfig's fields."""
    renamed = {"tensor_parallel_size": "tp", "start_timeout_seconds": "start_timeout"}
    names = [name for name in EngineConfig.__dataclass_fields__ if hasattr(args, renamed.get(name, name))]
    return {name: getattr(args, renamed.get(name, name)) for name in names}
