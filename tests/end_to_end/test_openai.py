"""The OpenAI interface of `quadriga serve`, by the openai SDK and by raw connections, against a real process."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import openai
import pytest

from tests.end_to_end.serving import Serve, until
from tests.models import CHAT_TEMPLATE, END, make_byte_tokenizer, make_tiny_model

KEY = "s3cret"
NUM_BLOCKS = 512
LONG = 400
HELLO = [{"role": "user", "content": "hello"}]
TOOLS_TEMPLATE = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")
    return make_byte_tokenizer(folder, eos_token=END, chat_template=TOOLS_TEMPLATE)


def start(folder: Path, *options: str) -> Serve:
    fixed = ("--executor", "inline", "--num-kv-blocks", str(NUM_BLOCKS), "--served-model-name", "tiny")
    return Serve("--model", str(folder), *fixed, *options)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A roomy service with a key."""
    serve = start(folder, "--api-key", KEY)
    yield serve.wait_ready()
    code = serve.end()
    serve.close()
    assert code == 0
    assert "Traceback" not in serve.text
    assert "ERROR" not in serve.text


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[str]:
    """A service with little room, and no key."""
    limits = ("--max-body-mib", "0.1", "--max-choices", "3", "--max-prompts", "2", "--max-prompt-tokens", "100")
    serve = start(folder, *limits, "--max-num-seqs", "2", "--max-queued-requests", "2")
    yield serve.wait_ready()
    assert serve.end() == 0
    serve.close()


def post(url: str, path: str, body: Any = None, key: str | None = KEY, **how: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=60, **how)


