#!/usr/bin/env python3
"""Steady streams while long prompts arrive, through the engine: how long do the streams stall?

    python scripts/bench_mixed.py --model smollm2 --trace-steps steps.jsonl
    python scripts/bench_mixed.py --model smollm2 --no-chunked-prefill --trace-steps whole.jsonl

Prints one JSON object: TBT (time between tokens of the streams while long prompts were in flight) and TTFT of the long
prompts in milliseconds, and prompt tokens/s while any long prompt was in flight. Prompts are random token ids.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import threading
import time

from quadriga import LLM, SamplingParams


class Reader(threading.Thread):
    """Reads one stream and keeps when its tokens came."""

    def __init__(self, llm: LLM, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._llm, self._prompt = llm, prompt
        self._params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.began = time.perf_counter()
        self.times: list[float] = []

    def run(self) -> None:
        for increment in self._llm.stream(self._prompt, self._params):
            self.times += [time.perf_counter()] * len(increment.token_ids)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-tokens", type=int, default=160, help="tokens of each stream")
    parser.add_argument("--long", type=int, default=5, help="number of long prompts")
    parser.add_argument("--long-tokens", type=int, default=1500, help="tokens of each long prompt")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between long prompts")
    parser.add_argument("--max-num-batched-tokens", type=int, help="token budget of a step")
    parser.add_argument("--target-tbt-ms", type=float, help="time between tokens to hold")
    parser.add_argument("--chunked-prefill", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trace-steps", help="record of every step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)

    rng = random.Random(args.seed)
    with LLM(
        args.model,
        tensor_parallel_size=args.tp,
        max_model_len=2048,
        max_num_batched_tokens=args.max_num_batched_tokens,
        target_tbt_ms=args.target_tbt_ms,
        chunked_prefill=args.chunked_prefill,
        prefix_caching=False,
        trace_steps=args.trace_steps,
    ) as llm:

        def start(num_tokens: int, max_tokens: int) -> Reader:
            reader = Reader(llm, [rng.randrange(100, 40_000) for _ in range(num_tokens)], max_tokens)
            reader.start()
            return reader

        streams = [start(16, args.stream_tokens) for _ in range(args.streams)]
        while not all(stream.times for stream in streams):
            time.sleep(0.01)
        long = []
        for _ in range(args.long):
            long.append(start(args.long_tokens, 1))
            time.sleep(args.every)
        for reader in [*streams, *long]:
            reader.join()

    first, last = long[0].began, max(reader.times[0] for reader in long)
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.times, stream.times[1:], strict=False)
        if later > first and earlier < last
    ]
    print(
        json.dumps(
            {
                "chunked_prefill": args.chunked_prefill,
                "max_num_batched_tokens": args.max_num_batched_tokens,
                "tbt_ms": {name: round(percentile(gaps, q) * 1000) for name, q in (("p50", 0.5), ("p99", 0.99))},
                "tbt_max_ms": round(max(gaps) * 1000),
                "long_ttft_ms_p50": round(percentile([r.times[0] - r.began for r in long], 0.5) * 1000),
                "prompt_tokens_per_s": round(args.long * args.long_tokens / (last - first)),
            }
        )
    )


if __name__ == "__main__":
    main()
