"""The Python API on a tiny model in this process: what comes out, in which order, and how it ends."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driver.engine import EngineDead
from quadriga import LLM, Completion, SamplingParams
from scheduler.params import DEFAULT_MAX_TOKENS
from tests.driver.serving import NUM_BLOCKS, PROMPT, Brake, greedy_params, open_llm, wait_until
from tests.models import VOCAB_SIZE, greedy

OTHERS = ["a", "Once upon a time", "x" * 40]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """What transformers answers to PROMPT."""
    return greedy(folder, PROMPT, 48)


# ---- one and many


def test_tokens_are_those_of_transformers(llm: LLM, expected: list[int]) -> None:
    completion = llm.generate(PROMPT, greedy_params(48))
    assert completion.output_token_ids == expected
    assert completion.prompt_token_ids == PROMPT
    assert completion.text == llm.model.tokenizer.decode(expected)
    assert (completion.finish_reason, completion.stop_reason, completion.error) == ("length", None, None)


def test_text_and_its_token_ids_are_the_same_prompt(llm: LLM) -> None:
    from_text = llm.generate("The sea is", greedy_params())
    assert from_text.prompt == "The sea is"
    assert from_text.prompt_token_ids == PROMPT
    assert from_text.output_token_ids == llm.generate(PROMPT, greedy_params()).output_token_ids


def test_many_prompts_come_back_in_order_each_as_if_alone(llm: LLM) -> None:
    prompts = [*OTHERS, PROMPT, "The end"]
    lengths = [20, 3, 12, 1, 30]
    params = [greedy_params(length) for length in lengths]
    together = llm.generate(prompts, params, use_tqdm=False)
    assert [len(completion.output_token_ids) for completion in together] == lengths
    for prompt, one, completion in zip(prompts, params, together, strict=True):
        alone = llm.generate(prompt, one)
        assert completion.prompt_token_ids == alone.prompt_token_ids
        assert completion.output_token_ids == alone.output_token_ids
        assert completion.text == alone.text


def test_one_parameter_set_serves_all_prompts(llm: LLM) -> None:
    completions = llm.generate(OTHERS, greedy_params(5), use_tqdm=False)
    assert [completion.prompt for completion in completions] == OTHERS
    assert [len(completion.output_token_ids) for completion in completions] == [5, 5, 5]


def test_a_list_of_one_gives_a_list_and_none_gives_none(llm: LLM) -> None:
    (only,) = llm.generate(["a"], greedy_params(2))
    assert len(only.output_token_ids) == 2
    assert llm.generate([], greedy_params(2)) == []


def test_times_belong_to_tokens(llm: LLM) -> None:
    completion = llm.generate(PROMPT, greedy_params(10))
    assert len(completion.token_times) == 10
    assert completion.token_times == sorted(completion.token_times)
    assert completion.ttft_s > 0
    assert completion.mean_tbt_s > 0
    assert Completion().ttft_s is None
    assert llm.generate(PROMPT, greedy_params(1)).mean_tbt_s is None


def test_threads_may_ask_at_once(llm: LLM) -> None:
    alone = {prompt: llm.generate(prompt, greedy_params(15)).output_token_ids for prompt in OTHERS}
    got: dict[str, list[int]] = {}

    def ask(prompt: str) -> None:
        got[prompt] = llm.generate(prompt, greedy_params(15)).output_token_ids

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in OTHERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == alone


def test_integers_of_numpy_are_token_ids(llm: LLM) -> None:
    ids = [np.int64(5), np.int32(300), np.uint8(7)]
    completion = llm.generate(ids, greedy_params())
    assert completion.prompt_token_ids == [5, 300, 7]
    assert all(type(token) is int for token in completion.prompt_token_ids)
    assert completion.output_token_ids == llm.generate((5, 300, 7), greedy_params()).output_token_ids
    assert llm.generate([ids, [1]], greedy_params(1))[0].prompt_token_ids == [5, 300, 7]


# ---- sampling


def test_a_seed_gives_the_same_text_again_in_any_company(llm: LLM) -> None:
    params = SamplingParams(temperature=3.0, seed=11, max_tokens=20)
    alone = llm.generate(PROMPT, params)
    among = llm.generate([*OTHERS, PROMPT], [greedy_params(30)] * 3 + [params], use_tqdm=False)[3]
    assert among.output_token_ids == alone.output_token_ids
    assert among.text == alone.text
    other = llm.generate(PROMPT, SamplingParams(temperature=3.0, seed=12, max_tokens=20))
    assert other.output_token_ids != alone.output_token_ids


def test_without_a_seed_each_run_differs(llm: LLM) -> None:
    params = SamplingParams(temperature=5.0, max_tokens=20)
    assert llm.generate(PROMPT, params).output_token_ids != llm.generate(PROMPT, params).output_token_ids


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-40}], ids=repr)
def test_what_leaves_one_choice_is_greedy(llm: LLM, expected: list[int], fields: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 2.0, "max_tokens": 12, "seed": 1, **fields})
    assert llm.generate(PROMPT, params).output_token_ids == expected[:12]


def test_default_length_is_the_room_that_is_left(folder: Path, llm: LLM) -> None:
    assert len(llm.generate([1], greedy_params(None)).output_token_ids) == DEFAULT_MAX_TOKENS
    with open_llm(folder, max_model_len=20) as short:
        assert len(short.generate(PROMPT, greedy_params(None)).output_token_ids) == 10
    with open_llm(folder, num_kv_blocks=4) as small:
        assert len(small.generate(PROMPT, greedy_params(None)).output_token_ids) == 7


def test_default_length_is_the_same_when_the_first_request_starts_the_engine(folder: Path) -> None:
    with open_llm(folder, num_kv_blocks=4) as started:
        wanted = started.generate(PROMPT, greedy_params(None)).output_token_ids
    late = open_llm(folder, num_kv_blocks=4, start=False)
    try:
        assert late.generate(PROMPT, greedy_params(None)).output_token_ids == wanted
    finally:
        late.close()


# ---- how a text ends


def test_stop_string_ends_the_text_and_is_cut(llm: LLM) -> None:
    whole = llm.generate(PROMPT, greedy_params(48)).text
    for at in range(0, len(whole) - 3, 5):
        stop = whole[at : at + 3]
        completion = llm.generate(PROMPT, greedy_params(48, stop=[stop]))
        assert completion.text == whole.split(stop)[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_stop_string_in_the_last_token_counts_as_stop(llm: LLM) -> None:
    whole = llm.generate(PROMPT, greedy_params(48))
    length = next(n for n in range(8, 48) if 32 < whole.output_token_ids[n - 1] < 127)
    text = llm.generate(PROMPT, greedy_params(length)).text
    completion = llm.generate(PROMPT, greedy_params(length, stop=text[-1:]))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", text[-1:])


def test_a_stop_that_does_not_come_changes_nothing(llm: LLM) -> None:
    plain = llm.generate(PROMPT, greedy_params(30))
    stopped = llm.generate(PROMPT, greedy_params(30, stop=[plain.text[-2:] + "never", "also never"]))
    assert (stopped.text, stopped.finish_reason) == (plain.text, "length")


def test_stop_token_ends_the_request_and_is_told(llm: LLM, expected: list[int]) -> None:
    token = expected[7]
    first = expected.index(token)
    for ignore_eos in (False, True):
        completion = llm.generate(PROMPT, greedy_params(48, stop_token_ids=[token], ignore_eos=ignore_eos))
        assert completion.output_token_ids == expected[: first + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", token)
        assert completion.text == llm.model.tokenizer.decode(expected[:first])


@pytest.mark.parametrize(
    ("in_config", "in_generation"),
    [([9], None), (None, [9]), (None, 9), ([14], [9]), ([9], [14]), ([14, 9], None), (14, 20)],
)
def test_end_tokens_of_both_files_stop_and_ignore_eos_covers_both(
    folder: Path, tmp_path: Path, expected: list[int], in_config: Any, in_generation: Any
) -> None:
    """The end tokens are those at the given places of the answer."""
    ending = shutil.copytree(folder, tmp_path / "ending")
    end_tokens = set()
    for name, places in (("config.json", in_config), ("generation_config.json", in_generation)):
        ids = None if places is None else np.take(expected, places).tolist()  # an int or a list, like `places`
        end_tokens.update([] if ids is None else np.ravel(ids).tolist())
        path = ending / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ids}))
    first = next(at for at, token in enumerate(expected) if token in end_tokens)
    with open_llm(ending) as llm:
        completion = llm.generate(PROMPT, greedy_params(48))
        assert completion.output_token_ids == expected[: first + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", expected[first])
        assert completion.text == llm.model.tokenizer.decode(expected[:first])
        whole = llm.generate(PROMPT, greedy_params(48, ignore_eos=True))
        assert (whole.output_token_ids, whole.finish_reason) == (expected, "length")


# ---- streams


def test_a_stream_joins_to_the_completion(llm: LLM) -> None:
    for fields in ({}, {"stop": [llm.generate(PROMPT, greedy_params(48)).text[6:9]]}):
        params = greedy_params(48, **fields)
        completion = llm.generate(PROMPT, params)
        increments = list(llm.stream(PROMPT, params))
        assert "".join(increment.text for increment in increments) == completion.text
        assert [token for increment in increments for token in increment.token_ids] == completion.output_token_ids
        assert [increment.finish_reason for increment in increments[:-1]] == [None] * (len(increments) - 1)
        last = increments[-1]
        assert (last.finish_reason, last.stop_reason) == (completion.finish_reason, completion.stop_reason)


def test_each_token_is_streamed_as_it_comes(llm: LLM) -> None:
    increments = list(llm.stream(PROMPT, greedy_params(10)))
    assert [len(increment.token_ids) for increment in increments] == [1] * 10


def test_closing_a_stream_early_aborts_it_and_frees_its_blocks(llm: LLM) -> None:
    for taken in (1, 2, 5, 20):
        before = llm.stats()["decode_tokens"]
        stream = llm.stream(PROMPT, greedy_params(200))
        for _ in range(taken):
            next(stream)
        assert llm.stats()["kv_blocks_free"] < NUM_BLOCKS
        stream.close()
        assert wait_until(lambda: llm.stats()["kv_blocks_free"] == NUM_BLOCKS, seconds=10)
        assert llm.stats()["decode_tokens"] - before < 150


def test_closing_a_stream_before_its_first_piece_aborts_it(llm: LLM) -> None:
    before = llm.stats()["decode_tokens"]
    llm.stream(PROMPT, greedy_params(200)).close()
    llm.generate(OTHERS[0], greedy_params(100))  # an unaborted one would run beside this
    assert llm.stats()["decode_tokens"] - before < 150
    assert wait_until(lambda: llm.stats()["kv_blocks_free"] == NUM_BLOCKS, seconds=10)


def test_requests_beside_an_aborted_one_are_unharmed(llm: LLM, expected: list[int]) -> None:
    for taken in range(1, 8):
        doomed, kept = llm.stream(OTHERS[1], greedy_params(100)), llm.stream(PROMPT, greedy_params(24))
        tokens = list(next(kept).token_ids)
        for _ in range(taken):
            next(doomed)
        doomed.close()
        tokens += [token for increment in kept for token in increment.token_ids]
        assert tokens == expected[:24]


# ---- chat, and models without a tokenizer


def test_a_chat_is_its_template_as_a_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    completion = llm.chat(messages, greedy_params())
    assert completion.prompt_token_ids == llm.encode_chat(messages)
    assert completion.output_token_ids == llm.generate(llm.encode_chat(messages), greedy_params()).output_token_ids


def test_every_token_id_can_be_a_prompt(llm: LLM) -> None:
    prompts = [[token] for token in range(0, VOCAB_SIZE, 20)] + [[VOCAB_SIZE - 1]]
    completions = llm.generate(prompts, greedy_params(1), use_tqdm=False)
    assert [completion.error for completion in completions] == [None] * len(prompts)
    assert len({completion.output_token_ids[0] for completion in completions}) > 5


# ---- the end


def test_an_interrupt_while_requests_are_handed_over_aborts_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(folder) as llm:
        submit, handed = llm._engine.submit, []

        def interrupted(*arguments: Any) -> None:
            if len(handed) == 2:
                raise KeyboardInterrupt
            handed.append(submit(*arguments))

        monkeypatch.setattr(llm._engine, "submit", interrupted)
        with Brake(llm, 3), pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT] * 4, greedy_params(200), use_tqdm=False)
        assert wait_until(lambda: llm.stats()["ended_requests"]["abort"] == 2)


def test_close_may_be_called_twice_and_ends_its_threads(folder: Path) -> None:
    before = set(threading.enumerate())
    llm = open_llm(folder)
    llm.generate(PROMPT, greedy_params(2))
    assert {thread.name for thread in set(threading.enumerate()) - before} >= {"quadriga-engine", "quadriga-worker"}
    llm.close()
    llm.close()
    assert not any(thread.name.startswith("quadriga") for thread in set(threading.enumerate()) - before)


def test_use_after_close_is_refused(folder: Path) -> None:
    llm = open_llm(folder)
    llm.close()
    uses: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPT, greedy_params(2)),
        lambda: llm.generate(OTHERS, greedy_params(2)),
        lambda: llm.stream(PROMPT, greedy_params(2)),
        llm.stats,
        llm.start,
        llm.__enter__,
    ]
    for use in uses:
        with pytest.raises(EngineDead, match="closed"):
            use()


def test_closing_under_a_stream_ends_it_with_an_error(folder: Path) -> None:
    llm = open_llm(folder)
    stream = llm.stream(PROMPT, greedy_params(200))
    next(stream)
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        list(stream)


def test_a_dropped_llm_ends_its_threads(folder: Path) -> None:
    before = set(threading.enumerate())
    llm = open_llm(folder)
    llm.generate(PROMPT, greedy_params(1))
    del llm
    assert wait_until(
        lambda: not any(thread.name.startswith("quadriga") for thread in set(threading.enumerate()) - before),
        seconds=10,
    )


def test_nothing_starts_before_it_is_needed(folder: Path) -> None:
    before = set(threading.enumerate())
    llm = open_llm(folder, start=False)
    llm.check(PROMPT, greedy_params())
    assert set(threading.enumerate()) == before
    assert len(llm.generate(PROMPT, greedy_params(3)).output_token_ids) == 3
    llm.close()
