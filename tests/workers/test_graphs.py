"""Captured steps against launched ones: what is captured, which bucket is replayed, and that the results are equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention.capabilities import Capabilities
from attention.flash import FlashAttnBackend, Kernels
from attention.torch_flash import TorchFlashBackend, TorchKernel
from parallel.group import TensorParallelGroup
from scheduler.plan import Admission, Chunk, StepPlan, block_weight, row_weight, rows_checksum
from tests.attention import contracts
from tests.models import VOCAB_SIZE, make_tiny_model
from tests.workers.recording import Recorder, WaitsWhileCapturing
from workers.architecture import read_architecture
from workers.graphs import GraphSizes, buckets, capture_refusal
from workers.runner import ModelRunner
from workers.spec import WorkerSpec

NUM_BLOCKS, BLOCK_SIZE, NUM_ROWS = 12, 256, 9
CPU = torch.device("cpu")
FLASH_2 = Kernels(2, contracts.flash_attn_with_kvcache, contracts.flash_attn_varlen_func)
FLASH_3 = Kernels(3, contracts.flash_attn_3_with_kvcache)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def spec(folder: Path, **changes: object) -> WorkerSpec:
    base = WorkerSpec(
        model=str(folder),
        rank=0,
        size=1,
        device="cpu",
        dtype="float32",
        attention_backend="reference",
        block_size=BLOCK_SIZE,
        num_rows=NUM_ROWS,
        max_model_len=512,
        max_num_batched_tokens=40,
        kv_cache_bytes=None,
        num_kv_blocks=NUM_BLOCKS,
        gpu_memory_utilization=0.9,
        start_timeout_seconds=10.0,
        step_timeout_seconds=10.0,
    )
    return replace(base, **changes)


def make_runner(folder: Path, kind: str, maker: Recorder | None) -> ModelRunner:
    """A runner whose attention is a FlashAttention backend over its stand-in."""
    runner = ModelRunner(read_architecture(folder), spec(folder), TensorParallelGroup(), CPU, maker)
    layout, scale = runner.backend.layout, runner.backend.scale
    if kind == "torch_flash":
        runner.backend = TorchFlashBackend(layout, scale, kernel=TorchKernel(contracts.varlen_attn))
    else:
        runner.backend = FlashAttnBackend(layout, scale, kernels=FLASH_2 if kind == "flash_attn_2" else FLASH_3)
    runner.graph_sizes = replace(runner.graph_sizes, kinds=runner.backend.capabilities.graphs)
    runner.load(folder)
    runner.make_cache(NUM_BLOCKS)
    for pages in (pages for layer in runner.cache.layers for pages in layer):
        pages[:NUM_BLOCKS].fill_(float("nan"))  # the spare block was written when the steps were captured
    return runner


class Story:
    """Plans of a few requests' lives: prompts in chunks, then decodes that join and leave, seeded sampling on some."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.prompts = [
            torch.randint(0, VOCAB_SIZE, (3 + 5 * row,), generator=generator).tolist() for row in range(rows)
        ]
        self.computed, self.decoding, self.step = [0] * rows, [], 0
        self.blocks = list(range(rows, 0, -1))

    def plan(self, budget: int) -> StepPlan:
        plan = StepPlan(0, self.step)
        self.step += 1
        plan.join = [r for r in range(len(self.prompts)) if self._prefilled(r) and r not in self.decoding]
        self.decoding += plan.join
        weights = sum(row_weight(r, self.computed[r], block_weight(0, self.blocks[r])) for r in self.decoding)
        plan.num_decodes, plan.checksum = len(self.decoding), rows_checksum(weights)
        budget -= len(self.decoding)
        for row, prompt in enumerate(self.prompts):
            start = self.computed[row]
            length = min(len(prompt) - start, budget)
            if length <= 0:
                continue
            if start == 0:
                heat = 0.8 if row % 2 else 0.0
                plan.admissions.append(Admission(row, prompt, 7 + row, heat, 0, 1.0, 0.0))
                plan.new_blocks.append((row, [self.blocks[row]]))
            plan.chunks.append(Chunk(row, start, length, sample=start + length == len(prompt)))
            budget -= length
        for row in self.decoding:
            self.computed[row] += 1
        for chunk in plan.chunks:
            self.computed[chunk.row] += chunk.length
        return plan

    def _prefilled(self, row: int) -> bool:
        return self.computed[row] >= len(self.prompts[row])


