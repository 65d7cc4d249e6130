"""Workers that stay up while engines with different settings run on them, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from driver.config import EngineConfig
from driver.llm import LLM
from driver.setup import make_engine, make_executor, read_model, worker_specs
from scheduler.limits import Limits
from scheduler.params import SamplingParams

UNLIMITED = 4096
BUDGETS = (1, 7, 64, UNLIMITED)
MAX_SEQS = 16


class Ranks:
    """A model on `size` ranks in fp32: inline for one rank, else real Ray actors."""

    def __init__(
        self, folder: Path | str, size: int = 1, executor: str = "auto", block_size: int = 4, **settings: Any
    ) -> None:
        self.config = EngineConfig(
            model=str(folder),
            tensor_parallel_size=size,
            executor=executor,
            dtype="float32",
            device="cpu",
            max_num_batched_tokens=UNLIMITED,
            max_num_seqs=MAX_SEQS,
            block_size=block_size,
            prefix_caching=False,
            **settings,
        )
        model = read_model(self.config)
        self.executor = make_executor(self.config)
        limits = Limits(UNLIMITED, MAX_SEQS)
        self.ready = self.executor.start(worker_specs(self.config, model, limits, self.executor))
        self._epochs = itertools.count(1)

    def close(self) -> None:
        self.executor.close()

    @contextmanager
    def llm(
        self, budget: int = UNLIMITED, depth: int = 2, num_blocks: int | None = None, **settings: Any
    ) -> Iterator[LLM]:
        """An engine on these ranks with its own token budget, async depth, number of KV blocks and other settings.

        Prefix caching is off unless asked for, so that every prompt token is computed.
        """
        config = replace(self.config, max_num_batched_tokens=budget, async_depth=depth, **settings)
        llm = LLM(start=False, **{name: getattr(config, name) for name in config.__dataclass_fields__})
        limits = config.limits("cpu", llm.model.max_model_len)
        blocks = num_blocks or self.ready[0].num_blocks
        llm._engine = make_engine(config, self.executor, limits, blocks, next(self._epochs))
        try:
            yield llm
        finally:
            llm._engine.close()


def outputs(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams], staggered: bool = False
) -> list[list[int]]:
    """Output token ids of all prompts: submitted together, or each once the one before has its first token."""
    many = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
    if not staggered:
        return [c.output_token_ids for c in llm.generate(list(prompts), many, use_tqdm=False)]
    streams, got = [], []
    for prompt, one in zip(prompts, many, strict=True):
        stream = llm.stream(prompt, one)
        got.append(list(next(stream).token_ids))
        streams.append(stream)
    for tokens, stream in zip(got, streams, strict=True):
        for increment in stream:
            tokens += increment.token_ids
    return got
