"""Telling a user's mistake from a fault of the program, and a failure from what goes wrong in its wake."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("quadriga")

_OURS = ("driver", "workers", "scheduler", "parallel", "attention")


def is_input_fault(error: BaseException | None) -> bool:
    """Whether an error means that what was asked for cannot be had as asked.

    By convention every such error is a subclass of ValueError of our own; a plain ValueError is a fault of ours.
    """
    return isinstance(error, ValueError) and type(error).__module__.split(".")[0] in _OURS


def end_anyway(what: str, end: Callable[[], object]) -> None:
    """Calls `end`. What it raises goes to the log: the failure that led here is what is to be told, and what else is
    to be ended comes after."""
    try:
        end()
    except Exception as error:
        logger.error("%s has not ended in good order: %s", what, error, exc_info=error)