def stats(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/stats", headers={"Authorization": f"Bearer {KEY}"}, timeout=60).json()


def is_idle(url: str) -> bool:
    now = stats(url)
    return (now["running"], now["waiting"], now["kv_blocks_free"]) == (0, 0, NUM_BLOCKS)


def greedy(client: openai.OpenAI, prompt: Any = "The sea is", max_tokens: int = 24, **fields: Any) -> Any:
    more = fields.pop("extra_body", {})
    return client.completions.create(
        model="tiny",
        prompt=prompt,
        temperature=0,
        max_tokens=max_tokens,
        extra_body={"ignore_eos": True, **more},
        **fields,
    )


def streamed(chunks: Any) -> dict[int, str]:
    """The text of each choice, by its index."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content or ""
            texts[choice.index] = texts.get(choice.index, "") + piece
    return texts


# ---- answers


def test_the_model_is_told(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == ("tiny", "quadriga", 512)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_a_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = greedy(client)
    assert whole.object == "text_completion"
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (10, 24, 34)
    chunks = list(greedy(client, stream=True, stream_options={"include_usage": True}))
    assert streamed(chunks) == {0: whole.choices[0].text}
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]


def test_usage_may_come_with_every_piece(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c.usage.completion_tokens for c in greedy(client, max_tokens=5, stream=True, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 5


def test_prompts_come_in_batches_as_text_or_ids(client: openai.OpenAI) -> None:
    texts = ["The sea is", "A river", "x"]
    alone = [greedy(client, one).choices[0].text for one in texts]
    together = greedy(client, texts)
    assert [choice.text for choice in together.choices] == alone
    assert together.usage.prompt_tokens == sum(map(len, texts))
    ids = [list(text.encode()) for text in texts]
    assert [choice.text for choice in greedy(client, ids).choices] == alone
    assert greedy(client, ids[0]).choices[0].text == alone[0]
    assert streamed(greedy(client, ids, stream=True)) == dict(enumerate(alone))


def test_choices_differ_by_seed_and_repeat(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        return client.completions.create(model="tiny", prompt=["ab", "c"], max_tokens=12, n=3, seed=5, **fields)

    first = [choice.text for choice in ask().choices]
    assert len(first) == 6
    assert len(set(first)) == 6
    assert [choice.text for choice in ask().choices] == first
    assert streamed(ask(stream=True)) == dict(enumerate(first))
    single = client.completions.create(model="tiny", prompt="ab", max_tokens=12, seed=5)
    assert single.choices[0].text == first[0]


def test_echo_puts_the_prompt_before_the_text(client: openai.OpenAI) -> None:
    text = greedy(client).choices[0].text
    assert greedy(client, echo=True).choices[0].text == f"The sea is{text}"
    assert greedy(client, list(b"The sea is"), echo=True).choices[0].text == f"The sea is{text}"
    assert streamed(greedy(client, echo=True, n=2, stream=True)) == dict.fromkeys((0, 1), f"The sea is{text}")
    nothing = greedy(client, echo=True, max_tokens=0)
    assert nothing.choices[0].text == "The sea is"
    assert nothing.usage.completion_tokens == 0
    assert streamed(greedy(client, echo=True, max_tokens=0, stream=True)) == {0: "The sea is"}
    assert greedy(client).choices[0].text == text


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = list(range(30, 110))
    assert greedy(client, prompt, max_tokens=2).usage.prompt_tokens_details.cached_tokens == 0
    again = greedy(client, [prompt, prompt], max_tokens=2).usage
    assert (again.prompt_tokens, again.prompt_tokens_details.cached_tokens) == (160, 128)
    salted = greedy(client, prompt, max_tokens=2, extra_body={"cache_salt": "other"}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_defaults_are_those_of_openai(client: openai.OpenAI) -> None:
    ignoring = {"ignore_eos": True}
    assert client.completions.create(model="tiny", prompt="a", extra_body=ignoring).usage.completion_tokens == 16
    answer = client.chat.completions.create(model="tiny", messages=HELLO, extra_body=ignoring)
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0.8, seed=3, max_completion_tokens=20, n=2, **fields
        )

    whole = ask()
    assert {choice.message.role for choice in whole.choices} == {"assistant"}
    assert len({choice.message.content for choice in whole.choices}) == 2
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert streamed(chunks) == {choice.index: choice.message.content for choice in whole.choices}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends == [choice.finish_reason for choice in whole.choices]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    same = client.chat.completions.create(model="tiny", messages=parts, temperature=0.8, seed=3, max_tokens=20)
    assert same.choices[0].message.content == whole.choices[0].message.content


def test_tools_reach_the_template(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
    with_tools = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, tools=[CLOCK])
    assert with_tools.usage.prompt_tokens == plain.usage.prompt_tokens + len("<tool_call>" + json.dumps([CLOCK]))
    none = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, tools=[CLOCK], tool_choice="none")
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens


def test_every_stop_string_cuts_streams_and_wholes_alike(client: openai.OpenAI) -> None:
    text = greedy(client, max_tokens=30).choices[0].text
    stops = sorted({text[at : at + length] for length in (2, 3, 4) for at in range(len(text) - length + 1)})
    assert len(stops) > 50

    async def check() -> None:
        room = asyncio.Semaphore(16)
        ask = {"model": "tiny", "prompt": "The sea is", "temperature": 0, "max_tokens": 30}
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=KEY, max_retries=0) as service:

            async def one(stop: str) -> None:
                async with room:
                    fields = {**ask, "stop": stop, "extra_body": {"ignore_eos": True}}
                    whole = (await service.completions.create(**fields)).choices[0]
                    chunks = [c async for c in await service.completions.create(**fields, stream=True)]
                expected = text[: text.index(stop)]
                assert (whole.text, whole.finish_reason, whole.stop_reason) == (expected, "stop", stop)
                assert streamed(chunks) == {0: expected}
                assert chunks[-1].choices[0].finish_reason == "stop"

            await asyncio.gather(*map(one, stops))

    asyncio.run(check())


def test_streams_run_side_by_side(client: openai.OpenAI, url: str) -> None:
    """A crowd of them, each as it would be alone, and a seed honoured in it."""
    alone = client.completions.create(model="tiny", prompt="abc", max_tokens=40, seed=11).choices[0].text

    async def crowd() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as service:

            async def one(seed: int) -> str:
                stream = await service.completions.create(
                    model="tiny", prompt="abc", max_tokens=40, seed=seed, stream=True
                )
                return streamed([chunk async for chunk in stream])[0]

            return await asyncio.gather(*(one(seed) for seed in range(40)))

    texts = asyncio.run(crowd())
    assert texts[11] == alone
    assert len(set(texts)) == 40


def test_tokens_and_text(url: str) -> None:
    answer = post(url, "/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert answer["tokens"] == [104, 195, 169]
    assert answer["count"] == 3
    assert answer["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert post(url, "/detokenize", {"tokens": [104, 195, 169]}).json() == {"prompt": "hé"}
    assert post(url, "/tokenize", {"messages": HELLO}).json()["tokens"] == [257, *b"hello", 256, 10, 258]
    assert post(url, "/tokenize", {"prompt": "a", "messages": HELLO}).status_code == 400
    assert post(url, "/detokenize", {"tokens": [301]}).status_code == 400


# ---- log probabilities


def test_logprobs_of_a_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = greedy(client, max_tokens=12, logprobs=2).choices[0].logprobs
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.top_logprobs) == len(whole.text_offset) == 12
    for token, logprob, top in zip(whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True):
        assert logprob == top[token] == max(top.values()), "greedy takes the likeliest"
        assert len(top) == 2
    pieces = [c.choices[0].logprobs for c in greedy(client, max_tokens=12, logprobs=2, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for piece in pieces for entry in getattr(piece, name)] == getattr(whole, name)


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    """What was made scores the same when it is a prompt, whether it is cached or not."""
    prompt = list(b"The sea is")
    made = greedy(client, prompt, max_tokens=8, logprobs=1, echo=True).choices[0].logprobs
    assert made.token_logprobs[0] is made.top_logprobs[0] is None
    assert made.tokens[:10] == list("The sea is")
    assert len(made.tokens) == 18
    for extra in ({}, {"cache_salt": "new"}, {}):
        scored = greedy(client, prompt, max_tokens=0, logprobs=1, echo=True, extra_body=extra).choices[0].logprobs
        assert scored.tokens == made.tokens[:10]
        assert scored.token_logprobs[1:] == pytest.approx(made.token_logprobs[1:10], abs=1e-3)
    pieces = [c.choices[0].logprobs for c in greedy(client, prompt, max_tokens=8, logprobs=1, echo=True, stream=True)]
    assert [token for piece in pieces for token in piece.tokens] == made.tokens
    assert [at for piece in pieces for at in piece.text_offset] == made.text_offset


def test_the_best_of_several_is_the_likeliest(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "prompt": ["ab", "c"], "max_tokens": 6, "seed": 4, "extra_body": {"ignore_eos": True}}
    every = client.completions.create(**ask, n=5, logprobs=0).choices
    means = [sum(one.logprobs.token_logprobs) / 6 for one in every]
    best = client.completions.create(**ask, n=2, best_of=5)
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage.completion_tokens == 60
    for at in (0, 1):
        ranked = sorted(range(5 * at, 5 * at + 5), key=lambda index: means[index], reverse=True)
        expected = [every[index].text for index in ranked[:2]]
        assert [choice.text for choice in best.choices[2 * at : 2 * at + 2]] == expected
    assert best.choices[0].logprobs is None


def test_logprobs_of_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0, max_tokens=8, logprobs=True, **fields
        )

    whole = ask(top_logprobs=3).choices[0].logprobs.content
    assert all(len(one.top_logprobs) == 3 for one in whole)
    assert all(one.logprob == one.top_logprobs[0].logprob for one in whole)
    assert all(one.token == one.top_logprobs[0].token for one in whole)
    pieces = [c.choices[0].logprobs for c in ask(top_logprobs=3, stream=True)]
    assert [one for piece in pieces if piece for one in piece.content] == whole
    assert all(one.top_logprobs == [] for one in ask().choices[0].logprobs.content)


# ---- guides


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=HELLO, seed=1, max_tokens=200, **fields)


def test_answers_take_the_form_that_is_asked_for(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"town": {"enum": ["Ulm", "Bonn"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["town", "size"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    whole = chat(client, response_format=form).choices[0]
    place = json.loads(whole.message.content)
    assert place["town"] in ("Ulm", "Bonn")
    assert 1 <= place["size"] <= 99
    assert whole.finish_reason == "stop"
    assert streamed(chat(client, response_format=form, stream=True)) == {0: whole.message.content}
    bare = chat(client, response_format={"type": "json_object"}, logit_bias={str(ord("}")): 100}).choices[0]
    assert json.loads(bare.message.content) == {}
    for extra, pattern in (
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
        ({"structured_outputs": {"regex": "x+y"}}, "x+y"),
    ):
        made = client.completions.create(model="tiny", prompt="a", max_tokens=150, seed=2, extra_body=extra).choices[0]
        assert re.fullmatch(pattern, made.text), (extra, made)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="a", extra_body={"guided_regex": "("})


def test_a_model_that_must_call_a_tool_calls_it(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "clock", "parameters": parameters}}
    for choice in ({"type": "function", "function": {"name": "clock"}}, "required"):
        ask = {"tools": [tool], "tool_choice": choice}
        whole = chat(client, **ask).choices[0]
        assert whole.message.content is None
        assert whole.finish_reason == "tool_calls"
        for call in whole.message.tool_calls:
            assert call.function.name == "clock"
            assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")
        deltas = [c.choices[0] for c in chat(client, **ask, stream=True)]
        calls = [call for one in deltas for call in one.delta.tool_calls or ()]
        assert [call.function.arguments for call in calls] == [
            call.function.arguments for call in whole.message.tool_calls
        ]
        assert [call.index for call in calls] == list(range(len(calls)))
        assert deltas[-1].finish_reason == "tool_calls"


# ---- refusals


@pytest.mark.parametrize(
    ("path", "body", "reason", "param"),
    [
        ("completions", {"prompt": "a", "temperature": -1}, "greater than or equal to 0, got -1", "temperature"),
        ("completions", {"prompt": "a", "max_tokens": 600}, "600 is more than the 511 tokens left", None),
        ("completions", {"prompt": "a" * 600}, "600 tokens, more than the 511", None),
        ("completions", {"prompt": "a" * 60_000}, "60000 characters, which cannot be 511 tokens", None),
        ("completions", {"prompt": [[5], [301]]}, "301 at position 0 is outside the vocabulary of 301", None),
        ("completions", {"prompt": ""}, "the prompt is empty", None),
        ("completions", {"prompt": "a", "is_prefill": True}, "unknown field 'is_prefill'", None),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix is not supported", None),
        ("completions", {"prompt": "a", "n": 3, "best_of": 2}, "best_of 2 is less than n 3", None),
        ("completions", {"prompt": "a", "best_of": 2, "stream": True}, "cannot be streamed", None),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens 0 gives nothing", None),
        ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", None),
        ("completions", {"prompt": "a", "logit_bias": {"301": 1}}, "vocabulary of 301", None),
        ("completions", {}, "prompt is missing", "prompt"),
        ("completions", [], "must be a JSON object", None),
        ("chat/completions", {"messages": []}, "at least 1 item", "messages"),
        ("chat/completions", {"messages": [{"role": "x"}]}, "role of message 0", None),
        ("chat/completions", {"messages": HELLO, "top_logprobs": 2}, "needs logprobs", None),
        ("chat/completions", {"messages": HELLO, "tools": [{}]}, "tools: entry 0", None),
        ("chat/completions", {"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, "must not hold", None),
    ],
)
def test_what_is_wrong_is_named(url: str, path: str, body: Any, reason: str, param: str | None) -> None:
    answer = post(url, f"/v1/{path}", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert reason in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_other_statuses(url: str) -> None:
    def told(answer: httpx.Response) -> tuple[int, str]:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        return answer.status_code, answer.json()["error"]["code"]

    body = {"prompt": "a", "max_tokens": 2}
    assert told(post(url, "/v1/completions", {**body, "model": "x"})) == (404, "model_not_found")
    assert told(post(url, "/v1/nothing", {})) == (404, "not_found")
    assert told(httpx.get(f"{url}/v1/completions", headers={"Authorization": f"Bearer {KEY}"})) == (
        405,
        "method_not_allowed",
    )
    for path in ("/v1/completions", "/v1/models/tiny", "/v1/nothing", "/tokenize", "/detokenize", "/stats"):
        assert told(post(url, path, body, key=None)) == (401, "invalid_api_key"), path
        assert told(post(url, path, body, key="s3cre")) == (401, "invalid_api_key"), path
    for path in ("/health", "/ready", "/version", "/openapi.json"):
        assert httpx.get(f"{url}{path}").status_code == 200, path


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b'"\xff"', b'{"prompt": "\\ud800"}', b'{"prompt": "a", "stop": "\\udfff"}']
)
def test_bodies_that_are_no_json_or_no_text(url: str, content: bytes) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    answer = httpx.post(f"{url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_bounds_of_one_request(narrow: str) -> None:
    for body, reason in (
        ({"prompt": ["a"] * 3}, "3 prompts, more than the 2 that may be"),
        ({"prompt": "a", "n": 4}, "n 4 is more than the 3 that may be"),
        ({"prompt": ["a", "b"], "n": 3}, "6 sequences, more than the 4 that the service holds"),
        ({"prompt": "a" * 101}, "101 tokens, more than the 100"),
    ):
        answer = post(narrow, "/v1/completions", body)
        assert answer.status_code == 400, body
        assert reason in answer.json()["error"]["message"]
    assert post(narrow, "/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 2}).status_code == 200


def test_a_body_that_is_too_large_is_refused_while_it_is_read(narrow: str) -> None:
    large = json.dumps({"prompt": "a", "user": "x" * 110_000}).encode()
    headers = {"Content-Type": "application/json"}
    announced = httpx.post(f"{narrow}/v1/completions", content=large, headers=headers)
    pieces = (large[at : at + 10_000] for at in range(0, len(large), 10_000))
    unannounced = httpx.post(f"{narrow}/v1/completions", content=pieces, headers=headers)
    for answer in (announced, unannounced):
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert "more than 104857 bytes" in answer.json()["error"]["message"]
    endless = socket.create_connection((urlsplit(narrow).hostname, urlsplit(narrow).port), timeout=20)
    endless.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 1000)
    assert endless.recv(100).startswith(b"HTTP/1.1 413")
    endless.close()


# ---- those who leave


def test_who_leaves_a_stream_takes_its_requests_along(client: openai.OpenAI, url: str) -> None:
    for choices in (1, 2, 8):
        stream = client.completions.create(
            model="tiny", prompt="a", max_tokens=LONG, n=choices, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        assert until(lambda: is_idle(url), 20)
    before = stats(url)["decode_tokens"]
    assert until(lambda: is_idle(url), 5)
    assert stats(url)["decode_tokens"] == before


def test_who_does_not_wait_for_a_whole_answer_takes_it_along(url: str) -> None:
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 8}
    before = stats(url)["decode_tokens"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{url}/v1/completions",
            json=body,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=httpx.Timeout(20, read=0.02),
        )
    assert until(lambda: is_idle(url), 20)
    assert stats(url)["decode_tokens"] - before < 8 * 500


def test_five_hundred_dropped_connections_leave_nothing(url: str) -> None:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    body = json.dumps({"prompt": "ab", "max_tokens": LONG, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    async def drop(at: int) -> bool:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head.encode() + body)
        began = b"data: " in await reader.readuntil(b"\n\n") + await reader.readuntil(b"\n\n") if at % 5 else False
        writer.transport.abort()
        return began

    async def drop_all() -> list[bool]:
        return [
            one for first in range(0, 500, 100) for one in await asyncio.gather(*map(drop, range(first, first + 100)))
        ]

    began = asyncio.run(drop_all())
    assert sum(began) == 400
    assert until(lambda: is_idle(url), 60)
    assert httpx.get(f"{url}/ready").status_code == 200
