"""Where there is no GPU, Triton's kernels run in its interpreter; it looks only when it is first imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
