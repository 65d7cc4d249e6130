"""The requests of a simulation: read from a trace, or drawn at random."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import numpy as np

from driver.config import ConfigError
from scheduler.simulate import Arrival

CSV_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]  # of the Azure LLM inference traces
FIELDS = ("arrival_s", "prompt_tokens", "output_tokens")
MOST_TOKENS = 1 << 24
MOST_REQUESTS = 1_000_000


def read_trace(path: str) -> list[Arrival]:
    """The requests of a file, by arrival, the first at 0 s.

    JSON lines with arrival_s, prompt_tokens and output_tokens, or CSV with the header of the Azure traces. Raises
    ConfigError, naming file, line and value.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from error
    is_csv = bool(lines) and [cell.strip() for cell in lines[0].split(",")] == CSV_HEADER
    arrivals = list(_read_csv(path, lines) if is_csv else _read_json_lines(path, lines))
    if not arrivals:
        raise ConfigError(f"the trace {path} holds no requests")
    first = min(arrival.at for arrival in arrivals)
    shifted = [Arrival(a.at - first, a.prompt_tokens, a.output_tokens) for a in arrivals]
    return sorted(shifted, key=lambda arrival: arrival.at)


def poisson(
    rate: float, count: int, prompt_tokens: float, output_tokens: float, spread: float, seed: int
) -> list[Arrival]:
    """`count` requests that arrive independently, `rate` a second, the first at 0 s.

    prompt_tokens, output_tokens: the means of their lengths, which are log-normal. spread: the standard deviation of
    the lengths' logarithm; 0 makes all alike. Raises ConfigError.
    """
    for name, value, low, high in (
        ("poisson", rate, 1e-9, 1e6),
        ("num_requests", count, 1, MOST_REQUESTS),
        ("prompt_tokens", prompt_tokens, 1, MOST_TOKENS),
        ("output_tokens", output_tokens, 1, MOST_TOKENS),
        ("length_spread", spread, 0, 3),
        ("seed", seed, 0, 2**63),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} must be between {low:g} and {high:g}, got {value}")
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    prompts = _lengths(rng, prompt_tokens, spread, count)
    outputs = _lengths(rng, output_tokens, spread, count)
    return [Arrival(float(at - times[0]), *sizes) for at, *sizes in zip(times, prompts, outputs, strict=True)]


def _lengths(rng: np.random.Generator, mean: float, spread: float, count: int) -> list[int]:
    drawn = rng.lognormal(math.log(mean) - spread**2 / 2, spread, count)
    return np.clip(np.rint(drawn), 1, MOST_TOKENS).astype(int).tolist()


def _read_json_lines(path: str, lines: list[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON: {error}") from error
        if not isinstance(value, dict) or any(field not in value for field in FIELDS):
            raise ConfigError(f"{where} must be an object with {', '.join(FIELDS)}, got {line.strip()[:80]}")
        at = value["arrival_s"]
        if isinstance(at, bool) or not isinstance(at, int | float) or not abs(at) < 1e15:
            raise ConfigError(f"{where}: arrival_s must be a number of seconds, got {at!r}")
        yield Arrival(float(at), *(_count(where, field, value[field]) for field in FIELDS[1:]))


def _read_csv(path: str, lines: list[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(CSV_HEADER):
            raise ConfigError(f"{where} must have {len(CSV_HEADER)} cells, got {line.strip()[:80]}")
        prompt, output = (_count(where, *pair) for pair in zip(CSV_HEADER[1:], map(_number, cells[1:]), strict=True))
        yield Arrival(_seconds(where, cells[0]), prompt, output)


def _seconds(where: str, stamp: str) -> float:
    """Seconds since 1970 of an ISO time stamp, with as many decimals as it has; without a zone it is UTC."""
    whole, _, rest = stamp.partition(".")
    decimals = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat((whole + rest[len(decimals) :]).replace("Z", "+00:00"))
    except ValueError:
        raise ConfigError(f"{where}: TIMESTAMP must be an ISO date and time, got {stamp!r}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp() + float(f"0.{decimals or 0}")


def _number(cell: str) -> int | str:
    """The cell itself where it is no integer, for the message about it."""
    try:
        return int(cell)
    except ValueError:
        return cell[:80]


def _count(where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
        raise ConfigError(f"{where}: {name} must be an integer between 1 and {MOST_TOKENS}, got {value!r}")
    return value
