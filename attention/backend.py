"""The one interface of attention backends, and the choice among them."""

from __future__ import annotations

import importlib
import logging
from typing import Protocol

import torch

from attention.cache import Scales
from attention.capabilities import Capabilities, Demand, HeadLayout
from attention.metadata import AttentionMetadata

logger = logging.getLogger("quadriga.attention")

__all__ = ("BACKENDS", "CALLS", "Backend", "BackendError", "HeadLayout", "make_backend")

# Where each is defined. Imported when asked for, since some need packages that may be missing.
_PLACES = {
    "cpu": ("attention.cpu", "CpuBackend"),
    "flash_attn": ("attention.flash", "FlashAttnBackend"),
    "torch_flash": ("attention.torch_flash", "TorchFlashBackend"),
    "reference": ("attention.reference", "ReferenceBackend"),
}
# What `auto` tries, best first.
_PREFERENCE = {"cuda": ("flash_attn", "torch_flash", "reference"), "cpu": ("cpu", "reference")}
BACKENDS = ("auto", *_PLACES)
CALLS = ("auto", "one", "two")


class BackendError(ValueError):
    """A backend that is unknown, missing, or cannot serve this device or model; the message says which and why."""


class Backend(Protocol):
    """Writes the step's keys and values to the paged cache, then attends.

    What a backend derives from a metadata object it may keep while the same object comes in: whoever captures a
    graph captures it with an object of its own, so that the derivation is captured too.
    """

    name: str
    capabilities: Capabilities

    @classmethod
    def on(cls, device: torch.device) -> Capabilities:
        """What it can do on this device. Raises BackendError where it cannot be used at all."""

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        scales: Scales | None = None,
    ) -> None:
        """key, value: [tokens, num_kv_heads, head_dim], stored at `slots` [tokens] of the layer's cache.

        scales: the layer's, for a cache of one of the capabilities' cache_dtypes; also in `attend`.
        """

    def attend(
        self,
        query: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        window: int | None,
        scales: Scales | None = None,
    ) -> torch.Tensor:
        """Causal attention of the step's tokens over their contexts.

        query: [tokens, num_q_heads, head_dim], prefill first. window: keys visible to each query, itself included;
        None means all before it. Returns the shape and dtype of `query`.
        """


def make_backend(
    name: str,
    layout: HeadLayout,
    scale: float,
    device: torch.device,
    demand: Demand | None = None,
    calls: str = "auto",
) -> Backend:
    """Builds the named backend; `auto` takes the best one that serves device and model, and logs which and why.

    calls: "one" serves prefill and decode rows together, "two" each on its own, "auto" as the backend does best.

    Raises BackendError for a name that is not known, and for a backend that cannot serve what is asked.
    """
    demand = demand or Demand()
    if name not in BACKENDS:
        raise BackendError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}")
    if name != "auto":
        return _build(name, layout, scale, device, demand, calls)
    passed_over = []
    for candidate in _PREFERENCE.get(device.type, ("reference",)):
        try:
            backend = _build(candidate, layout, scale, device, demand, calls)
        except BackendError as error:
            passed_over.append(str(error))
            continue
        why = "; ".join(passed_over) or f"the first choice on {device.type}"
        if backend.capabilities.note:
            why += f". Note: {backend.capabilities.note}"
        if candidate == "reference":
            logger.warning("attention backend: reference (plain torch, exact but slow for long contexts): %s", why)
        else:
            logger.info("attention backend: %s: %s", candidate, why)
        return backend
    raise BackendError(f"no attention backend serves this model on {device.type}: {'; '.join(passed_over)}")


def _build(name: str, layout: HeadLayout, scale: float, device: torch.device, demand: Demand, calls: str) -> Backend:
    module, attribute = _PLACES[name]
    kind = getattr(importlib.import_module(module), attribute)
    capabilities = kind.on(device)
    refusal = capabilities.refusal(layout, demand)
    if refusal is None and calls == "one" and not capabilities.one_call:
        refusal = "it attends to prefill and decode rows in two calls, one call was asked for"
    if refusal is not None:
        raise BackendError(f"attention backend {name}: {refusal}")
    return kind(layout, scale, calls) if capabilities.one_call else kind(layout, scale)
