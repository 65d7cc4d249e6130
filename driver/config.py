"""The engine's configuration: one frozen object, validated once, where it enters."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.limits import POLICIES, Limits
from workers.spec import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS

EXECUTORS = ("auto", "inline", "ray")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_CALLS = ("auto", "one", "two")
MAX_ASYNC_DEPTH = 2
DEFAULT_BUDGETS = {"cpu": 512, "cuda": 2048}
MOST_TUNED_TOKENS = {"cpu": 2048, "cuda": 8192}  # with a target TBT the budget is solved, and this only bounds it


LONGEST_DRAIN = 1e6  # seconds


class ConfigError(ValueError):
    """A setting that cannot be honoured; the message names value and limit."""


def check_drain_seconds(seconds: float) -> None:
    """Raises ConfigError for what nobody can wait for, such as infinity."""
    if not 0 <= seconds <= LONGEST_DRAIN:
        raise ConfigError(f"--drain-seconds must be between 0 and {LONGEST_DRAIN:g}, got {seconds:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to run a model.

    model: local folder, .gguf file, Hugging Face id, or `smollm2`.
    tensor_parallel_size: number of ranks; it need not divide the model's heads.
    executor: `inline` runs the one rank in this process, `ray` one actor per rank; `auto` takes inline for one rank.
    device: `cpu`, `cuda`, or `auto` for CUDA where there is a GPU.
    dtype: `float32`, `bfloat16`, `float16`, or `auto` for the model's own.
    quantization: `int8` or `int4` (CPU), or `fp8` (CUDA): what linears become when they are read; None leaves them.
    max_num_batched_tokens: token budget of a step; None means 2048 on CUDA and 512 on CPU.
    target_tbt_ms: time between tokens to hold, in milliseconds; the budget of each step is then solved from a step-time
        model, and max_num_batched_tokens only bounds it (None: 8192 on CUDA and 2048 on CPU).
    max_num_seqs: requests that run at once.
    policy: order of service: `fcfs`, `priority` or `shortest-prefill`; see scheduler.limits.Limits for this and the
        next three.
    chunked_prefill: cut prompts so that decodes are never stalled.
    max_partial_prefills: long prompts in mid-prefill at once; 0 for any number.
    long_prefill_token_threshold: tokens of one prompt in a step while others could use the rest; 0 for any number.
    prefix_caching: keep computed blocks and share them among requests with equal beginnings.
    max_model_len: prompt plus output tokens of a request; None means what the model was made for.
    block_size: tokens per KV block; None lets the attention backend choose.
    attention_backend: a backend's name, or `auto`.
    attention_calls: `one` call for a step's prefill and decode rows together, `two` for each apart, or `auto`.
    enforce_eager: launch every step anew instead of replaying captured CUDA graphs.
    fused_kernels: use the Triton kernels on CUDA, where Triton is installed.
    symmetric_memory: add up small tensors between GPUs of one node through torch's symmetric memory, NCCL the others.
    async_depth: steps in flight at once; 0 or 1 waits for each step's tokens before the next is planned.
    kv_cache_dtype: `fp8` (`fp8_e4m3`) or `fp8_e5m2` halves the KV cache where the attention backend can read it; `auto`
        keeps keys and values in the model's dtype.
    kv_cache_gib: memory for each rank's KV cache in GiB; None means 2 on CPU and what is left on a GPU.
    num_kv_blocks: exact number of KV blocks instead.
    gpu_memory_utilization: share of each GPU's memory to use, in (0, 1].
    trace_steps: a file for a record of every step, as JSON lines; see driver.trace.StepTrace.
    service_name: of the service that the engine belongs to; what an earlier driver of that name left is cleared away.
    ray_address: a Ray cluster's address, `local` for a private one, or `auto` for a running one, else a private one.
    start_timeout_seconds: how long to wait for devices and for the ranks to meet, and for a rank that loads and does
        not answer.
    hang_seconds: a step that takes longer hangs, unless the step-time model expects more than a 20th of that.
    step_timeout_seconds: a step that takes longer hangs in any case; also how long a collective may wait.

    Raises ConfigError.
    """

    model: str
    tensor_parallel_size: int = 1
    executor: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    max_num_batched_tokens: int | None = None
    target_tbt_ms: float | None = None
    max_num_seqs: int = 256
    policy: str = "fcfs"
    chunked_prefill: bool = True
    max_partial_prefills: int = 0
    long_prefill_token_threshold: int = 0
    prefix_caching: bool = True
    max_model_len: int | None = None
    block_size: int | None = None
    attention_backend: str = "auto"
    attention_calls: str = "auto"
    enforce_eager: bool = False
    fused_kernels: bool = True
    symmetric_memory: bool = True
    async_depth: int = 2
    kv_cache_dtype: str = "auto"
    kv_cache_gib: float | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    trace_steps: str | None = None
    service_name: str | None = None
    ray_address: str = "auto"
    start_timeout_seconds: float = 120.0
    hang_seconds: float = 10.0
    step_timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a name or a path, got {self.model!r}")
        for name, choices in (
            ("executor", EXECUTORS),
            ("device", DEVICES),
            ("dtype", ("auto", *DTYPES)),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("quantization", (None, *QUANTIZATIONS)),
            ("policy", POLICIES),
            ("attention_calls", ATTENTION_CALLS),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}, got {getattr(self, name)!r}")
        for name, low, high in (
            ("tensor_parallel_size", 1, 1024),
            ("max_num_batched_tokens", 1, 1 << 20),
            ("max_num_seqs", 1, 1 << 16),
            ("max_partial_prefills", 0, 1 << 16),
            ("long_prefill_token_threshold", 0, 1 << 20),
            ("max_model_len", 2, 1 << 24),
            ("block_size", 1, 4096),
            ("async_depth", 0, MAX_ASYNC_DEPTH),
            ("num_kv_blocks", 1, 1 << 30),
        ):
            self._check_integer(name, low, high)
        for name, high in (
            ("target_tbt_ms", 1e6),
            ("kv_cache_gib", 1e6),
            ("gpu_memory_utilization", 1.0),
            ("start_timeout_seconds", 1e6),
            ("hang_seconds", 1e6),
            ("step_timeout_seconds", 1e6),
        ):
            self._check_positive(name, high)
        if self.trace_steps is not None and not isinstance(self.trace_steps, str):
            raise ConfigError(f"trace_steps must be a path, got {self.trace_steps!r}")
        for name in ("chunked_prefill", "prefix_caching", "enforce_eager", "fused_kernels", "symmetric_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.target_tbt_ms is not None and not self.chunked_prefill:
            raise ConfigError(
                f"target_tbt_ms {self.target_tbt_ms:g} needs chunked prefill: whole prompts take what they take"
            )
        if self.executor == "inline" and self.tensor_parallel_size != 1:
            raise ConfigError(
                f"the inline executor runs one rank, but tensor_parallel_size is {self.tensor_parallel_size}; use ray"
            )

    def limits(self, device: str, max_model_len: int) -> Limits:
        """The scheduler's limits on a device. Raises ConfigError when whole prompts would not fit a step."""
        budgets = DEFAULT_BUDGETS if self.target_tbt_ms is None else MOST_TUNED_TOKENS
        default = budgets[device] if self.chunked_prefill else max_model_len
        budget = self.max_num_batched_tokens or default
        if not self.chunked_prefill and budget < max_model_len:
            raise ConfigError(
                f"without chunked prefill a step must hold a whole prompt: max_num_batched_tokens {budget} is less "
                f"than the context length of {max_model_len}"
            )
        return Limits(
            budget,
            self.max_num_seqs,
            self.policy,
            self.chunked_prefill,
            self.max_partial_prefills,
            self.long_prefill_token_threshold,
        )

    @property
    def uses_ray(self) -> bool:
        return self.executor == "ray" or (self.executor == "auto" and self.tensor_parallel_size > 1)

    def _check_integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        optional = type(self).__dataclass_fields__[name].default is None
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name} must be an integer between {low} and {high}, got {value!r}")

    def _check_positive(self, name: str, high: float) -> None:
        value = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
            raise ConfigError(f"{name} must be a number in (0, {high:g}], got {value!r}")
