"""Log probabilities as the two OpenAI interfaces write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from driver.tokenizer import Tokenizer
from scheduler.logprobs import TokenLogprobs

LOWEST = -9999.0  # JSON knows no infinity


class TokenNames:
    """Tokens as text: their characters; `bytes:\\xe2\\x80` where they end inside one; `token_id:7` without a text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def raw(self, token_id: int) -> bytes | None:
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        raw = self.raw(token_id)
        if raw is None:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def width(self, token_id: int) -> int:
        """Characters of the text that begin in this token; special tokens have none."""
        if self._tokenizer is None or self._tokenizer.is_special(token_id):
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.raw(token_id) or b"")


class CompletionLogprobs:
    """One sequence's log probabilities for /v1/completions, piece by piece; offsets count on."""

    def __init__(self, names: TokenNames, top: int) -> None:
        """top: how many of the likeliest tokens were asked for; the chosen one is among them or one more."""
        self._names, self._top, self._offset = names, top, 0

    def prompt(self, token_ids: Sequence[int], found: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of a prompt that is echoed; nothing is before its first token, which has none."""
        missing: list[None] = [None] * (len(token_ids) - len(found))
        return self._written(token_ids, [*missing, *found])

    def output(self, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._written([one.token_id for one in found], found)

    def _written(self, token_ids: Sequence[int], found: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += self._names.width(token_id)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if one is None else finite(one.logprob) for one in found],
            "tokens": [self._names.text(token_id) for token_id in token_ids],
            "top_logprobs": [None if one is None else self._likeliest(one) for one in found] if self._top else None,
        }

    def _likeliest(self, one: TokenLogprobs) -> dict[str, float]:
        ranked = [*one.top[: self._top], (one.token_id, one.logprob)]
        return {self._names.text(token_id): finite(logprob) for token_id, logprob in ranked}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of CompletionLogprobs as one."""
    return {
        name: None if parts[0][name] is None else [entry for part in parts for entry in part[name]] for name in parts[0]
    }


def chat_logprobs(names: TokenNames, found: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """One sequence's, or a piece's, for /v1/chat/completions. top: as in CompletionLogprobs, but without one more."""
    content = [
        {
            **_token(names, one.token_id, one.logprob),
            "top_logprobs": [_token(names, token_id, logprob) for token_id, logprob in one.top[:top]],
        }
        for one in found
    ]
    return {"content": content, "refusal": None}


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _token(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    raw = names.raw(token_id)
    return {
        "token": names.text(token_id),
        "logprob": finite(logprob),
        "bytes": None if raw is None else list(raw),
    }
