"""Reading a checkpoint's safetensors files slice by slice: a rank never reads what it does not hold."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from parallel.upload import Upload

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class CheckpointError(ValueError):
    """Weights that are missing, damaged or do not fit the model; the message names file and tensor."""


class Checkpoint:
    """The tensors of a model folder, single-file or sharded. A context manager; files are memory-mapped.

    Raises CheckpointError for a folder without safetensors, an index that names a missing file, or a damaged file.
    """

    def __init__(self, folder: Path, upload: Upload | None = None) -> None:
        """upload: what brings tensors to a device; None copies them."""
        self.folder = folder
        self._upload = upload
        self._stack = ExitStack()
        self._files = {}
        self._unread: set[str] = set()
        try:
            self._open_all()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: tuple[int, ...], cut: dict[int, range] | None = None) -> torch.Tensor:
        """One tensor, cut along the given dimensions, in the dtype of the file, and mapped: only what is used is read.

        shape: what the whole tensor must be. Raises CheckpointError when it is missing or has another shape.
        """
        if name not in self._files:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}; it holds {_some(self._files)}")
        file, path = self._files[name]
        try:
            tensor_slice = file.get_slice(name)
            found = tuple(tensor_slice.get_shape())
            if found != shape:
                raise CheckpointError(f"tensor {name!r} in {path} has shape {found}, the model needs {shape}")
            cuts = tuple(
                slice(None) if (r := (cut or {}).get(dim)) is None else slice(r.start, r.stop)
                for dim in range(len(shape))
            )
            tensor = tensor_slice[cuts]
        except SafetensorError as error:
            raise CheckpointError(f"cannot read tensor {name!r} from {path}: {error}") from error
        self._unread.discard(name)
        return tensor

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Fills `target` with what was read, maybe on another device, where it may arrive later; see finish."""
        if self._upload is None or target.device.type == "cpu":
            target.copy_(source)
        else:
            self._upload.copy(source, target)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name][0].get_slice(name).get_shape())

    def read_scalar(self, name: str) -> float:
        """A tensor of one number, of any dtype and number of dimensions. Raises CheckpointError for any other."""
        file, path = self._files[name]
        shape = tuple(file.get_slice(name).get_shape())
        if math.prod(shape) != 1:
            raise CheckpointError(f"tensor {name!r} in {path} has shape {shape}, a single number is needed")
        self._unread.discard(name)
        return float(file.get_tensor(name))

    def skip(self, name: str) -> None:
        """Counts a tensor as read, where there is one."""
        self._unread.discard(name)

    def finish(self, ignorable: Iterable[str] = ()) -> None:
        """Waits for what is on its way to a device. Raises CheckpointError when tensors were left unread, other than
        those whose name ends with an ignorable."""
        if self._upload is not None:
            self._upload.finish()
        left = sorted(name for name in self._unread if not name.endswith(tuple(ignorable)))
        if left:
            raise CheckpointError(f"{self.folder} holds tensors that the model does not use: {_some(left)}")

    def _open_all(self) -> None:
        for path in self._paths():
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                names = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"cannot read {path}: {error}; the file is damaged or incomplete") from error
            for name in names:
                self._files[name] = (file, path)
        self._unread = set(self._files)

    def _paths(self) -> list[Path]:
        index = self.folder / INDEX_FILE
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
                names = sorted(set(weight_map.values()))
                paths = [self.folder / name for name in names]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"cannot read {index}: {error!r}") from error
            outside = [name for name in names if Path(name).name != name]
            if outside:
                raise CheckpointError(f"{index} names {outside[0]}, which lies outside {self.folder}")
        else:
            paths = sorted(self.folder.glob("*.safetensors"))
            if (self.folder / SINGLE_FILE) in paths:
                paths = [self.folder / SINGLE_FILE]
        if not paths:
            raise CheckpointError(f"{self.folder} has no weights: expected {SINGLE_FILE} or {INDEX_FILE}")
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{index} names {path.name}, which is not in {self.folder}")
        return paths


def _some(names: Iterable[str], limit: int = 12) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
