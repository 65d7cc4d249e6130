"""The order of tests; and where there is no GPU, Triton's kernels run in its interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():  # Triton looks when it is first imported, and never again
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test comes first, so that it does not go on alone when all others are done."""
    items.sort(key=lambda item: item.path.name != "test_chaos.py")
