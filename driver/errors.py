"""Telling a user's mistake from a fault of the program."""

from __future__ import annotations

_OURS = ("driver", "workers", "scheduler", "parallel", "attention")


def is_input_fault(error: BaseException | None) -> bool:
    """Whether an error means that what was asked for cannot be had as asked.

    By convention every such error is a subclass of ValueError of our own; a plain ValueError is a fault of ours.
    """
    return isinstance(error, ValueError) and type(error).__module__.split(".")[0] in _OURS
