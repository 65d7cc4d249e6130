"""Token ids to streamed text: no half characters, and stop strings cut exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns token ids into text piece by piece; the pieces joined are the text of all ids.

    A character whose bytes are spread over tokens decodes to U+FFFD until its last byte is there, so trailing
    replacement characters are held back. Only a window of ids is decoded anew for each token: it begins with ids
    whose text is out already, because a tokenizer may treat the first id of a text in its own way.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the window
        self._settled = 0  # ids of the window whose text is out
        self._out = 0  # characters of the window's text that are out

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._out :]
        self._out = max(self._out, len(certain))
        if certain == text:
            self._shift_window(len(text))
        return piece

    def _shift_window(self, length: int) -> None:
        """Drops the ids before the newest settled ones, unless those have no text of their own to begin with."""
        newest = self._ids[self._settled :]
        own_text = self._decode(newest)
        if own_text:
            self._ids, length = newest, len(own_text)
        self._settled, self._out = len(self._ids), length

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        piece = self._decode(self._ids)[self._out :] if self._ids else ""
        self._ids, self._settled, self._out = [], 0, 0
        return piece


class StopFilter:
    """Lets text through up to the first stop string, holding back only what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that is certain to precede any stop string. Sets `matched` when one is whole."""
        if not self._stops:
            return text
        text = self._held + text
        # The one that is whole first, so that the answer does not depend on how the text was cut into pieces.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """One request's output text. `push` and `finish` return increments; `stop` is the stop string found, if any.

    min_tokens: the text of so many tokens goes out as it is; stop strings are looked for in what follows.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str] | None, stops: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(decode) if decode else None
        self._filter = StopFilter(stops)
        self._unchecked = min_tokens

    @property
    def stop(self) -> str | None:
        return self._filter.matched

    def push(self, token_id: int) -> str:
        if self._detokenizer is None:
            return ""
        piece = self._detokenizer.push(token_id)
        if self._unchecked > 0:
            self._unchecked -= 1
            return piece
        return self._filter.push(piece)

    def finish(self) -> str:
        """The rest of the text, once no more tokens come."""
        if self._detokenizer is None or self.stop is not None:
            return ""
        text = self._filter.push(self._detokenizer.flush())
        return text if self.stop is not None else text + self._filter.flush()
