"""What a worker is told when it is made. Plain values, so that the driver can build it without torch."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
QUANTIZATIONS = {"int8": "cpu", "int4": "cpu", "fp8": "cuda"}  # and the device that has kernels for it


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One rank's orders.

    model: what the user named; each node resolves it to a folder of its own.
    device: "cpu" or "cuda"; the CUDA device is the first one that Ray made visible to the worker.
    fused_kernels: compute with workers.triton_ops; None: on CUDA, where Triton is installed.
    symmetric_memory: for small sums between CUDA devices, where it can be had; see parallel.symmetric.
    kv_cache_dtype: one of KV_CACHE_DTYPES; auto for `dtype`.
    block_size: tokens per KV block, or None for what the attention backend likes best.
    kv_cache_bytes: memory for this rank's KV cache; None lets the worker decide from what the device has.
    num_kv_blocks: exact number of blocks, or None to fill kv_cache_bytes.
    max_num_batched_tokens: tokens a step holds at most; sizes the profiling step on GPUs.
    gpu_memory_utilization: fraction of the GPU's memory that the worker may use in all.
    faults: to be committed on purpose, see workers.faults. generation: processes of this rank that came before.
    end_token_ids: every token id that ends a text; guides allow them where the text may end.
    quantization: what linears become when they are read, one of QUANTIZATIONS; None leaves them as they are.
    start_timeout_seconds: how long the ranks wait to meet. step_timeout_seconds: how long a collective may take.
    """

    model: str
    rank: int
    size: int
    device: str
    dtype: str
    attention_backend: str
    block_size: int | None
    num_rows: int
    max_model_len: int
    max_num_batched_tokens: int
    kv_cache_bytes: int | None
    num_kv_blocks: int | None
    gpu_memory_utilization: float
    start_timeout_seconds: float
    step_timeout_seconds: float
    attention_calls: str = "auto"
    faults: str = ""
    generation: int = 0
    enforce_eager: bool = False
    fused_kernels: bool | None = None
    kv_cache_dtype: str = "auto"
    symmetric_memory: bool = True
    quantization: str | None = None
    end_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker runs: its node's address and its process there."""

    node_ip: str
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """What a worker says once it can take plans.

    num_blocks: KV blocks on every rank (the smallest rank decides), each of block_size tokens.
    Sizes are in bytes, times in seconds.
    activation_bytes: of the largest step, and graph_bytes: of the captured ones, on GPUs; 0 where nobody measured.
    backend, transport: what computes attention, and what carries the collectives.
    """

    rank: int
    num_blocks: int
    block_size: int
    weight_bytes: int
    cache_bytes: int
    backend: str
    transport: str
    load_seconds: float
    peak_rss_bytes: int
    activation_bytes: int = 0
    graph_bytes: int = 0
