"""Quadriga: tensor-parallel LLM inference on Ray.

from quadriga import LLM, Client, SamplingParams
"""

from driver.handle import Client
from driver.llm import LLM
from driver.results import Completion, Increment, Stream, TokenLogprobs
from driver.wire import Overloaded, RequestFailed, ServiceUnavailable
from scheduler.params import InvalidRequest, SamplingParams

__all__ = [
    "LLM",
    "Client",
    "Completion",
    "Increment",
    "InvalidRequest",
    "Overloaded",
    "RequestFailed",
    "SamplingParams",
    "ServiceUnavailable",
    "Stream",
    "TokenLogprobs",
]

if __name__ == "__main__":
    from driver.cli import main

    raise SystemExit(main())