def run_story(runner: ModelRunner, steps: int, budgets: tuple[int, ...] = (11, 40, 7)) -> list[list[int]]:
    story = Story(6)
    return [runner.launch(story.plan(budgets[step % len(budgets)]), 0.0).tokens() for step in range(steps)]


@pytest.mark.parametrize("kind", ["torch_flash", "flash_attn_2", "flash_attn_3"])
def test_replayed_steps_give_the_tokens_of_launched_ones(folder: Path, kind: str) -> None:
    """Chunks, mixed steps and decodes of a changing number of rows, padded to buckets, greedy and seeded."""
    eager = run_story(make_runner(folder, kind, None), 20)
    runner = make_runner(folder, kind, Recorder())
    assert run_story(runner, 20) == eager
    assert sum(runner.graphs.replays.values()) == 20
    assert {name for name, _ in runner.graphs.replays} == {"decode", "mixed"}
    assert ("decode", 8) in runner.graphs.replays  # six rows: padding was there


def test_hidden_states_are_those_of_a_launched_step(folder: Path) -> None:
    """Up to the rounding of products over padded rows."""
    from workers.inputs import build_inputs

    runner, story = make_runner(folder, "torch_flash", Recorder()), Story(6)
    for step in range(12):
        plan = story.plan((9, 40)[step % 2])
        runner.rows.apply(plan)
        inputs = build_inputs(plan, runner.rows, runner.last_tokens, CPU)
        with torch.inference_mode():
            replayed = runner.graphs.run(inputs).clone()
            launched = runner._forward(inputs.token_ids, inputs.positions, inputs.metadata)
        torch.testing.assert_close(replayed, launched, rtol=1e-4, atol=1e-4)
        runner.rows.advance(plan)


def test_padding_writes_to_the_spare_block_alone(folder: Path) -> None:
    runner, story = make_runner(folder, "torch_flash", Recorder()), Story(3)
    for _ in range(6):
        runner.launch(story.plan(7), 0.0)
    assert sum(count for (_, size), count in runner.graphs.replays.items() if size != 7) > 0
    used = set(story.blocks)
    for pages in (pages for layer in runner.cache.layers for pages in layer):
        assert len(pages) == NUM_BLOCKS + 1
        for block in range(NUM_BLOCKS):
            written = int((~pages[block, :, 0, 0].isnan()).sum())
            row = story.blocks.index(block) if block in used else None
            assert written == (0 if row is None else story.computed[row])


def test_the_largest_is_captured_first_and_every_bucket_once(folder: Path) -> None:
    recorder = Recorder()
    runner = make_runner(folder, "torch_flash", recorder)
    assert runner.graph_sizes.decode_buckets == [1, 2, 4, 8, 9]
    assert runner.graph_sizes.mixed_buckets == [1, 2, 4, 8, 16, 24, 32, 40]
    tokens = [graph.calls[-1][1][0].shape[0] for graph in recorder.graphs]  # of the copy to the hidden states
    assert tokens == sorted([*runner.graph_sizes.decode_buckets, *runner.graph_sizes.mixed_buckets], reverse=True)
    layers = len(runner.cache.layers)
    for graph in recorder.graphs:
        assert graph.names().count("quadriga_contracts.paged_attention") == layers
        assert graph.names().count("aten.cumsum") == 1  # what all layers use is derived once, and in the graph


def test_a_step_that_no_bucket_holds_is_launched(folder: Path) -> None:
    runner, story = make_runner(folder, "torch_flash", Recorder()), Story(6)
    eager = make_runner(folder, "torch_flash", None)
    runner.graphs._buckets["mixed"] = [8]
    plans = [story.plan(40), story.plan(40), story.plan(40)]
    assert [runner.launch(p, 0.0).tokens() for p in plans] == [eager.launch(p, 0.0).tokens() for p in plans]
    assert sum(runner.graphs.replays.values()) < len(plans)


def test_where_only_decodes_may_be_captured_mixed_steps_are_launched(folder: Path) -> None:
    runner = make_runner(folder, "torch_flash", Recorder())
    sizes = replace(runner.graph_sizes, kinds="decode")
    assert sizes.mixed_buckets == []
    assert sizes.most_tokens == NUM_ROWS
    runner.graph_sizes = sizes
    runner._capture(runner.graph_maker, NUM_BLOCKS)
    eager = run_story(make_runner(folder, "torch_flash", None), 12)
    assert run_story(runner, 12) == eager
    assert {kind for kind, _ in runner.graphs.replays} == {"decode"}


