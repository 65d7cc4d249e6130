"""Parallel layers over any number of ranks and uneven cuts compute what plain torch computes on the whole weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from parallel.group import TensorParallelGroup
from parallel.layers import ColumnParallelLinear, ParallelHead, RowParallelLinear, VocabParallelEmbedding
from parallel.loader import SINGLE_FILE, Checkpoint, CheckpointError
from parallel.split import deal_lanes
from tests.ranks import run_ranks

FP32, CPU = torch.float32, torch.device("cpu")
IN, MIDDLE, SMALL, VOCAB = 13, 22, 7, 301
SIZES = [1, 2, 3, 4]
# Borders of uneven cuts: of MIDDLE and SMALL for each number of ranks.
MIDDLE_BORDERS = {1: [0, 22], 2: [0, 15, 22], 3: [0, 9, 10, 22], 4: [0, 1, 8, 20, 22]}
SMALL_BORDERS = {1: [0, 7], 2: [0, 2, 7], 3: [0, 4, 6, 7], 4: [0, 1, 2, 6, 7]}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "wide.weight": (MIDDLE, IN),
        "wide.bias": (MIDDLE,),
        "narrow.weight": (SMALL, IN),
        "narrow.bias": (SMALL,),
        "down.weight": (IN, MIDDLE),
        "down.bias": (IN,),
        "embed.weight": (VOCAB, IN),
        "head.weight": (VOCAB, IN),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folder(weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_file(weights, folder / SINGLE_FILE)
    return folder


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, IN, generator=torch.Generator().manual_seed(4))


def cut(borders: dict[int, list[int]], group: TensorParallelGroup) -> range:
    start, stop = borders[group.size][group.rank : group.rank + 2]
    return range(start, stop)


def load(layer: torch.nn.Module, folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        layer.load(checkpoint)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_fused_column_layers_give_each_rank_its_outputs_part_by_part(
    size: int, bias: bool, folder: Path, weights: dict[str, torch.Tensor], x: torch.Tensor
) -> None:
    def run(group: TensorParallelGroup) -> tuple[torch.Tensor, ...]:
        parts = [("wide", MIDDLE, cut(MIDDLE_BORDERS, group)), ("narrow", SMALL, cut(SMALL_BORDERS, group))]
        layer = ColumnParallelLinear(IN, parts, bias, FP32, CPU)
        load(layer, folder)
        return layer(x).split(layer.sizes, dim=-1)

    results = run_ranks(size, run)
    for part, name in enumerate(("wide", "narrow")):
        expected = F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"] if bias else None)
        torch.testing.assert_close(torch.cat([r[part] for r in results], dim=-1), expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_layer_gives_every_rank_the_whole_output_with_one_bias(
    size: int, bias: bool, folder: Path, weights: dict[str, torch.Tensor]
) -> None:
    x = torch.randn(2, 3, MIDDLE, generator=torch.Generator().manual_seed(5))

    def run(group: TensorParallelGroup) -> torch.Tensor:
        inputs = cut(MIDDLE_BORDERS, group)
        layer = RowParallelLinear("down", MIDDLE, inputs, IN, bias, group, FP32, CPU)
        load(layer, folder)
        return layer(x[..., inputs.start : inputs.stop])

    expected = F.linear(x, weights["down.weight"], weights["down.bias"] if bias else None)
    for result in run_ranks(size, run):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("size", SIZES)
def test_a_column_layer_feeds_a_row_layer_without_communication_between(
    size: int, folder: Path, weights: dict[str, torch.Tensor], x: torch.Tensor
) -> None:
    def run(group: TensorParallelGroup) -> torch.Tensor:
        middle = cut(MIDDLE_BORDERS, group)
        up = ColumnParallelLinear(IN, [("wide", MIDDLE, middle)], True, FP32, CPU)
        down = RowParallelLinear("down", MIDDLE, middle, IN, True, group, FP32, CPU)
        load(up, folder)
        load(down, folder)
        return down(F.silu(up(x)))

    hidden = F.silu(F.linear(x, weights["wide.weight"], weights["wide.bias"]))
    for result in run_ranks(size, run):
        torch.testing.assert_close(result, F.linear(hidden, weights["down.weight"], weights["down.bias"]))


@pytest.mark.parametrize("size", SIZES)
def test_the_embedding_of_an_odd_vocabulary_is_exact_on_every_rank(
    size: int, folder: Path, weights: dict[str, torch.Tensor]
) -> None:
    borders = [ids.start for ids in deal_lanes(VOCAB, size)]
    token_ids = torch.tensor([0, VOCAB - 1, *borders, *(b - 1 for b in borders if b), 17, 17])

    def run(group: TensorParallelGroup) -> torch.Tensor:
        ids = deal_lanes(VOCAB, group.size)[group.rank]
        layer = VocabParallelEmbedding("embed", VOCAB, ids, IN, group, FP32, CPU)
        load(layer, folder)
        return layer(token_ids)

    for result in run_ranks(size, run):
        assert torch.equal(result, weights["embed.weight"][token_ids])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_heads_of_an_odd_vocabulary_make_up_the_whole_logits(
    size: int, tied: bool, folder: Path, weights: dict[str, torch.Tensor], x: torch.Tensor
) -> None:
    def run(group: TensorParallelGroup) -> torch.Tensor:
        ids = deal_lanes(VOCAB, group.size)[group.rank]
        embed = VocabParallelEmbedding("embed", VOCAB, ids, IN, group, FP32, CPU)
        head = ParallelHead("head", VOCAB, ids, IN, embed if tied else None, FP32, CPU)
        load(embed, folder)
        load(head, folder)
        return head(x)

    logits = torch.cat(run_ranks(size, run), dim=-1)
    assert logits.shape == (len(x), VOCAB)
    torch.testing.assert_close(logits, F.linear(x, weights["embed.weight" if tied else "head.weight"]))


def test_logits_are_fp32_whatever_the_weights_are(folder: Path, x: torch.Tensor) -> None:
    head = ParallelHead("head", VOCAB, range(VOCAB), IN, None, torch.bfloat16, CPU)
    load(head, folder)
    assert head.matrix.weight.dtype == torch.bfloat16
    assert head(x.bfloat16()).dtype == torch.float32


def test_a_tied_head_reads_no_tensor_of_its_own(tmp_path: Path) -> None:
    save_file({"embed.weight": torch.randn(VOCAB, IN)}, tmp_path / SINGLE_FILE)
    embed = VocabParallelEmbedding("embed", VOCAB, range(VOCAB), IN, TensorParallelGroup(), FP32, CPU)
    load(ParallelHead("head", VOCAB, range(VOCAB), IN, embed, FP32, CPU), tmp_path)
    with pytest.raises(CheckpointError, match=r"no tensor 'head\.weight'"):
        load(ParallelHead("head", VOCAB, range(VOCAB), IN, None, FP32, CPU), tmp_path)


def test_a_layer_of_another_size_than_the_checkpoint_is_refused(folder: Path) -> None:
    layer = ColumnParallelLinear(IN, [("wide", MIDDLE + 1, range(4))], False, FP32, CPU)
    with pytest.raises(CheckpointError, match=r"'wide\.weight' .*\(22, 13\), the model needs \(23, 13\)"):
        load(layer, folder)
