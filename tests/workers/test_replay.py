"""Recorded steps give the very bits of steps computed kernel by kernel, on any number of threads."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from attention.native import Recording, call, empty
from parallel.group import TensorParallelGroup
from tests.models import make_tiny_model
from tests.ranks import run_ranks
from tests.workers.compiled import kernels_or_skip
from workers.architecture import read_architecture
from workers.inputs import StepInputs
from workers.replay import MOST_TOKENS, NotRecordable, Pool, Replay
from workers.runner import ModelRunner
from workers.spec import WorkerSpec

KERNELS = kernels_or_skip()
BLOCK, WIDTH = 4, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def runner(
    folder: Path, group: TensorParallelGroup, dtype: str = "float32", quantization: str | None = None
) -> ModelRunner:
    spec = WorkerSpec(
        model=str(folder),
        rank=group.rank,
        size=group.size,
        device="cpu",
        dtype=dtype,
        attention_backend="cpu",
        block_size=BLOCK,
        num_rows=8,
        max_model_len=BLOCK * WIDTH,
        max_num_batched_tokens=64,
        kv_cache_bytes=None,
        num_kv_blocks=200,
        gpu_memory_utilization=0.9,
        start_timeout_seconds=10,
        step_timeout_seconds=10,
        quantization=quantization,
    )
    made = ModelRunner(read_architecture(folder), spec, group, torch.device("cpu"))
    made.load(folder)
    made.make_cache(200)
    return made


def prompts(lengths: list[int]) -> StepInputs:
    """One prompt a row; row r owns blocks WIDTH * r and on."""
    generator, total = torch.Generator().manual_seed(5), sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    ends = torch.tensor(lengths).cumsum(0)
    blocks = torch.arange(len(lengths))[:, None] * WIDTH + torch.arange(WIDTH)
    part = PrefillMetadata(
        torch.cat((torch.zeros(1), ends)).int(), torch.tensor(lengths).int(), blocks.int(), lengths, lengths
    )
    slots = rows * WIDTH * BLOCK + positions
    metadata = AttentionMetadata(slots, BLOCK, part)
    tokens = torch.randint(300, (total,), generator=generator)
    return StepInputs(tokens, positions, metadata, ends - 1, rows.numpy(), positions.numpy())


def decodes(contexts: list[int], seed: int) -> StepInputs:
    """One more token for each row; contexts count it."""
    generator, rows = torch.Generator().manual_seed(seed), torch.arange(len(contexts))
    positions = torch.tensor(contexts) - 1
    width = -(-max(contexts) // BLOCK)
    part = DecodeMetadata(
        torch.tensor(contexts).int(), (rows[:, None] * WIDTH + torch.arange(width)).int(), max(contexts)
    )
    metadata = AttentionMetadata(rows * WIDTH * BLOCK + positions, BLOCK, None, part)
    tokens = torch.randint(300, (len(contexts),), generator=generator)
    return StepInputs(tokens, positions, metadata, rows, rows.numpy(), positions.numpy())


def mixed(contexts: list[int], chunks: dict[int, tuple[int, int]], sampled: list[bool], seed: int) -> StepInputs:
    """Chunks {row: (start, length)}, those that are `sampled` yield a token, and one more token for the first rows."""
    decode = decodes(contexts, seed)
    generator = torch.Generator().manual_seed(seed)
    lengths, ends = [length for _, length in chunks.values()], [start + length for start, length in chunks.values()]
    positions = torch.cat([torch.arange(start, start + length) for start, length in chunks.values()])
    rows = torch.tensor(list(chunks)).repeat_interleave(torch.tensor(lengths))
    stops = torch.tensor(lengths).cumsum(0)
    width = -(-max(ends) // BLOCK)
    blocks = torch.tensor(list(chunks))[:, None] * WIDTH + torch.arange(width)
    part = PrefillMetadata(
        torch.cat((torch.zeros(1), stops)).int(), torch.tensor(ends).int(), blocks.int(), lengths, ends
    )
    slots = torch.cat((rows * WIDTH * BLOCK + positions, decode.metadata.slot_mapping))
    total = int(stops[-1])
    picked = torch.cat((stops[torch.tensor(sampled)] - 1, total + torch.arange(len(contexts))))
    return StepInputs(
        token_ids=torch.cat((torch.randint(300, (total,), generator=generator), decode.token_ids)),
        positions=torch.cat((positions, decode.positions)),
        metadata=AttentionMetadata(slots, BLOCK, part, decode.metadata.decode),
        sampled_tokens=picked,
        sampled_rows=picked.numpy(),
        next_positions=picked.numpy(),
    )


MIXED = [  # of three kinds; those of one kind differ in lengths, starts and which chunk is sampled
    mixed([8, 4], {4: (0, 5), 5: (0, 9)}, [False, False], 1),
    mixed([9, 5], {4: (5, 9), 5: (9, 5)}, [False, False], 2),
    mixed([10, 6], {6: (0, 3), 7: (0, 11)}, [True, False], 3),
    mixed([11, 7], {4: (14, 8), 5: (14, 6)}, [False, True], 4),
    mixed([12, 8], {7: (11, 13)}, [True], 5),
]


def steps(runner: ModelRunner, replayed: bool) -> list[torch.Tensor]:
    """Logits of a prefill step and of decode steps whose contexts and numbers of rows come and go."""
    compute = runner._compute if replayed else lambda function, inputs: function(inputs)
    results = []
    with torch.inference_mode():
        results.append(compute(runner._logits, prompts([7, 3, 9, 5])).clone())
        compute(runner.hidden_states, prompts([7, 3, 9, 5]))
        for seed, contexts in enumerate([[8, 4, 10, 6], [9, 5], [9, 5, 11, 7], [10, 6, 12], [10, 6], [11, 7], [10, 6]]):
            results.append(compute(runner._logits, decodes(contexts, seed)).clone())
    return results


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_replayed_steps_are_the_same_to_the_bit(folder: Path, dtype: str, count: int) -> None:
    with threads(count):
        replaying = runner(folder, TensorParallelGroup(), dtype)
        results = steps(replaying, replayed=True)
        assert {kind.decodes for kind in replaying.replay._kept} == {0, 2, 3, 4}
        for result, wanted in zip(results, steps(runner(folder, TensorParallelGroup(), dtype), False), strict=True):
            assert not result.isnan().any()
            assert torch.equal(result, wanted)


@pytest.mark.parametrize("replayed", [False, True])
def test_the_last_layer_leaves_out_what_nobody_asks_for(folder: Path, replayed: bool) -> None:
    """Logits and cache are the same to the bit as with all tokens computed to the end, for fewer rows."""
    lazy, whole = (runner(folder, TensorParallelGroup(), "bfloat16") for _ in range(2))
    rows: list[int] = []
    for layer in lazy.model.layers:
        layer.mlp.register_forward_pre_hook(lambda mlp, inputs: rows.append(len(inputs[0])))
    with threads(2), torch.inference_mode():
        for inputs in (prompts([7, 3, 9, 5]), *MIXED[2:]):
            rows.clear()
            result = (lazy._compute(lazy._logits, inputs) if replayed else lazy._logits(inputs)).clone()
            tokens, sampled = len(inputs.token_ids), len(inputs.sampled_tokens)
            recorded_before = replayed and not rows
            assert recorded_before or rows == [tokens] * (len(rows) - 1) + [sampled]
            assert sampled < tokens
            hidden = whole.hidden_states(inputs)[inputs.sampled_tokens]
            assert torch.equal(result, whole.model.head(hidden))
    for one, other in zip(lazy.cache.layers, whole.cache.layers, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_replayed_steps_of_integer_weights_are_the_same_to_the_bit(folder: Path, quantization: str, count: int) -> None:
    with threads(count):
        replaying = runner(folder, TensorParallelGroup(), "bfloat16", quantization)
        results = steps(replaying, replayed=True)
        assert {kind.decodes for kind in replaying.replay._kept} == {0, 2, 3, 4}
        plain = runner(folder, TensorParallelGroup(), "bfloat16", quantization)
        for result, wanted in zip(results, steps(plain, False), strict=True):
            assert not result.isnan().any()
            assert torch.equal(result, wanted)


def test_mixed_steps_of_one_kind_share_a_recording(folder: Path) -> None:
    def logits(runner: ModelRunner, replayed: bool) -> list[torch.Tensor]:
        compute = runner._compute if replayed else lambda function, inputs: function(inputs)
        with torch.inference_mode():
            compute(runner._logits, prompts([7, 3, 9, 5]))
            # Each twice: recorded the first time, at the latest, and carried out again.
            return [compute(runner._logits, inputs).clone() for inputs in [*MIXED, *MIXED]]

    replaying = runner(folder, TensorParallelGroup())
    results = logits(replaying, True)
    kinds = [kind for kind in replaying.replay._kept if kind.chunks and kind.decodes]
    assert sorted((kind.tokens, kind.chunks, kind.sampled) for kind in kinds) == [(15, 1, 3), (16, 2, 2), (16, 2, 3)]
    for result, wanted in zip(results, logits(runner(folder, TensorParallelGroup()), False), strict=True):
        assert torch.equal(result, wanted)


def test_the_longest_unused_recording_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.replay.MOST_KEPT", 2)
    replay = Replay(KERNELS, WIDTH)

    def compute(inputs: StepInputs) -> torch.Tensor:
        return empty((len(inputs.token_ids),), torch.float32)

    for count in (1, 2, 1, 3):
        assert len(replay.run(compute, decodes([5] * count, 0))[0]) == count
    assert [kind.decodes for kind in replay._kept] == [1, 3]


def test_ranks_replay_their_sums_too(folder: Path) -> None:
    with threads(1):
        results = run_ranks(3, lambda group: steps(runner(folder, group), replayed=True))
        wanted = run_ranks(3, lambda group: steps(runner(folder, group), replayed=False))
    for mine, theirs in zip(results, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_step_that_does_more_than_call_kernels_is_refused() -> None:
    def compute(inputs: StepInputs) -> torch.Tensor:
        return inputs.token_ids * 2

    with pytest.raises(NotRecordable, match="mul"):
        Replay(KERNELS, WIDTH).run(compute, decodes([5], 0))


def test_many_tokens_are_not_kept(folder: Path) -> None:
    replay = Replay(KERNELS, WIDTH)
    result, status = replay.run(
        lambda inputs: empty((len(inputs.token_ids),), torch.float32), decodes([5] * (MOST_TOKENS + 1), 0)
    )
    assert len(result) == MOST_TOKENS + 1
    assert status == 0
    assert not replay._kept


def test_a_failure_ends_the_replay_and_is_told() -> None:
    """The kernel after the one that failed must not run."""
    recording = Recording()
    segment = torch.zeros(64 + (2 << 20), dtype=torch.uint8)
    tensor, copied, ids = torch.ones(4), torch.zeros(4), torch.zeros(1, dtype=torch.int64)
    address = segment.data_ptr()
    with recording.record():
        # Rank 0 of 2 waits for rank 1, whose counter stays where it is.
        call(KERNELS.all_reduce, 0, address, 64, address + 128, 1024, 0, 2, 100, 10**7, tensor.data_ptr(), 4)
        call(KERNELS.gather, tensor.data_ptr(), 16, ids.data_ptr(), 1, copied.data_ptr())
    arrays = recording.arrays()
    for count in (1, 2):
        assert call(KERNELS.replay, count, len(recording.calls), *map(ctypes.addressof, arrays)) == 2
    assert not copied.any()


def test_pool_memory_is_lent_again_once_no_view_of_it_is_left() -> None:
    pool = Pool(keeps=True)
    first = pool.allocate((4, 8), torch.float32)
    view = first[1:].view(torch.uint8)
    place = first.data_ptr()
    assert place % 64 == 0
    del first
    other = pool.allocate((2,), torch.bfloat16)
    assert other.data_ptr() != place
    del view
    again = pool.allocate((3, 2), torch.float32)
    assert again.data_ptr() == place
    assert pool.index(again) == 0


def test_passing_memory_grows_in_place_of_what_is_too_small() -> None:
    pool = Pool(keeps=False)
    addresses = [pool.allocate((size,), torch.float32).data_ptr() for size in range(1, 50)]
    assert len(pool._arrays) == 1
    assert len(set(addresses)) == 49  # calls noted before may refer to all of them
    pool.begin()
    assert not pool._outgrown
