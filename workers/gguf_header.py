"""A look at a GGUF file's header before libraries get to see it: they trust its counts and sizes.

    magic, version, how many tensors and fields | fields: key, type, value | tensors: name, shape, type, offset | data

Layout: ggml's GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_FEWEST_BITS = 1  # of a weight, in the densest format


class HeaderError(ValueError):
    """A header that contradicts itself or the file that it stands in."""


@dataclass
class GgufHeader:
    """numbers: scalar fields. lengths: items of fields that are arrays. tensors: name to shape, innermost first."""

    numbers: dict[str, int | float] = field(default_factory=dict)
    strings: dict[str, bytes] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def check_sizes(self) -> None:
        """Raises HeaderError where a size that something is allocated by is not that of the tensors."""
        layers = {name.split(".")[1] for name in self.tensors if name.startswith("blk.")}
        width, rows = self._matrix("token_embd.weight")
        self._check("block_count", len(layers))
        self._check("embedding_length", width)
        self._check("feed_forward_length", self._matrix("blk.0.ffn_gate.weight")[1])
        for name, tensor in (("attention.head_count", "attn_q"), ("attention.head_count_kv", "attn_k")):
            count, features = self._number(name), self._matrix(f"blk.0.{tensor}.weight")[1]
            if count is not None and (count < 1 or features % count):
                raise HeaderError(f"{name} is {count}, which does not divide the {features} rows of {tensor}")
        tokens = self.lengths.get("tokenizer.ggml.tokens", rows)
        if tokens > rows:
            raise HeaderError(f"the tokenizer has {tokens} tokens, and the embedding only {rows} rows")

    def _number(self, name: str) -> int | float | None:
        architecture = self.strings.get("general.architecture", b"").decode("utf-8", "replace")
        return self.numbers.get(f"{architecture}.{name}")

    def _check(self, name: str, found: int) -> None:
        if self._number(name) != found:
            raise HeaderError(f"{name} is {self._number(name)}, while the tensors say {found}")

    def _matrix(self, name: str) -> tuple[int, int]:
        shape = self.tensors.get(name, ())
        if len(shape) != 2:
            raise HeaderError(f"it has no matrix {name}")
        return shape[0], shape[1]


def read_header(path: Path) -> GgufHeader:
    """Raises HeaderError for a file that is no GGUF, or whose header says more than there is; OSError as open does."""
    with open(path, "rb") as file:
        return _Reader(file, path.stat().st_size).header()


class _Reader:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def header(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise HeaderError("it does not begin with GGUF")
        if (version := self._one("I")) not in (2, 3):
            raise HeaderError(f"it is of version {version}; 2 and 3 are known")
        num_tensors, num_fields = self._one("Q"), self._one("Q")
        header = GgufHeader()
        for _ in range(num_fields):  # each takes bytes, so that a count too high meets the end of the file
            self._field(header)
        for _ in range(num_tensors):
            self._tensor(header)
        return header

    def _field(self, header: GgufHeader) -> None:
        key, kind = self._string().decode("utf-8", "replace"), self._one("I")
        if kind == _STRING:
            header.strings[key] = self._string()
        elif kind == _ARRAY:
            header.lengths[key] = self._skip_array(key)
        else:
            header.numbers[key] = self._one(self._format(key, kind))

    def _skip_array(self, key: str) -> int:
        kind, length = self._one("I"), self._one("Q")
        if kind == _STRING:
            for _ in range(length):
                self._skip(self._one("Q"))
        else:
            self._skip(length * struct.calcsize(self._format(key, kind)))
        return length

    def _tensor(self, header: GgufHeader) -> None:
        name, dimensions = self._string().decode("utf-8", "replace"), self._one("I")
        if dimensions > _MOST_DIMENSIONS:
            raise HeaderError(f"tensor {name!r} has {dimensions} dimensions; there can be {_MOST_DIMENSIONS}")
        shape = tuple(self._one("Q") for _ in range(dimensions))
        self._one("I")
        offset = self._one("Q")
        if offset + math.prod(shape) * _FEWEST_BITS // 8 > self._size:
            raise HeaderError(f"tensor {name!r} of shape {shape} does not fit in the file's {self._size} bytes")
        header.tensors[name] = shape

    # ---- bytes

    def _string(self) -> bytes:
        return self._bytes(self._one("Q"))

    def _one(self, code: str) -> int | float:
        return struct.unpack("<" + code, self._bytes(struct.calcsize(code)))[0]

    def _bytes(self, count: int) -> bytes:
        self._check_left(count)
        return self._file.read(count)

    def _skip(self, count: int) -> None:
        self._check_left(count)
        self._file.seek(count, 1)

    def _check_left(self, count: int) -> None:
        left = self._size - self._file.tell()
        if count > left:
            raise HeaderError(f"it ends too early: {count} more bytes should come, {left} do")

    def _format(self, key: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise HeaderError(f"field {key!r} is of unknown type {kind}")
        return _SCALARS[kind]
