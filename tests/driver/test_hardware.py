"""The table of accelerators and the roofline, against figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from driver.config import ConfigError
from driver.hardware import ACCELERATORS, RESERVED_BYTES, Accelerator, Efficiency, Roofline, find_accelerator
from scheduler.limits import Limits
from scheduler.step_time import StepWork
from workers.architecture import Architecture, read_architecture

MODELS = Path(__file__).parents[2] / "docs" / "models"
IDEAL = Efficiency(compute=1, memory=1, link=1, all_reduce_seconds=0, step_seconds=0)

# Per layer 64 x (2 x 16 x (4 + 2) + 3 x 128) = 36,864 weights, 73,728 in all; the head 64 x 256 = 16,384; a token's
# keys and values 2 x 2 layers x 2 heads x 16 x 2 bytes = 256 bytes; a pair 4 x 2 layers x 4 heads x 16 = 512 FLOP.
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def device(**figures: Any) -> Accelerator:
    return Accelerator(
        **{"name": "toy", "flops": 1e6, "memory_bandwidth": 1e6, "memory": 1e10, "link_bandwidth": 1e6, "source": ""}
        | figures
    )


@pytest.fixture
def arch(tmp_path: Path) -> Architecture:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return read_architecture(tmp_path)


# ---- the table


def test_every_line_names_its_source_and_is_plausible() -> None:
    assert len({accelerator.name for accelerator in ACCELERATORS}) == len(ACCELERATORS) >= 8
    for accelerator in ACCELERATORS:
        assert "datasheet" in accelerator.source or "data sheet" in accelerator.source
        # FLOP per byte of every such device lies in this range; a sparse figure or a wrong unit would not.
        assert 150 < accelerator.flops / accelerator.memory_bandwidth < 450
        assert 0.01 < accelerator.memory / accelerator.memory_bandwidth < 0.1
        assert accelerator.link_bandwidth < accelerator.memory_bandwidth / 5


def test_names_are_found_and_unknown_ones_refused_with_the_list() -> None:
    assert find_accelerator("H100").flops == 989.5e12
    with pytest.raises(ConfigError, match=r"hardware must be one of a100-80g, h100, .*mi300x, got 'h1000'"):
        find_accelerator("h1000")


def test_a_mesh_gives_a_group_only_the_links_between_its_members() -> None:
    assert [device(mesh=7, link_bandwidth=7.0).group_bandwidth(size) for size in (2, 8, 16)] == [1, 7, 7]
    assert device(link_bandwidth=7.0).group_bandwidth(2) == 7


# ---- the step time


@pytest.mark.parametrize(
    ("figures", "work", "sampled", "seconds"),
    [
        # Bound by memory: 147,456 bytes of layers, 32,768 of the head, 100 x 256 of the cache.
        ({"flops": 1e30}, StepWork(1, 1, 0, 100), 1, 0.147456 + 0.032768 + 0.0256),
        # A chunk that ends inside its prompt leaves the head alone; 1280 pairs read 10 tokens' keys and values.
        ({"flops": 1e30}, StepWork(40, 1, 1280, 0), 0, 0.147456 + 0.00256),
        # Bound by computing: 2 FLOP a weight and token, 512 a pair.
        ({"memory_bandwidth": 1e30}, StepWork(10, 1, 55, 0), 1, 1.47456 + 0.032768 + 0.02816),
        ({"memory_bandwidth": 1e30}, StepWork(3, 3, 0, 60), 3, 0.442368 + 0.098304 + 0.03072),
        # Each part takes the longer of both: computing with one token's weights is eight times as fast as reading.
        ({"flops": 8e6}, StepWork(1, 1, 0, 0), 1, 0.147456 + 0.032768),
    ],
)
def test_one_device(arch: Architecture, figures: dict, work: StepWork, sampled: int, seconds: float) -> None:
    roofline = Roofline(device(**figures), arch, 1, "bfloat16", IDEAL)
    assert roofline.step_seconds(work, sampled) == pytest.approx(seconds)


def test_two_devices_halve_the_work_and_exchange_their_halves(arch: Architecture) -> None:
    efficiency = Efficiency(compute=1, memory=1, link=0.5, all_reduce_seconds=0.001, step_seconds=0.01)
    roofline = Roofline(device(flops=1e30), arch, 2, "bfloat16", efficiency)
    # Five all-reduces (one for the embedding) of 10 x 64 x 2 bytes, all of which each of two devices sends.
    exchanged = 5 * (0.001 + 1280 / 0.5e6)
    assert roofline.step_seconds(StepWork(10, 1, 0, 0), 1) == pytest.approx(0.01 + exchanged + 0.180224 / 2)


def test_the_largest_shard_sets_the_pace(arch: Architecture) -> None:
    """Over 3 ranks: query heads 1, 1, 2 with one KV head each, MLP columns 44, 44, 40, vocabulary 88, 88, 80."""
    roofline = Roofline(device(), arch, 3, "bfloat16", IDEAL)
    assert roofline.layer_weights == 2 * 64 * (2 * 16 * 3 + 3 * 44)
    assert roofline.head_weights == 64 * 88
    assert roofline.kv_bytes == 128
    assert roofline.weight_bytes == 2 * (roofline.layer_weights + 2 * 64 * 88)


def test_efficiencies_and_dtype_scale_what_they_should(arch: Architecture) -> None:
    work = StepWork(10, 1, 55, 0)
    computing, moving = device(memory_bandwidth=1e30), device(flops=1e30)
    half = Efficiency(compute=0.5, memory=0.25, link=1, all_reduce_seconds=0, step_seconds=0)
    for hardware, dtype, efficiency, factor in (
        (computing, "bfloat16", half, 2),
        (moving, "bfloat16", half, 4),
        (computing, "float32", IDEAL, 2),  # TF32
        (moving, "float32", IDEAL, 2),  # twice the bytes
        (computing, "float16", IDEAL, 1),
    ):
        plain = Roofline(hardware, arch, 1, "bfloat16", IDEAL).step_seconds(work, 1)
        assert Roofline(hardware, arch, 1, dtype, efficiency).step_seconds(work, 1) == pytest.approx(factor * plain)


@pytest.mark.parametrize("bad", [{"compute": 0}, {"memory": 1.5}, {"link": float("nan")}, {"step_seconds": -1}])
def test_impossible_efficiencies_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))}.*got"):
        Efficiency(**bad)


# ---- memory


def test_blocks_fill_what_weights_and_activations_leave(arch: Architecture) -> None:
    limits = Limits(512, 256)
    # 2 x (73,728 + 2 x 16,384) of weights; 512 x (4 x 64 + 3 x 128) x 2 of activations and 8 x 256 x 256 of logits.
    needed = 212_992 + 655_360 + 524_288 + RESERVED_BYTES
    roofline = Roofline(device(memory=2 * (needed + 10.5 * 16 * 256)), arch, 1, "bfloat16")
    assert roofline.num_blocks(limits, 16, 1024, 0.5) == 10
    assert Roofline(device(memory=1e12), arch, 1, "bfloat16").num_blocks(limits, 16, 1000, 0.5) == 256 * 63


def test_weights_that_do_not_fit_are_refused_with_the_figures() -> None:
    roofline = Roofline(find_accelerator("h100"), read_architecture(MODELS / "llama-3.1-70b"), 1, "bfloat16")
    with pytest.raises(ConfigError, match=r"h100 has 80 GB, of which 0.9 is 72.0 GB; with tp 1 .*141.1 GB.*larger tp"):
        roofline.num_blocks(Limits(2048, 256), 16, 8192, 0.9)


@pytest.mark.parametrize(("name", "billions"), [("llama-3.1-70b", 70.55), ("yi-34b-200k", 34.39)])
def test_the_committed_shapes_have_their_models_sizes(name: str, billions: float) -> None:
    roofline = Roofline(ACCELERATORS[0], read_architecture(MODELS / name), 1, "bfloat16")
    assert roofline.weight_bytes / 2e9 == pytest.approx(billions, rel=1e-3)
