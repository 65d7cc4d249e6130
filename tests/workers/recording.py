"""A CPU stand-in for CUDA graphs that keeps what a graph keeps: operations and tensors, no Python.

Captured are the tensor operations that a function runs, with the very tensors and numbers they ran with. A replay runs
them again on these tensors and fills the same outputs, so a number that Python read during the capture stays as it was,
and anything that Python would have to decide anew is missed, as on the device. What would make the host wait for the
device, or copy from its memory, is refused while capturing, as CUDA refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS_OR_COPIES = {
    "aten._local_scalar_dense",
    "aten.is_nonzero",
    "aten.nonzero",
    "aten.masked_select",
    "aten.equal",
    "aten._unique2",
    "aten.lift_fresh",
}


class WaitsWhileCapturing(RuntimeError):
    """An operation that a CUDA graph cannot hold."""


class RecordedGraph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = str(func).rsplit(".", 1)[0]
        masks = name in ("aten.index", "aten.index_put_") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in args[1]
        )
        if name in WAITS_OR_COPIES or masks:
            raise WaitsWhileCapturing(f"{name} makes the host wait for the device, or the device for the host")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, before in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def names(self) -> list[str]:
        return [str(func).rsplit(".", 1)[0] for func, *_ in self.calls]


class Recorder:
    """graphs: what was captured, in order."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        run()
        graph = RecordedGraph()
        with graph:
            run()
        self.graphs.append(graph)
        return graph
