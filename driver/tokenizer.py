"""Text to token ids and back, through the `tokenizers` library alone: importing transformers takes seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import tokenizers

from scheduler.params import InvalidRequest

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerError(ValueError):
    """A tokenizer that cannot be read."""


class Tokenizer:
    """A model folder's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        """Raises TokenizerError for a damaged tokenizer file."""
        self._backend = _load_backend(folder)
        self._settings = _read_settings(folder / "tokenizer_config.json")
        self._template_source = _chat_template(folder, self._settings)
        self._template: Any = None

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The id of the tokenizer's own end token, if it names one."""
        token = self._special("eos_token")
        token_id = self._backend.token_to_id(token) if token else None
        return frozenset() if token_id is None else frozenset({token_id})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequest for a string that is not text: one with half of a surrogate pair."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text cannot be encoded: {error}") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=True)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, laid out by the model's chat template, up to where the assistant answers.

        Raises InvalidRequest when the model has no template or the template refuses the messages.
        """
        if self._template_source is None:
            raise InvalidRequest("this model has no chat template; send a plain prompt")
        try:
            if self._template is None:
                self._template = _chat_environment().from_string(self._template_source)
            text = self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **{name: token for name in _SPECIAL_TOKENS if (token := self._special(name)) is not None},
            )
        except Exception as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def _special(self, name: str) -> str | None:
        value = self._settings.get(name)
        return value.get("content") if isinstance(value, dict) else value


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
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
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
