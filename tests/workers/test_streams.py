"""The order of copies, captures and waits on a GPU, by stand-ins that note it; and what a graph's padding points to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from tests.workers.recording import Recorder
from workers.graphs import CudaGraphMaker, GraphSizes, StepGraphs
from workers.guides import GuideState
from workers.inputs import StepInputs, to_host
from workers.runner import LaunchedStep

CPU = torch.device("cpu")


class Log(list):
    """What happened on the pretended GPU, in order."""


class PretendedStream:
    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: PretendedStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class PretendedEvent:
    """synchronize: what was copied before `record` arrives only now."""

    log: ClassVar[Log]
    late: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.is_recorded = False

    def record(self) -> None:
        self.log.append("record")
        self.is_recorded = True

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.log.append("synchronize")
        assert self.is_recorded, "an event that was never recorded is waited for in vain"
        while self.late:
            self.late.pop(0)()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Tensors called `on_gpu` say that they are on CUDA; copies of them arrive when an event is waited for."""
    log = PretendedEvent.log = Log()
    PretendedEvent.late = []
    current = PretendedStream("main", log)
    make, copy = torch.empty, torch.Tensor.copy_

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs).fill_(-77) if pin_memory else make(*args, **kwargs)

    def late_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking, "the host would wait"
        log.append("copy")
        plain = source.as_subclass(torch.Tensor)
        PretendedEvent.late.append(lambda: copy(target, plain))
        return target

    @contextmanager
    def on(stream: PretendedStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    @contextmanager
    def capture(graph: object, pool: object, stream: PretendedStream, capture_error_mode: str) -> Iterator[None]:
        log.append(f"capture on {stream.name} into pool {pool}, {capture_error_mode}")
        yield
        log.append("captured")

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "copy_", late_copy)
    monkeypatch.setattr(torch.cuda, "Event", PretendedEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: PretendedStream("side", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 7)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    return log


class OnGpu(torch.Tensor):
    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


def on_gpu(*values: int) -> torch.Tensor:
    return torch.tensor(values).as_subclass(OnGpu)


def test_a_graph_is_captured_on_a_side_stream_once_what_came_before_is_done(gpu: Log) -> None:
    maker = CudaGraphMaker(torch.device("cuda"))
    maker.capture(lambda: gpu.append("run"))
    assert gpu == [
        "side waits for main",
        "on side",
        "run",
        "off side",
        "main waits for side",
        "capture on side into pool 7, thread_local",
        "run",
        "captured",
    ]


def test_tokens_are_read_once_their_copy_has_come(gpu: Log) -> None:
    step = LaunchedStep(None, 0.0, None, *to_host(on_gpu(5, 9)))
    assert gpu == ["copy", "record"]
    assert not step.ready
    assert step.tokens() == [5, 9]
    assert gpu == ["copy", "record", "synchronize"]


def test_a_guide_takes_its_token_in_once_it_has_come(gpu: Log) -> None:
    taken: list[int] = []
    state = GuideState.__new__(GuideState)
    state.failure = None
    state._matcher = SimpleNamespace(consume_token=taken.append, compute_bitmask=lambda: b"", is_error=lambda: False)
    state.expect(on_gpu(42))
    assert (taken, gpu) == ([], ["copy", "record"])
    state._bits()
    assert (taken, gpu) == ([42], ["copy", "record", "synchronize"])


def test_on_cpu_there_is_nothing_to_wait_for() -> None:
    tokens = torch.tensor([1])
    assert to_host(tokens) == (tokens, None)


# ---- what padding points to, after larger steps with longer contexts

SIZES = GraphSizes(num_rows=8, max_tokens=8, max_model_len=64, block_size=4, hidden_size=2, kinds="mixed")
SPARE = 50


def graphs() -> StepGraphs:
    made = StepGraphs(lambda ids, *_: torch.zeros(len(ids), 2), Recorder(), SIZES, SPARE, torch.float32, CPU)
    made.capture()
    return made


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(chunks: int, decodes: int, context: int) -> StepInputs:
    """Chunks of one token and decodes, all with contexts of the same length."""
    width = -(-context // 4)
    table = lambda rows: torch.arange(rows * width, dtype=torch.int32).view(rows, width)  # noqa: E731
    prefill = decode = None
    if chunks:
        ones, lens = [1] * chunks, [context] * chunks
        prefill = PrefillMetadata(int32(*range(chunks + 1)), int32(*lens), table(chunks), ones, lens)
    if decodes:
        decode = DecodeMetadata(int32(*[context] * decodes), table(decodes), context)
    count = chunks + decodes
    ids = torch.arange(count)
    metadata = AttentionMetadata(torch.arange(count), 4, prefill, decode)
    return StepInputs(ids, ids, metadata, ids, np.arange(count), np.arange(count))


def test_padding_of_decodes_attends_to_one_key_in_the_spare_block() -> None:
    """Not to the long contexts of rows that were there before: those blocks may be others' by now, and cost time."""
    made = graphs()
    made.run(step(0, 8, 60))
    made.run(step(0, 3, 20))
    assert made.replays[("decode", 4)] == 1
    assert made._context_lens[:4].tolist() == [20, 20, 20, 1]
    assert made._block_table[3, 0] == SPARE
    assert made._slots[3] == SPARE * 4


def test_padding_of_mixed_steps_has_no_queries_and_no_keys() -> None:
    made = graphs()
    made.run(step(3, 5, 60))
    made.run(step(1, 2, 20))
    assert made.replays[("mixed", 4)] == 1
    assert made._context_lens.tolist() == [20, 20, 20, 0, 0, 0, 0, 0]
    assert made._query_start_loc.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert made._slots[3] == SPARE * 4
