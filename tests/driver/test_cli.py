"""The command line in this process: options, prompt files, output and exit codes."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from driver.config import EngineConfig
from driver.llm import LLM
from driver.options import add_engine_options, engine_options
from scheduler.params import SamplingParams
from tests.driver.conftest import Run
from tests.models import VOCAB_SIZE, greedy

KEYS = {
    *("prompt_token_ids", "output_token_ids", "text"),
    *("finish_reason", "stop_reason", "cached_tokens", "ttft_s", "mean_tbt_s"),
}


def write_lines(path: Path, *lines: Any) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


# ---- what comes out


def test_json_is_one_object_a_prompt_in_order(run: Run, folder: Path) -> None:
    prompts = ["The sea", "a", "日本 🙂"]
    outcome = run("--prompt", *prompts, "--max-tokens", "6", "--json")
    assert outcome.code == 0
    for prompt, found in zip(prompts, outcome.objects, strict=True):
        assert set(found) == KEYS
        assert found["prompt_token_ids"] == list(prompt.encode())
        assert found["output_token_ids"] == greedy(folder, list(prompt.encode()), 6)
        assert found["finish_reason"] == "length"
        assert found["ttft_s"] > 0
        assert found["mean_tbt_s"] > 0


def test_json_carries_log_probabilities_where_they_are_asked_for(run: Run, tmp_path: Path) -> None:
    line = {"prompt": "The sea", "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 0, "logit_bias": {"7": 100}}
    path = write_lines(tmp_path / "prompts.jsonl", line, "The sea")
    asked, plain = run("--prompt-file", path, "--max-tokens", "2", "--json").objects
    assert asked["output_token_ids"] == [7, 7]
    assert [entry["token_id"] for entry in asked["logprobs"]] == [7, 7]
    assert [len(entry["top"]) for entry in asked["logprobs"]] == [1, 1]
    assert [entry and entry["token_id"] for entry in asked["prompt_logprobs"]] == [None, *b"he sea"]
    assert set(plain) == KEYS


def test_a_single_prompt_with_json_is_one_object(run: Run) -> None:
    (found,) = run("--prompt", "a", "--max-tokens", "1", "--json").objects
    assert len(found["output_token_ids"]) == 1
    assert found["mean_tbt_s"] is None


def test_a_single_prompt_prints_its_text_alone(run: Run) -> None:
    (found,) = run("--prompt", "The sea", "--max-tokens", "12", "--json").objects
    outcome = run("--prompt", "The sea", "--max-tokens", "12")
    assert (outcome.code, outcome.out) == (0, found["text"] + "\n")
    assert "12 tokens, TTFT" in outcome.err


def test_many_prompts_print_in_order(run: Run) -> None:
    prompts = ["The sea", "a"]
    texts = [found["text"] for found in run("--prompt", *prompts, "--max-tokens", "4", "--json").objects]
    outcome = run("--prompt", *prompts, "--max-tokens", "4")
    assert outcome.out == f"[1] The sea{texts[0]}\n\n[2] a{texts[1]}\n\n"


def test_chat_uses_the_template(run: Run, folder: Path) -> None:
    (found,) = run("--prompt", "hi", "--chat", "--max-tokens", "3", "--json").objects
    llm = LLM(str(folder), start=False)
    assert found["prompt_token_ids"] == llm.encode_chat([{"role": "user", "content": "hi"}])


def test_sampling_options_reach_the_sampler(run: Run) -> None:
    options = ("--prompt", "a", "--max-tokens", "12", "--json", "--temperature", "3")
    first, again, other = (run(*options, "--seed", seed).objects[0]["output_token_ids"] for seed in ("5", "5", "6"))
    assert first == again != other
    plain = run("--prompt", "a", "--max-tokens", "12", "--json").objects[0]["output_token_ids"]
    for limit in (("--top-k", "1"), ("--top-p", "1e-9"), ("--min-p", "1")):
        assert run(*options, *limit).objects[0]["output_token_ids"] == plain


def test_stop_option_cuts_the_text(run: Run) -> None:
    text = run("--prompt", "The sea", "--max-tokens", "30", "--json").objects[0]["text"]
    (found,) = run("--prompt", "The sea", "--max-tokens", "30", "--json", "--stop", text[5:8], "zzz").objects
    assert found["text"] == text.split(text[5:8])[0]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", text[5:8])


def test_ignore_eos_goes_on(run: Run, folder: Path, tmp_path: Path) -> None:
    ending = shutil.copytree(folder, tmp_path / "ending")
    config = json.loads((ending / "config.json").read_text())
    tokens = greedy(folder, b"The sea", 8)
    (ending / "config.json").write_text(json.dumps({**config, "eos_token_id": tokens[3]}))
    (stopped,) = run("--prompt", "The sea", "--max-tokens", "8", "--json", model=ending).objects
    assert stopped["output_token_ids"] == tokens[: tokens.index(tokens[3]) + 1]
    (whole,) = run("--prompt", "The sea", "--max-tokens", "8", "--json", "--ignore-eos", model=ending).objects
    assert whole["output_token_ids"] == tokens


# ---- prompt files


def test_lines_of_every_kind_are_served_in_order(run: Run, folder: Path, tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "prompts.jsonl",
        "The sea",
        [5, 300],
        {"prompt": "a", "max_tokens": 2},
        {"prompt_token_ids": [1, 2], "temperature": 3, "seed": 5, "max_tokens": 3},
    )
    outcome = run("--prompt-file", path, "--max-tokens", "5", "--json")
    assert outcome.code == 0
    text, ids, short, sampled = outcome.objects
    assert text["output_token_ids"] == greedy(folder, b"The sea", 5)
    assert ids["output_token_ids"] == greedy(folder, [5, 300], 5)
    assert short["output_token_ids"] == greedy(folder, b"a", 2)
    assert sampled["prompt_token_ids"] == [1, 2]
    with LLM(str(folder), device="cpu", num_kv_blocks=64) as llm:
        params = SamplingParams(temperature=3, seed=5, max_tokens=3)
        assert sampled["output_token_ids"] == llm.generate([1, 2], params).output_token_ids


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "top_p": 0}, "line 2: top_p must be in (0, 1], got 0"),
        ({"prompt": "a", "best_of": 2}, "line 2: unknown sampling field 'best_of'"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "line 2: an object needs either prompt or prompt_token_ids"),
        ({"max_tokens": 2}, "line 2: an object needs either prompt or prompt_token_ids"),
        (7, "line 2: a prompt must be a string or a list of token ids, got 7"),
        (None, "line 2: a prompt must be a string or a list of token ids, got None"),
        ([5, VOCAB_SIZE], f"token id {VOCAB_SIZE} at position 1 is outside the vocabulary of {VOCAB_SIZE}"),
        ("", "0 tokens"),
        ([], "0 tokens"),
        ({"prompt": "a", "max_tokens": 512}, "max_tokens 512 is more than the 511 tokens left"),
        ({"prompt": "a", "max_tokens": 300}, "300 need 19 KV blocks of 16 tokens, but the KV cache has 8"),
        ({"prompt": "a", "temperature": 10**400}, "temperature"),
        ({"prompt": "a", "top_k": 2**64}, "top_k"),
        ("half a character \ud800", "surrogates not allowed"),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode(),
)
def test_a_bad_line_fails_alone(run: Run, folder: Path, tmp_path: Path, line: Any, message: str) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", "The sea", line, "a")
    outcome = run("--prompt-file", path, "--max-tokens", "4", "--json", cache="8")
    assert outcome.code == 2
    first, bad, last = outcome.objects
    assert first["output_token_ids"] == greedy(folder, b"The sea", 4)
    assert last["output_token_ids"] == greedy(folder, b"a", 4)
    assert set(bad) == {*KEYS, "error"}
    assert bad["finish_reason"] == "error"
    assert bad["output_token_ids"] == []
    for where in (bad["error"], outcome.err):
        assert message.removeprefix("line 2: ") in where
    assert "prompt 2:" in outcome.err or "line 2:" in outcome.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"a"\nnot json\n', "line 2 is not JSON"),
        (b'"a"\n\n\n{"prompt": \n', "line 4 is not JSON"),
        (b"", "holds no prompts"),
        (b"\n  \n", "holds no prompts"),
        (b"\xff\xfe\x00", "cannot read"),
        (b"[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_a_file_that_is_no_json_lines_is_refused_whole(run: Run, tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    outcome = run("--prompt-file", str(path), "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert str(path) in outcome.err
    assert message in outcome.err


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read_is_named(run: Run, tmp_path: Path, name: str) -> None:
    outcome = run("--prompt-file", str(tmp_path / name))
    assert (outcome.code, outcome.out) == (2, "")
    assert f"cannot read {tmp_path / name}" in outcome.err


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--prompt", ""], ["0 tokens, at least 1"]),
        (["--prompt", "x" * 512], ["512 tokens", "context length of 512"]),
        (["--prompt", "x" * 40, "--max-model-len", "32"], ["40 tokens", "context length of 32"]),
        (["--prompt", "a", "--max-tokens", "0"], ["max_tokens must be between 1 and 2147483647, got 0"]),
        (["--prompt", "a", "--max-tokens", "512"], ["max_tokens 512", "511 tokens left", "512"]),
        (["--prompt", "a", "--temperature", "-1"], ["temperature must be in [0, 1000], got -1.0"]),
        (["--prompt", "a", "--temperature", "nan"], ["temperature must be in [0, 1000], got nan"]),
        (["--prompt", "a", "--top-p", "0"], ["top_p must be in (0, 1], got 0.0"]),
        (["--prompt", "a", "--top-k", "-1"], ["top_k must be between 0 and 2147483647, got -1"]),
        (["--prompt", "a", "--min-p", "1.5"], ["min_p must be in [0, 1], got 1.5"]),
        (["--prompt", "a", "--seed", str(2**64)], ["seed", str(2**64), str(2**64 - 1)]),
        (["--prompt", "a", "--stop", ""], ["stop must not contain the empty string"]),
        (["--prompt", "a", "--tp", "7"], ["size 7", "6 query heads"]),
        (["--prompt", "a", "--tp", "0"], ["tensor_parallel_size", "between 1 and 1024", "got 0"]),
        (["--prompt", "a", "--tp", "2", "--executor", "inline"], ["inline executor runs one rank", "is 2"]),
        (["--prompt", "a", "--async-depth", "3"], ["async_depth", "between 0 and 2", "got 3"]),
        (["--prompt", "a", "--max-model-len", "513"], ["max_model_len 513", "512 positions"]),
        (["--prompt", "a", "--attention-backend", "magic"], ["'magic'", "known: auto, ", "reference"]),
        (["--prompt", "a", "--kv-cache-gib", "inf"], ["kv_cache_gib"]),
        (["--prompt", "a", "--max-tokens", "ten"], ["--max-tokens", "'ten'"]),
        (["--prompt", "a", "--device", "tpu"], ["'tpu'", "cuda"]),
        (["--prompt", "a", "--no-such-option"], ["--no-such-option"]),
        ([], ["--prompt", "--prompt-file", "required"]),
        (["--prompt", "a", "--prompt-file", "b"], ["not allowed with"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_what_cannot_be_had_is_refused_with_value_and_limit(run: Run, options: list[str], parts: list[str]) -> None:
    outcome = run(*options)
    assert (outcome.code, outcome.out) == (2, "")
    for part in parts:
        assert part in outcome.err


def test_a_cache_too_small_for_the_request_is_refused(run: Run) -> None:
    for options in (["--prompt", "x" * 40, "--max-tokens", "10"], ["--prompt", "x" * 40]):
        outcome = run(*options, cache="2")
        assert (outcome.code, outcome.out.strip()) == (2, "")
        assert "KV blocks of 16 tokens, but the KV cache has 2" in outcome.err


def test_cuda_without_a_gpu_is_refused(run: Run) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    outcome = run("--prompt", "a", "--device", "cuda")
    assert (outcome.code, outcome.out) == (2, "")
    assert "device cuda was asked for" in outcome.err


def test_engine_options_become_the_configuration() -> None:
    """Every setting with an option arrives; those without one keep their default."""
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    given = parser.parse_args(["--model", "m", "--tp", "3", "--start-timeout", "7", "--block-size", "8"])
    config = EngineConfig(**engine_options(given))
    assert (config.tensor_parallel_size, config.start_timeout_seconds, config.block_size) == (3, 7.0, 8)
    assert EngineConfig(**engine_options(parser.parse_args(["--model", "m"]))) == EngineConfig(model="m")
