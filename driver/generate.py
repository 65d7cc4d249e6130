"""`quadriga generate`: prompts in, completions to the terminal or as JSON lines."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from driver.llm import LLM
from driver.options import engine_options
from driver.results import Completion, Prompt
from scheduler.params import InvalidRequest, SamplingParams

logger = logging.getLogger("quadriga.generate")


class PromptFileError(ValueError):
    """A prompt file that cannot be read as JSON lines."""


@dataclass(slots=True)
class Task:
    """One prompt with its parameters, or why it cannot be run."""

    prompt: Prompt = ""
    params: SamplingParams | None = None
    error: InvalidRequest | None = None


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 2 when any prompt could not be served as asked."""
    defaults = _sampling_fields(args)
    SamplingParams.from_mapping(defaults)  # the command line's own values are checked before any work
    tasks = _read_tasks(args, defaults)
    llm = LLM(start=False, **engine_options(args))
    for task in tasks:
        _check(llm, task, args.chat)
    if all(task.error for task in tasks):
        return _report(llm, args, tasks, [])
    status = StatusLine(sys.stdout, sys.stderr)
    llm.phases.on_begin = lambda name: status.show(f"starting: {name} …")
    try:
        llm.start()
        status.clear()
        if len(tasks) == 1 and not args.json:
            return _stream(llm, tasks[0], status)
        served = [task for task in tasks if task.error is None]
        completions = llm.generate([task.prompt for task in served], [task.params for task in served])
        return _report(llm, args, tasks, completions)
    finally:
        status.clear()
        llm.close()


def _sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos")
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _read_tasks(args: argparse.Namespace, defaults: dict[str, Any]) -> list[Task]:
    if args.prompt is not None:
        params = SamplingParams.from_mapping(defaults)
        return [Task(prompt, params) for prompt in args.prompt]
    try:
        with open(args.prompt_file, encoding="utf-8") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"cannot read {args.prompt_file}: {error}") from error
    if not lines:
        raise PromptFileError(f"{args.prompt_file} holds no prompts")
    return [_read_line(line, f"{args.prompt_file}, line {number}", defaults) for number, line in lines]


def _read_line(line: str, where: str, defaults: dict[str, Any]) -> Task:
    """One line's task; a fault in its values concerns this line alone, broken JSON the whole file."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptFileError(f"{where} is not JSON: {error}") from error
    try:
        if not isinstance(value, dict):
            return Task(_prompt_of(value), SamplingParams.from_mapping(defaults))
        given = [name for name in ("prompt", "prompt_token_ids") if name in value]
        if len(given) != 1:
            raise InvalidRequest("an object needs either prompt or prompt_token_ids")
        prompt = _prompt_of(value.pop(given[0]))
        return Task(prompt, SamplingParams.from_mapping({**defaults, **value}))
    except InvalidRequest as error:
        return Task(error=InvalidRequest(f"{where}: {error}"))


def _prompt_of(value: Any) -> Prompt:
    if not isinstance(value, str | list):
        raise InvalidRequest(f"a prompt must be a string or a list of token ids, got {value!r}")
    return value


def _check(llm: LLM, task: Task, chat: bool) -> None:
    if task.error is None:
        try:
            if chat and isinstance(task.prompt, str):
                task.prompt = llm.encode_chat([{"role": "user", "content": task.prompt}])
            llm.check(task.prompt, task.params)
        except InvalidRequest as error:
            task.error = error


def _stream(llm: LLM, task: Task, status: StatusLine) -> int:
    """Streams one completion with a progress line under it, then its figures."""
    submitted = time.perf_counter()
    times: list[float] = []
    for increment in llm.stream(task.prompt, task.params):
        times += [time.perf_counter()] * len(increment.token_ids)
        status.clear()
        sys.stdout.write(increment.text)
        sys.stdout.flush()
        if times:
            status.show(f"{len(times)} tokens, {len(times) / (times[-1] - submitted):.1f} tokens/s")
    status.clear()
    sys.stdout.write("\n")
    sys.stdout.flush()
    completion = Completion(submitted=submitted, token_times=times)
    gap = completion.mean_tbt_s
    print(
        f"{len(times)} tokens, TTFT {_milliseconds(completion.ttft_s)}, mean TBT {_milliseconds(gap)}, "
        + (f"{1 / gap:.1f} tokens/s" if gap else "one token"),
        file=sys.stderr,
    )
    return 0


def _report(llm: LLM, args: argparse.Namespace, tasks: list[Task], completions: list[Completion]) -> int:
    """Prints every task's result in order. Returns the exit code."""
    served = iter(completions)
    results = []
    for task in tasks:
        result = Completion() if task.error else next(served)
        if task.error:
            result.fail(task.error)
        results.append(result)
    for number, (task, result) in enumerate(zip(tasks, results, strict=True), 1):
        if args.json:
            print(json.dumps(_as_json(result), ensure_ascii=False))
        elif result.error is None:
            print(f"[{number}] {task.prompt if isinstance(task.prompt, str) else ''}{result.text}\n")
    sys.stdout.flush()
    failed = [(number, result.error) for number, result in enumerate(results, 1) if result.error]
    for number, error in failed:
        which = f"prompt {number}: " if len(results) > 1 else ""
        print(f"quadriga: {which}{error}", file=sys.stderr)
    _summarise(completions)
    return 2 if failed else 0


def _summarise(completions: list[Completion]) -> None:
    done = [completion for completion in completions if completion.token_times]
    if done:
        tokens = sum(len(completion.token_times) for completion in done)
        seconds = max(c.token_times[-1] for c in done) - min(c.submitted for c in done)
        logger.info("%d prompts, %d tokens, %.1f tokens/s", len(done), tokens, tokens / seconds)


def _as_json(result: Completion) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_token_ids": result.prompt_token_ids,
        "output_token_ids": result.output_token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "cached_tokens": result.cached_tokens,
        "ttft_s": result.ttft_s,
        "mean_tbt_s": result.mean_tbt_s,
    }
    for name in ("logprobs", "prompt_logprobs"):
        entries = getattr(result, name)
        if entries is not None:
            fields[name] = [entry and asdict(entry) for entry in entries]
    return fields if result.error is None else {**fields, "error": str(result.error)}


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


class StatusLine:
    """A line of progress under the text that is being written; silent where either stream is not a terminal."""

    # Down a line and up again: scrolls where the text is on the last line, and keeps the column either way.
    _MAKE_ROOM, _SAVE, _NEXT_LINE, _RESTORE, _CLEAR_BELOW = "\x1bD\x1bM", "\x1b7", "\x1bD\r", "\x1b8", "\x1b[J"

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._err = err
        self._live = out.isatty() and err.isatty()
        self._shown = False

    def show(self, text: str) -> None:
        if self._live:
            line = f"{self._CLEAR_BELOW}\x1b[2m{text}\x1b[0m"
            self._err.write(f"{self._MAKE_ROOM}{self._SAVE}{self._NEXT_LINE}{line}{self._RESTORE}")
            self._err.flush()
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            self._err.write(self._CLEAR_BELOW)
            self._err.flush()
            self._shown = False
