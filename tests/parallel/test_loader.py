"""Reading checkpoints slice by slice, and what is said about damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from parallel.loader import INDEX_FILE, SINGLE_FILE, Checkpoint, CheckpointError

TENSORS = {
    "a.weight": torch.arange(77, dtype=torch.float32).view(11, 7),
    "a.bias": torch.randn(11, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "b.weight": torch.arange(24, dtype=torch.float16).view(2, 3, 4),
}
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a.weight": TENSORS["a.weight"]}, tmp_path / FILES[0])
    save_file({name: TENSORS[name] for name in ("a.bias", "b.weight")}, tmp_path / FILES[1])
    write_index(tmp_path, {"a.weight": FILES[0], "a.bias": FILES[1], "b.weight": FILES[1]})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_whole_tensors_keep_values_and_dtype(layout: str, request: pytest.FixtureRequest) -> None:
    with Checkpoint(request.getfixturevalue(layout)) as checkpoint:
        for name, expected in TENSORS.items():
            assert name in checkpoint
            tensor = checkpoint.read(name, tuple(expected.shape))
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)
        checkpoint.finish()


@pytest.mark.parametrize("layout", ["single", "sharded"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_a_slice_equals_the_same_slice_of_the_whole(
    layout: str, request: pytest.FixtureRequest, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(TENSORS)))
    whole = TENSORS[name]
    cut, index = {}, [slice(None)] * whole.dim()
    for dim in data.draw(st.sets(st.integers(0, whole.dim() - 1))):
        start = data.draw(st.integers(0, whole.shape[dim] - 1))
        stop = data.draw(st.integers(start + 1, whole.shape[dim]))
        cut[dim], index[dim] = range(start, stop), slice(start, stop)
    with Checkpoint(request.getfixturevalue(layout)) as checkpoint:
        assert torch.equal(checkpoint.read(name, tuple(whole.shape), cut), whole[tuple(index)])


def test_an_empty_range_reads_nothing(single: Path) -> None:
    with Checkpoint(single) as checkpoint:
        assert checkpoint.read("a.weight", (11, 7), {0: range(4, 4)}).shape == (0, 7)


def test_what_was_read_outlives_the_checkpoint(single: Path) -> None:
    with Checkpoint(single) as checkpoint:
        tensor = checkpoint.read("a.weight", (11, 7), {0: range(2, 5)})
    assert torch.equal(tensor, TENSORS["a.weight"][2:5])


def test_the_single_file_wins_over_other_copies_of_the_weights(single: Path) -> None:
    save_file({"a.weight": torch.zeros(11, 7), "stray": torch.zeros(1)}, single / "consolidated.safetensors")
    with Checkpoint(single) as checkpoint:
        assert "stray" not in checkpoint
        assert torch.equal(checkpoint.read("a.weight", (11, 7)), TENSORS["a.weight"])


def test_shards_without_an_index_are_all_opened(sharded: Path) -> None:
    (sharded / INDEX_FILE).unlink()
    with Checkpoint(sharded) as checkpoint:
        assert all(name in checkpoint for name in TENSORS)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no weights: expected {SINGLE_FILE}"):
        Checkpoint(tmp_path)


def test_an_index_of_nothing_counts_as_no_weights(tmp_path: Path) -> None:
    write_index(tmp_path, {})
    with pytest.raises(CheckpointError, match="has no weights"):
        Checkpoint(tmp_path)


def test_a_missing_tensor_is_named_with_what_there_is(single: Path) -> None:
    with Checkpoint(single) as checkpoint, pytest.raises(CheckpointError, match=r"no tensor 'c\.weight'.*a\.bias"):
        checkpoint.read("c.weight", (1,))


def test_a_wrong_shape_names_tensor_file_and_both_shapes(single: Path) -> None:
    message = rf"'a\.weight' in .*{SINGLE_FILE} has shape \(11, 7\), the model needs \(7, 11\)"
    with Checkpoint(single) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.read("a.weight", (7, 11))


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(single: Path, keep: int) -> None:
    path = single / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=f"cannot read {path}: .*damaged or incomplete"):
        Checkpoint(single)


def test_a_file_of_garbage_is_named(sharded: Path) -> None:
    (sharded / FILES[1]).write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(CheckpointError, match=f"cannot read {sharded / FILES[1]}"):
        Checkpoint(sharded)


def test_an_index_that_names_a_missing_file_says_which(sharded: Path) -> None:
    (sharded / FILES[0]).unlink()
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} names {FILES[0]}, which is not in"):
        Checkpoint(sharded)


def test_an_index_must_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "elsewhere.safetensors")
    write_index(folder, dict.fromkeys(TENSORS, "../elsewhere.safetensors"))
    with pytest.raises(CheckpointError, match=r"elsewhere\.safetensors"):
        Checkpoint(folder)


def test_files_that_are_links_into_another_folder_are_fine(tmp_path: Path) -> None:
    """That is how the Hugging Face cache keeps them."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "blob")
    (folder / FILES[0]).symlink_to(tmp_path / "blob")
    write_index(folder, dict.fromkeys(TENSORS, FILES[0]))
    with Checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint.read("a.weight", (11, 7)), TENSORS["a.weight"])


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": 1}}', b'"x"', b"\xff\xfe"]
)
def test_a_broken_index_is_named(sharded: Path, content: bytes) -> None:
    (sharded / INDEX_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"cannot read {sharded / INDEX_FILE}"):
        Checkpoint(sharded)


def test_tensors_left_unread_are_listed(sharded: Path) -> None:
    with Checkpoint(sharded) as checkpoint:
        checkpoint.read("a.bias", (11,))
        with pytest.raises(CheckpointError, match=r"does not use: a\.weight, b\.weight$"):
            checkpoint.finish()


def test_a_long_list_of_unread_tensors_is_shortened(tmp_path: Path) -> None:
    save_file({f"t{i:02}": torch.zeros(1) for i in range(20)}, tmp_path / SINGLE_FILE)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=r"t11 and 8 more$"):
        checkpoint.finish()


def test_ignorable_tensors_may_be_left(sharded: Path) -> None:
    with Checkpoint(sharded) as checkpoint:
        checkpoint.read("a.bias", (11,))
        checkpoint.finish(ignorable=("a.weight", "weight"))
        with pytest.raises(CheckpointError, match=r"does not use: b\.weight$"):
            checkpoint.finish(ignorable=("a.weight",))
