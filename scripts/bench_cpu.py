#!/usr/bin/env python3
"""Speed on CPU beside what the machine could give: single stream, prefill, many streams.

    python scripts/bench_cpu.py --model smollm2 --tp 1

Prints one JSON object. Memory bandwidth and matrix speed are measured in the same run, on all cores and idle of the
model: a decoded token reads every weight once, a prompt's token multiplies with each of them once (but for the head).
`of_limit` is the measured speed as a share of the speed at that bandwidth, or at that matrix speed.
Prompts are random token ids, so that no two share a prefix. Medians of --repeats.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from collections.abc import Callable

import torch

from quadriga import LLM, SamplingParams
from workers.architecture import Architecture
from workers.spec import QUANTIZATIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="token budget of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-throughput", action="store_true", help="leave out the 32 prompts")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    gigabytes, teraflops = memory_speed(), matrix_speed(getattr(torch, args.dtype))
    with LLM(
        args.model,
        tensor_parallel_size=args.tp,
        dtype=args.dtype,
        quantization=args.quantization,
        attention_backend=args.attention_backend,
        max_num_batched_tokens=args.max_num_batched_tokens,
    ) as llm:
        bench = Bench(llm, args.repeats)
        weight_bytes = sum(worker.weight_bytes for worker in llm.workers)
        parameters = count_parameters(llm.model.arch)
        stream, prefill = bench.stream(), bench.prefill(512)
        result = {
            "tp": args.tp,
            "quantization": args.quantization,
            "memory_gb_per_s": round(gigabytes, 1),
            "matrix_tflop_per_s": round(teraflops, 3),
            "stream_tokens_per_s": round(stream, 1),
            "stream_of_limit": round(stream / (gigabytes * 1e9 / weight_bytes), 2),
            "prefill_tokens_per_s": round(prefill, 1),
            "prefill_of_limit": round(prefill / (teraflops * 1e12 / (2 * parameters)), 2),
            "load_peak_rss_mib": [round(worker.peak_rss_bytes / 2**20) for worker in llm.workers],
        }
        if not args.skip_throughput:
            result["throughput_tokens_per_s"] = round(bench.throughput(), 1)
        print(json.dumps(result))


class Bench:
    """Greedy generation of fixed lengths."""

    def __init__(self, llm: LLM, repeats: int) -> None:
        self.llm, self.repeats = llm, repeats
        self.rng = random.Random(0)
        llm.generate(self.prompt(40), params(8))  # the first steps make memory resident

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(100, 40_000) for _ in range(length)]

    def stream(self, tokens: int = 129) -> float:
        """Tokens a second of one request, without its prefill."""
        return statistics.median(
            1 / self.llm.generate(self.prompt(16), params(tokens)).mean_tbt_s for _ in range(self.repeats)
        )

    def prefill(self, length: int) -> float:
        """Prompt tokens a second of one prompt, up to its first token."""
        return statistics.median(length / seconds(self.generate([length], 1)) for _ in range(self.repeats))

    def throughput(self) -> float:
        """Output tokens a second of 32 prompts of 50 to 500 tokens with 64 outputs each, submitted together."""
        lengths = [50 + 450 * i // 31 for i in range(32)]
        self.rng.shuffle(lengths)
        return statistics.median(32 * 64 / seconds(self.generate(lengths, 64)) for _ in range(self.repeats))

    def generate(self, lengths: list[int], tokens: int) -> Callable[[], object]:
        prompts = [self.prompt(length) for length in lengths]
        return lambda: self.llm.generate(prompts, params(tokens))


def count_parameters(arch: Architecture) -> int:
    """Of the matrices, each table of tokens among them."""
    layer = arch.hidden_size * (2 * arch.head_dim * (arch.num_q_heads + arch.num_kv_heads) + 3 * arch.intermediate_size)
    tables = 1 if arch.tie_word_embeddings else 2
    return arch.num_layers * layer + tables * arch.vocab_size * arch.hidden_size


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def memory_speed() -> float:
    """GB/s of summing 512 MiB, the best of ten."""
    numbers = torch.ones(128 << 20, dtype=torch.float32)
    return numbers.numel() * 4 / 1e9 / min(seconds(numbers.sum) for _ in range(10))


def matrix_speed(dtype: torch.dtype) -> float:
    """TFLOP/s of a product of 512 rows with a weight [2048, 2048], the best of ten."""
    x, weight = torch.ones(512, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype)
    product = lambda: torch.nn.functional.linear(x, weight)  # noqa: E731
    return 2 * 512 * 2048**2 / 1e12 / min(seconds(product) for _ in range(10))


if __name__ == "__main__":
    main()
