"""Guides as llguidance's matchers: for the workers, which follow them, and for the driver, which tries them first.

Nothing here needs torch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# In units of work, never in time, so that all ranks give up at the same token. A mask takes well below a millisecond
# with what people write; where these limits are met all requests wait for up to a tenth of a second.
_LIMITS = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "max_lexer_states": 50_000}
# A model that has nothing to say must not fill its answer with blanks.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{0,32}"}
_LONGEST_REASON = 500


class GuideError(ValueError):
    """A guide that cannot be followed; the message says why."""


class GuideMaker:
    """Makes matchers for one model; may be used from several threads.

    folder: finds the model's, when the first guide comes. end_ids: of which one ends the output.
    """

    def __init__(self, folder: Callable[[], Path], vocab_size: int, end_ids: Iterable[int]) -> None:
        self._folder, self._vocab_size, self._end_ids = folder, vocab_size, sorted(end_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def matcher(self, kind: str, text: str) -> LLMatcher:
        """At the beginning of the output. kind, text: as in scheduler.guide.Guide. Raises GuideError."""
        try:
            grammar = _grammar(kind, text)
        except (ValueError, TypeError, RecursionError) as error:
            raise GuideError(_first_lines(str(error))) from error
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        return checked(matcher)

    def check(self, kind: str, text: str) -> None:
        """Raises GuideError for what no output can follow, or what is too complex from the first token on."""
        matcher = self.matcher(kind, text)
        matcher.compute_bitmask()
        checked(matcher)

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                if not self._end_ids:
                    raise GuideError("the model names no end token, so that no output could end")
                try:
                    self._tokenizer = LLTokenizer(_tokenizer_json(self._folder()), self._vocab_size, self._end_ids)
                except Exception as error:
                    raise GuideError(f"the model's tokenizer cannot be used for guides: {error}") from error
            return self._tokenizer


def checked(matcher: LLMatcher) -> LLMatcher:
    """The matcher. Raises GuideError when it has failed, which it never says by itself."""
    if matcher.is_error():
        raise GuideError(_first_lines(matcher.get_error()))
    return matcher


def _grammar(kind: str, text: str) -> str:
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON_OPTIONS)
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, json.loads(text)))}")
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(text)
    raise GuideError(f"there is no guide of kind {kind!r}")


def _tokenizer_json(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    from transformers import AutoTokenizer  # an older format, which only transformers can convert

    return AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str()


def _first_lines(text: str) -> str:
    return text.partition("<state>")[0].strip()[:_LONGEST_REASON]
