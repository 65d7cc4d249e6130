"""Launching a step never makes the host wait for the device, whatever its rows ask of sampling.

The device here is "meta": its tensors have shapes and no contents, so that reading one, or an operation whose result's
shape depends on contents, is an error; copies to it are watched for those that would wait.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention.torch_flash import TorchFlashBackend, TorchKernel
from parallel.group import TensorParallelGroup
from scheduler.plan import Admission, Extras
from tests.attention import contracts
from tests.models import make_tiny_model
from tests.workers.test_graphs import NUM_BLOCKS, Story, spec
from workers.architecture import read_architecture
from workers.runner import LaunchedStep, ModelRunner

DEVICE = torch.device("meta")


make_tensor = torch.tensor


def tensor_here(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.tensor, whose copy to a device waits for it and is not dispatched, so that Watch cannot see it."""
    assert torch.device(kwargs.get("device") or "cpu").type == "cpu", "a tensor made on the device waits for it"
    return make_tensor(*args, **kwargs)


class Watch(TorchDispatchMode):
    """copies: how many went to the device. A copy that waits for it is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, source = str(func).split(".")[1], next((x for x in args if isinstance(x, torch.Tensor)), None)
        if name in ("to", "_to_copy") and (source.device.type == "meta") != (result.device.type == "meta"):
            self.copies += 1
            assert kwargs.get("non_blocking"), "a copy to the device makes the host wait"
        if name == "copy_" and (args[0].device.type == "meta") != (args[1].device.type == "meta"):
            self.copies += 1
            assert args[2:] == (True,), "a copy to the device makes the host wait"
        return result


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # there is nothing to pin it for here
    folder = make_tiny_model("llama", tmp_path)
    runner = ModelRunner(read_architecture(folder), spec(folder), TensorParallelGroup(), DEVICE)
    layout, scale = runner.backend.layout, runner.backend.scale
    runner.backend = TorchFlashBackend(layout, scale, kernel=TorchKernel(contracts.varlen_attn))
    runner.make_cache(NUM_BLOCKS)
    monkeypatch.setattr(torch, "tensor", tensor_here)
    return runner


ASKED = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7},
    "truncated": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "nucleus": {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1},
    "large top_k": {"temperature": 0.7, "top_k": 2000},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"bias_ids": [1, 2], "biases": [1.0, -1.0], "min_tokens": 4, "end_ids": [3]},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
}


def admission(plain: Admission, asked: dict[str, Any]) -> Admission:
    of_row = {name: value for name, value in asked.items() if name in ("temperature", "top_k", "top_p", "min_p")}
    others = {name: value for name, value in asked.items() if name not in of_row}
    return replace(plain, **of_row, extras=Extras(len(plain.tokens), **others) if others else None)


def launch(runner: ModelRunner, asked: dict[str, Any]) -> tuple[list[LaunchedStep], Watch]:
    """Every second row asks for it; the others are as the story has them."""
    story, steps = Story(6), []
    with Watch() as watch:
        for budget in (11, 40, 7, 7, 40, 7):
            plan = story.plan(budget)
            plan.admissions = [admission(a, asked) if a.row % 2 else a for a in plan.admissions]
            steps.append(runner.launch(plan, 0.0))
    return steps, watch


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_launching_waits_for_nothing(runner: ModelRunner, asked: dict[str, Any]) -> None:
    steps, watch = launch(runner, asked)
    assert steps[-1]._tokens.shape == (6,)
    assert steps[-1]._tokens.device == DEVICE
    assert watch.copies > 6 * len(steps)
    assert not asked.keys() & {"logprobs"} or steps[-1].extras.sampled is not None


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.to(DEVICE),
        lambda x: tensor_here([1, 2], device=DEVICE),
        lambda x: torch.empty(3, device=DEVICE).copy_(x),
        lambda x: int(torch.ones(1, device=DEVICE)),
        lambda x: torch.ones(3, device=DEVICE)[torch.ones(3, dtype=torch.bool, device=DEVICE)],
        lambda x: bool(torch.ones(3, device=DEVICE).any()),
    ],
)
def test_a_wait_would_show(wait: Any) -> None:
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), torch.inference_mode(), Watch():
        wait(torch.ones(3))
