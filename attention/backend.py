"""The one interface of attention backends, and the choice among them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from attention.metadata import AttentionMetadata

logger = logging.getLogger("quadriga.attention")

BACKENDS = ("auto", "cpu", "reference")


class BackendError(ValueError):
    """A backend that is unknown or cannot serve this device or model."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The rank's own heads: query head h reads key/value head h // (num_q_heads // num_kv_heads)."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads


class Backend(Protocol):
    """Writes the step's keys and values to the paged cache, then attends."""

    name: str

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
    ) -> None:
        """key, value: [tokens, num_kv_heads, head_dim], stored at `slots` [tokens] of the layer's cache."""

    def attend(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention of the step's tokens over their contexts.

        query: [tokens, num_q_heads, head_dim], prefill first. window: keys visible to each query, itself included;
        None means all before it. Returns the shape and dtype of `query`.
        """


def make_backend(name: str, layout: HeadLayout, scale: float, device: torch.device) -> Backend:
    """Builds the named backend; `auto` takes the best one for the device and logs what it took and why.

    Raises BackendError for a name that is not known, or a backend that cannot be had on this machine.
    """
    from attention.cpu import CpuBackend
    from attention.native import NativeError
    from attention.reference import ReferenceBackend

    if name not in BACKENDS:
        raise BackendError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}")
    if name == "reference":
        return ReferenceBackend(layout, scale)
    if device.type != "cpu":
        if name == "cpu":
            raise BackendError(f"attention backend cpu cannot serve {device.type}")
        logger.warning(
            "attention backend: reference (plain torch), because this version has no faster one for %s; "
            "it is exact but slow for long contexts",
            device.type,
        )
        return ReferenceBackend(layout, scale)
    try:
        backend = CpuBackend(layout, scale)
    except NativeError as error:
        if name == "cpu":
            raise BackendError(f"attention backend cpu cannot be had: {error}") from error
        logger.warning(
            "attention backend: reference (plain torch), because compiled kernels cannot be had (%s); "
            "attention is then several times slower, more so with long contexts",
            error,
        )
        return ReferenceBackend(layout, scale)
    if name == "auto":
        logger.info("attention backend: cpu (compiled for this machine), the fastest here")
    return backend
