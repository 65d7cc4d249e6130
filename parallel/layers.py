"""Parallel layers. Each knows its slice of the model and reads just that slice of the checkpoint.

Column-parallel layers cut the output features, row-parallel ones the input features, so that one all-reduce after
each row-parallel layer restores the full activations (Megatron-LM, arXiv 1909.08053). Cuts may be uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from parallel.formats import StoredFormat
from parallel.group import TensorParallelGroup
from parallel.loader import Checkpoint, CheckpointError
from parallel.quantization import Float8, NotFinite, Quantization
from parallel.stored import holds, quantization_of, read_stored

_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BLOCK_ROWS = 2048  # made numbers of at once, so that the fp32 copy stays small


def _empty(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Products(Protocol):
    """What multiplies with a weight, and the layout that it wants the weight in."""

    def pack(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight in that layout, and its scales where it has some."""

    def multiply(
        self, matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None = None, wide: bool = False
    ) -> torch.Tensor:
        """x [..., inputs] -> [..., outputs] in the dtype of x, or in fp32 when it is to be wide."""

    def lookup(self, matrix: Matrix, ids: torch.Tensor, first_id: int) -> torch.Tensor:
        """Rows ids - first_id, [n, inputs]; zeros for ids that are none of the matrix."""


class TorchProducts:
    """Plain torch, on the weight as it was read. Of integers, it multiplies with the numbers that they stand for."""

    def pack(self, matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
        return matrix.plain(), None

    def multiply(
        self, matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None = None, wide: bool = False
    ) -> torch.Tensor:
        y = F.linear(x, matrix.weight, bias)
        return y.float() if wide else y

    def lookup(self, matrix: Matrix, ids: torch.Tensor, first_id: int) -> torch.Tensor:
        local = ids - first_id
        elsewhere = (local < 0) | (local >= matrix.outputs)
        return F.embedding(local.masked_fill(elsewhere, 0), matrix.weight).masked_fill_(elsewhere.unsqueeze(-1), 0)


class Matrix(nn.Module):
    """A weight that is filled once and then only multiplied with.

    weight: without memory until filled; then [outputs, inputs] until other products adopt it, then in their layout.
    quantization: of weights that are kept as integers or fp8, from before they are read; then weight holds these,
        `scales` what belongs to them, and `begun` says how many inputs of the first group another rank holds.
    stored: how the checkpoint has quantised its linears, set before they are read.
    """

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.outputs, self.inputs, self.dtype, self.device = outputs, inputs, dtype, device
        self.weight = _empty(outputs, inputs, dtype=dtype, device=torch.device("meta"))
        self.products: Products = TorchProducts()
        self.quantization: Quantization | Float8 | None = None
        self.scales: nn.Parameter | None = None
        self.begun = 0
        self.stored: StoredFormat | None = None
        self._was_stored = False  # whether what has been read came quantised

    def quantize(self, quantization: Quantization | Float8) -> None:
        """What is read from now on becomes integers, or fp8."""
        self.quantization = quantization

    def fill(self, weight: torch.Tensor) -> None:
        """Copies plain numbers [outputs, inputs], or what spreads to that."""
        self.weight = _empty(self.outputs, self.inputs, dtype=self.dtype, device=self.device)
        self.weight.copy_(weight)

    def read(
        self, checkpoint: Checkpoint, name: str, shape: tuple[int, int], outputs: range, inputs: range, start: int = 0
    ) -> None:
        """Fills the rows from `start` on with a part of the tensor of that name and shape. Raises CheckpointError."""
        rows = slice(start, start + len(outputs))
        quantised = self.stored is not None and holds(checkpoint, self.stored, name)
        if start and quantised != self._was_stored:
            raise CheckpointError(
                f"tensor {name!r} in {checkpoint.folder} and those that are computed in one with it are not all "
                "quantised; use the unquantised checkpoint"
            )
        if quantised:
            self._was_stored = True
            self.quantize(quantization_of(self.stored, shape[1]))
            part = read_stored(checkpoint, self.stored, name, shape, outputs, inputs)
        elif self.quantization is None:
            part = (checkpoint.read(name, shape, {0: outputs, 1: inputs}), None)
            if part[0].dtype not in _PLAIN:
                raise CheckpointError(
                    f"tensor {name!r} in {checkpoint.folder} is {part[0].dtype}, and none of the quantised linears "
                    "that config.json tells of; use the unquantised checkpoint"
                )
        else:
            part = self._quantize(checkpoint, name, shape, outputs, inputs)
        self._take(checkpoint, *part, rows)
        if self.quantization and self.quantization.group:
            self.begun = inputs.start % self.quantization.group

    def _quantize(
        self, checkpoint: Checkpoint, name: str, shape: tuple[int, int], outputs: range, inputs: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        deciding = self.quantization.deciding(inputs, shape[1])
        try:
            codes, scales = self.quantization.quantize(checkpoint.read(name, shape, {0: outputs, 1: deciding}))
        except NotFinite as error:
            raise CheckpointError(f"tensor {name!r} in {checkpoint.folder} {error}; it cannot be quantised") from error
        first = inputs.start - deciding.start
        return codes[:, first : first + len(inputs)], scales

    def _take(self, checkpoint: Checkpoint, weight: torch.Tensor, scales: torch.Tensor | None, rows: slice) -> None:
        """Copies some rows of the weight, and their scales where it has some."""
        if self.weight.is_meta:
            dtype = self.quantization.dtype if self.quantization else self.dtype
            self.weight = _empty(self.outputs, self.inputs, dtype=dtype, device=self.device)
        checkpoint.copy(weight, self.weight[rows])
        if scales is None:
            return
        if self.scales is None:
            self.scales = _empty(self.outputs, *scales.shape[1:], dtype=scales.dtype, device=self.device)
        checkpoint.copy(scales, self.scales[rows])

    def plain(self) -> torch.Tensor:
        """The weight as numbers [outputs, inputs], of a matrix that no other products have adopted."""
        if self.quantization is None:
            return self.weight
        blocks = zip(self.weight.split(_BLOCK_ROWS), self.scales.split(_BLOCK_ROWS), strict=True)
        parts = [self.quantization.dequantize(*block, self.begun).to(self.dtype) for block in blocks]
        return torch.cat(parts)

    def adopt(self, products: Products) -> None:
        """Hands the weight over; there is never more than one copy of it once this returns."""
        weight, scales = products.pack(self)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = None if scales is None else nn.Parameter(scales, requires_grad=False)
        self.quantization = None if scales is None else self.quantization
        self.products = products

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, wide: bool = False) -> torch.Tensor:
        return self.products.multiply(self, x, bias, wide)

    def lookup(self, ids: torch.Tensor, first_id: int) -> torch.Tensor:
        return self.products.lookup(self, ids, first_id)


def _read_bias(
    checkpoint: Checkpoint, linear: str, size: int, outputs: range, bias: torch.Tensor | None, stored: bool
) -> None:
    """Fills a bias. stored: quantised linears without one may come with zeros, as AutoGPTQ saves them."""
    name = f"{linear}.bias"
    if bias is not None:
        checkpoint.copy(checkpoint.read(name, (size,), {0: outputs}), bias)
    elif stored and name in checkpoint and checkpoint.read(name, (size,), {0: outputs}).any():
        raise CheckpointError(f"tensor {name!r} in {checkpoint.folder} is not zero, but the model has no such bias")


class ColumnParallelLinear(nn.Module):
    """One or several linear layers over the same input, fused: [..., in_features] -> [..., sum of this rank's rows].

    parts: for each fused layer its checkpoint name, its full output size and this rank's range of outputs.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[tuple[str, int, range]],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = list(parts)
        self.sizes = [len(outputs) for _, _, outputs in self.parts]
        self.matrix = Matrix(sum(self.sizes), in_features, dtype, device)
        self.bias = _empty(sum(self.sizes), dtype=dtype, device=device) if bias else None

    def load(self, checkpoint: Checkpoint) -> None:
        start = 0
        for name, size, outputs in self.parts:
            stop = start + len(outputs)
            shape = (size, self.in_features)
            self.matrix.read(checkpoint, f"{name}.weight", shape, outputs, range(self.in_features), start)
            bias = None if self.bias is None else self.bias[start:stop]
            _read_bias(checkpoint, name, size, outputs, bias, self.matrix.stored is not None)
            start = stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix(x, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer over this rank's range of inputs, summed over ranks: [..., len(inputs)] -> [..., out]."""

    def __init__(
        self,
        name: str,
        in_features: int,
        inputs: range,
        out_features: int,
        bias: bool,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.name, self.in_features, self.inputs, self.out_features = name, in_features, inputs, out_features
        self.group = group
        self.matrix = Matrix(out_features, len(inputs), dtype, device)
        self.bias = _empty(out_features, dtype=dtype, device=device) if bias else None

    def load(self, checkpoint: Checkpoint) -> None:
        shape = (self.out_features, self.in_features)
        self.matrix.read(checkpoint, f"{self.name}.weight", shape, range(self.out_features), self.inputs)
        outputs, stored = range(self.out_features), self.matrix.stored is not None
        _read_bias(checkpoint, self.name, self.out_features, outputs, self.bias, stored)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.group.all_reduce(self.matrix(x))
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Token embedding of which each rank holds a range of ids: [n] int64 -> [n, hidden]."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        ids: range,
        hidden_size: int,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.name, self.vocab_size, self.ids, self.hidden_size = name, vocab_size, ids, hidden_size
        self.group = group
        self.matrix = Matrix(len(ids), hidden_size, dtype, device)

    def load(self, checkpoint: Checkpoint) -> None:
        shape = (self.vocab_size, self.hidden_size)
        self.matrix.read(checkpoint, f"{self.name}.weight", shape, self.ids, range(self.hidden_size))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self.matrix.lookup(token_ids, self.ids.start))


class ParallelHead(nn.Module):
    """The output head over this rank's range of vocabulary ids: [n, hidden] -> [n, len(ids)] fp32 logits.

    tied: the embedding whose weight it shares, or None when it has its own.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        ids: range,
        hidden_size: int,
        tied: VocabParallelEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.name, self.vocab_size, self.ids, self.hidden_size = name, vocab_size, ids, hidden_size
        self.tied = tied is not None
        self.matrix = tied.matrix if tied else Matrix(len(ids), hidden_size, dtype, device)

    def load(self, checkpoint: Checkpoint) -> None:
        if not self.tied:
            shape = (self.vocab_size, self.hidden_size)
            self.matrix.read(checkpoint, f"{self.name}.weight", shape, self.ids, range(self.hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.matrix(hidden, wide=True)