# The recording is only worth what it notices.


def test_a_number_read_while_capturing_is_noticed(folder: Path) -> None:
    with pytest.raises(WaitsWhileCapturing, match=r"aten\._local_scalar_dense"):
        Recorder().capture(lambda: torch.ones(3).sum().item())
    with pytest.raises(WaitsWhileCapturing, match=r"aten\.index"):
        Recorder().capture(lambda: torch.ones(3)[torch.ones(3, dtype=torch.bool)])
    with pytest.raises(WaitsWhileCapturing, match=r"aten\.lift_fresh"):
        Recorder().capture(lambda: torch.tensor([1.0, 2.0]))


def test_a_backend_that_keeps_what_it_derived_before_the_capture_is_noticed(folder: Path) -> None:
    """Rows derived from other metadata than those captured stay what they were: the results must then differ."""
    recorder = Recorder()
    runner = make_runner(folder, "torch_flash", None)
    runner.graph_maker = recorder
    runner.graphs = None
    stale = {}
    inner = runner._forward

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, metadata: object) -> torch.Tensor:
        return inner(token_ids, positions, stale.setdefault((len(token_ids), metadata.ragged is None), metadata))

    runner._forward = forward
    runner.cache = None
    runner.make_cache(NUM_BLOCKS)
    runner._forward = inner
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        assert run_story(runner, 20) == run_story(make_runner(folder, "torch_flash", None), 20)


def test_a_copy_that_is_forgotten_is_noticed(folder: Path) -> None:
    eager = run_story(make_runner(folder, "torch_flash", None), 20)
    for name in ("_slots", "_positions", "_token_ids", "_block_table"):
        runner = make_runner(folder, "torch_flash", Recorder())
        buffer = getattr(runner.graphs, name)
        setattr(runner.graphs, name, buffer.clone())  # the graphs go on reading the old one
        assert run_story(runner, 20) != eager, name


@pytest.mark.parametrize(
    ("limit", "parts", "sizes"),
    [
        (1, 4, [1]),
        (3, 4, [1, 2, 3]),
        (40, 4, [1, 2, 4, 8, 16, 20, 24, 28, 32, 40]),
        (100, 2, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]),
    ],
)
def test_buckets(limit: int, parts: int, sizes: list[int]) -> None:
    assert buckets(limit, parts) == sizes


def test_buckets_waste_no_more_than_they_say() -> None:
    sizes = buckets(512, 4)
    for count in range(17, 513):
        bucket = next(size for size in sizes if size >= count)
        assert bucket <= count * 1.25


@pytest.mark.parametrize(
    ("device", "capability", "transport", "enforce_eager", "reason"),
    [
        ("cuda", "mixed", "nccl", False, None),
        ("cuda", "decode", "none", False, None),
        ("cuda", "mixed", "none", True, "enforce_eager is set"),
        ("cpu", "mixed", "none", False, "for CUDA devices, not for cpu"),
        ("cuda", "none", "none", False, "the attention backend cannot be captured"),
        ("cuda", "mixed", "gloo", False, "collectives over gloo cannot be captured"),
    ],
)
def test_steps_are_captured_where_they_can_be(
    device: str, capability: str, transport: str, enforce_eager: bool, reason: str | None
) -> None:
    found = capture_refusal(torch.device(device), capability, transport, enforce_eager)
    assert found is None if reason is None else reason in found


def test_on_cpu_no_step_is_captured_and_no_block_is_spare(folder: Path) -> None:
    runner = ModelRunner(read_architecture(folder), spec(folder), TensorParallelGroup(), CPU)
    assert runner.captured_tokens == 0
    assert runner.make_cache(4) == 4 * runner.cache_shape.bytes_per_block
    assert len(runner.cache.layers[0][0]) == 4
    assert runner.graphs is None


def test_the_reference_states_that_it_is_not_captured() -> None:
    assert Capabilities().graphs == "none"
    sizes = GraphSizes(8, 64, 128, 16, 48, "none")
    assert sizes.mixed_buckets == []
