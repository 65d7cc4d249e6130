"""What requests with sampling fields should be answered, computed in the plainest way over transformers' logits."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from scheduler.params import SamplingParams
from tests.models import load_reference


@functools.cache
def _model(folder: Path) -> Any:
    return load_reference(folder)


@torch.inference_mode()
def all_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """[ids, vocabulary] fp64: what follows each of the ids."""
    return _model(folder)(torch.tensor([ids])).logits[0].double()


def adjusted(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """The logits after bias and penalties, token by token as the definitions say."""
    scores = logits.tolist()
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in set(prompt) | set(output):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


def answer(folder: Path, prompt: list[int], params: SamplingParams, length: int) -> list[int]:
    """The greedy output, up to and with an end token of the request's own."""
    output: list[int] = []
    while len(output) < length:
        scores = adjusted(all_logits(folder, prompt + output)[-1], prompt, output, params)
        if len(output) < params.min_tokens:
            for token in params.stop_token_ids:
                scores[token] = float("-inf")
        output.append(max(range(len(scores)), key=scores.__getitem__))
        if output[-1] in params.stop_token_ids:
            break
    return output
