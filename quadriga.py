"""Quadriga: tensor-parallel LLM inference on Ray.

from quadriga import LLM, SamplingParams
"""

from driver.llm import LLM, Stream
from driver.results import Completion, Increment
from scheduler.params import InvalidRequest, SamplingParams

__all__ = ["LLM", "Completion", "Increment", "InvalidRequest", "SamplingParams", "Stream"]

if __name__ == "__main__":
    from driver.cli import main

    raise SystemExit(main())
