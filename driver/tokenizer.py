"""Text to token ids and back, through the `tokenizers` library alone: importing transformers takes seconds."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import tokenizers

from scheduler.params import InvalidRequest

_SHRINKING = 4  # times that normalisation may shorten a text
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_characters() -> dict[str, int]:
    """The byte that each character stands for in a byte-level vocabulary: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_characters()


class TokenizerError(ValueError):
    """A tokenizer that cannot be read."""


class Tokenizer:
    """A model folder's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        """Raises TokenizerError for a damaged tokenizer file."""
        settings = _read_settings(folder / "tokenizer_config.json")
        self._set(_load_backend(folder), settings, _chat_template(folder, settings))

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that `parts` describes, in another process or on another machine."""
        tokenizer = cls.__new__(cls)
        tokenizer._set(_plain(tokenizers.Tokenizer.from_str(parts["backend"])), parts["settings"], parts["template"])
        return tokenizer

    def _set(self, backend: tokenizers.Tokenizer, settings: dict[str, Any], template: str | None) -> None:
        self._backend, self._settings, self._template_source = backend, settings, template
        self._template: Any = None

    def parts(self) -> dict[str, Any]:
        """All that it takes to make it again, as text and plain mappings."""
        settings = {name: self._settings[name] for name in _SPECIAL_TOKENS if name in self._settings}
        return {"backend": self._backend.to_str(), "settings": settings, "template": self._template_source}

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The id of the tokenizer's own end token, if it names one."""
        token = self._special("eos_token")
        token_id = self._backend.token_to_id(token) if token else None
        return frozenset() if token_id is None else frozenset({token_id})

    def encode(self, text: str, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Raises InvalidRequest for a string that is not text, with half of a surrogate pair, or has no tokens here.

        most_tokens: a text that must be longer than that is refused before the work is done.
        """
        if most_tokens is not None and len(text) > self.most_characters(most_tokens):
            raise InvalidRequest(f"the text has {len(text)} characters, more than {most_tokens} tokens can stand for")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text cannot be encoded: {error}") from error
        # A batch of one lets other threads go on meanwhile; `encode` does not.
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except Exception as error:  # of whatever kind the library's are
            raise InvalidRequest(f"this model's tokenizer cannot encode the text: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """The template's source, if the model has one."""
        return self._template_source

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest entry of the vocabulary."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def most_characters(self, most_tokens: int) -> int:
        """A text with more characters has more tokens than that for sure. Normalising may shorten text somewhat."""
        return _SHRINKING * self.longest_token * most_tokens

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], most_tokens: int | None = None, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, laid out by the model's chat template, up to where the assistant answers.

        most_tokens: as in `encode`. variables: of the template, beside the messages: `tools`, or one that this
        template alone knows.
        Raises InvalidRequest when the model has no template or the template refuses the messages.
        """
        if self._template_source is None:
            raise InvalidRequest("this model has no chat template; send a plain prompt")
        specials = {name: token for name in _SPECIAL_TOKENS if (token := self._special(name)) is not None}
        usual = {"add_generation_prompt": True, "tools": None, "documents": None, **specials}
        try:
            if self._template is None:
                self._template = _chat_environment().from_string(self._template_source)
            text = self._template.render({**usual, **variables, "messages": list(messages)})
        except Exception as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        return self.encode(text, False, most_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """A token's own bytes, which need not be whole characters; a special token's are its name. None without any."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return None
        if token_id not in self._added:
            if self._is_byte_level and all(character in _BYTES for character in piece):
                return bytes(_BYTES[character] for character in piece)
            if (found := _BYTE_PIECE.fullmatch(piece)) is not None:
                return bytes([int(found[1], 16)])
            piece = piece.replace("\u2581", " ")  # as SentencePiece writes a space
        return piece.encode()

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves it out."""
        return token_id in self._added and self._added[token_id].special

    @functools.cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self._backend.get_added_tokens_decoder()

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def _special(self, name: str) -> str | None:
        value = self._settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, or None when it has none: then only token ids can be served."""
    files = ("tokenizer.json", "tokenizer.model", "vocab.json")
    return Tokenizer(folder) if any((folder / name).is_file() for name in files) else None


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            backend = tokenizers.Tokenizer.from_file(str(path))
        else:  # an older format, which only transformers can convert
            from transformers import AutoTokenizer

            backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    except Exception as error:
        raise TokenizerError(f"cannot read the tokenizer in {folder}: {error}") from error
    return _plain(backend)


def _plain(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path} must hold a JSON object, it holds a {type(settings).__name__}")
    return settings


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"cannot read {path}: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    if not isinstance(template, str | None):
        raise TokenizerError(f"{folder}: the chat template must be text, it is {template!r:.100}")
    return template


def _chat_environment() -> Any:
    """Jinja as transformers sets it up for chat templates: sandboxed, with its few helpers."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; when serving, its content stands as it is."""

        tags: ClassVar = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
