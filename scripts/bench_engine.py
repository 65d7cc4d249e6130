#!/usr/bin/env python3
"""Many requests at once through the whole engine: tokens/s, frame sizes of the step broadcast, memory per rank.

    python scripts/bench_engine.py --model smollm2 --tp 3 --requests 64

Prints one JSON object. Prompts are random token ids, so that no two share a prefix.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time

from quadriga import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--requests", type=int, default=64, help="requests submitted together")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens generated for each")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="token budget of a step")
    parser.add_argument("--async-depth", type=int, default=2, help="steps in flight")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    rng = random.Random(args.seed)
    prompts = [[rng.randrange(100, 40_000) for _ in range(args.prompt_tokens)] for _ in range(args.requests)]
    params = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    began = time.perf_counter()
    with LLM(
        args.model,
        tensor_parallel_size=args.tp,
        dtype=args.dtype,
        max_num_batched_tokens=args.max_num_batched_tokens,
        async_depth=args.async_depth,
    ) as llm:
        ready = time.perf_counter()
        llm.generate(prompts[0], params)
        before = llm.stats()
        submitted = time.perf_counter()
        completions = llm.generate(prompts, params)
        seconds = time.perf_counter() - submitted
        after = llm.stats()
        counted = {name: after[name] - before[name] for name in after if name.endswith(("_frames", "_bytes"))}
        gaps = sorted(completion.mean_tbt_s for completion in completions)
        print(
            json.dumps(
                {
                    "tp": args.tp,
                    "requests": args.requests,
                    "ready_s": round(ready - began, 2),
                    "output_tokens_per_s": round(args.requests * args.output_tokens / seconds, 1),
                    "mean_tbt_ms_p50": round(gaps[len(gaps) // 2] * 1000, 1),
                    "prefill_frame_bytes": round(counted["prefill_bytes"] / counted["prefill_frames"], 1),
                    "decode_frame_bytes": round(counted["decode_bytes"] / counted["decode_frames"], 1),
                    "weight_mib": [round(worker.weight_bytes / 2**20, 1) for worker in llm.workers],
                    "load_peak_rss_mib": [round(worker.peak_rss_bytes / 2**20) for worker in llm.workers],
                }
            )
        )


if __name__ == "__main__":
    main()
