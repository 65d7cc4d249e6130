"""Logits of a bare model runner, which was given its prompt in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from scheduler.plan import Admission, Chunk, StepPlan
from workers.inputs import build_inputs
from workers.runner import ModelRunner

NUM_BLOCKS = 16
BLOCKS = [5, 3, 11, 0, 7, 9, 15, 2, 8, 1]  # the prompt's, in no order


def last_logits_of(runner: ModelRunner, folder: Path, prompt: Sequence[int], chunk_size: int) -> torch.Tensor:
    """[vocabulary] logits after the prompt, every rank's part put together. All ranks call it, with a new runner."""
    runner.load(folder)
    runner.make_cache(NUM_BLOCKS)
    with torch.inference_mode():
        for step, start in enumerate(range(0, len(prompt), chunk_size)):
            length = min(chunk_size, len(prompt) - start)
            plan = StepPlan(0, step, chunks=[Chunk(0, start, length, start + length == len(prompt))])
            if step == 0:
                plan.admissions = [Admission(0, list(prompt), 0, 0.0, 0, 1.0, 0.0)]
                plan.new_blocks = [(0, BLOCKS)]
            runner.rows.apply(plan)
            hidden = runner.hidden_states(build_inputs(plan, runner.rows, runner.last_tokens, runner.device))
            runner.rows.advance(plan)
        own, ids = runner.model.head(hidden[-1:])[0], runner.sampler.own_range
        whole = torch.zeros(runner.model.head.vocab_size)
        whole[ids.start : ids.stop] = own
        return runner.group.all_reduce(whole)
