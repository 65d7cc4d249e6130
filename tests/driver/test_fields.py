"""Every sampling field with values out of range, beside a request that must not notice."""

from __future__ import annotations

import math
from typing import Any

import pytest

from driver.handle import Client
from driver.llm import LLM
from driver.wire import Ask, ask_body
from scheduler.params import SamplingParams
from tests.driver.serving import PROMPT, Place, all_free, greedy_params, wait_until

WRONG: tuple[Any, ...] = (
    None,
    -1,
    -(2**63),
    2**64 - 1,
    1e308,
    -1e308,
    math.nan,
    math.inf,
    "x",
    "",
    True,
    [],
    [[]],
    [None],
)
WRONG += ({"a": 1}, {"-1": 1}, {"5": 1e9}, {"301": 1}, {"regex": "("}, {"json_schema": "{"}, b"x")


def test_the_models_own_answer_is_the_same_beside_every_wrong_field(llm: LLM, place: Place) -> None:
    """Straight to the port, since a handle would refuse most of them itself."""
    expected = llm.generate(PROMPT, greedy_params(40)).output_token_ids
    client: Client = place.client()
    stream = client.stream(PROMPT, greedy_params(40))
    raw = place.raw()
    number, refused = 0, 0
    for name in SamplingParams.__dataclass_fields__:
        for value in WRONG:
            number += 1
            raw.say("ask", number, {"prompt": PROMPT, "params": {"max_tokens": 1, name: value}})
            while True:
                kind, items = raw.hear()
                if kind == "refused":
                    assert items[:2] == [number, "invalid"], items
                    assert name in items[2] or "guide" in items[2] or "bias" in items[2], items
                    refused += 1
                    break
                if kind == "updates" and items[0][-1][3] is not None:
                    break
    assert refused > number / 2
    assert [token for piece in stream for token in piece.token_ids] == expected
    assert client.generate(PROMPT, greedy_params(40)).output_token_ids == expected
    assert wait_until(lambda: all_free(llm))


@pytest.mark.parametrize("field", ["logit_bias", "guide"])
def test_fields_without_a_value_are_not_sent(field: str) -> None:
    assert field not in ask_body(Ask("a", greedy_params()))["params"]
