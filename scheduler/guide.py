"""What a request's output must match, as asked for: one of a JSON value, a schema, a regex, choices or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_GUIDE_CHARACTERS = 64 * 1024
MAX_CHOICES = 1000


class InvalidGuide(ValueError):
    """A guide that is none; the message names the value and the limit."""


@dataclass(frozen=True, slots=True)
class Guide:
    """Exactly one of these is given.

    json_object: any JSON object. json_schema: JSON that fits the schema, a mapping or its text; kept as text.
    regex: text that matches as a whole. choice: one of these strings. grammar: a context-free grammar in Lark's syntax.

    Raises InvalidGuide.
    """

    json_object: bool = False
    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise InvalidGuide(f"guide's json_object must be true or false, got {self.json_object!r}")
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidGuide(f"guide's {name} must be a non-empty string, got {value!r}")
        given = [field.name for field in fields(self) if getattr(self, field.name)]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise InvalidGuide(f"guide needs exactly one of {names}, got {', '.join(given) or 'none'}")
        if len(self.text) > MAX_GUIDE_CHARACTERS:
            raise InvalidGuide(
                f"guide's {self.kind} may have at most {MAX_GUIDE_CHARACTERS} characters, got {len(self.text)}"
            )

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(field.name for field in fields(self) if getattr(self, field.name))

    @property
    def text(self) -> str:
        """What it says, as text: choices as a JSON list, nothing for json_object."""
        value = getattr(self, self.kind)
        return "" if value is True else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    @classmethod
    def of(cls, value: Any) -> Guide:
        """A guide from itself or from a mapping of its fields."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise InvalidGuide(f"guide must be a mapping, got {value!r}")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(map(str, value)) - set(known))
        if unknown:
            raise InvalidGuide(f"guide has unknown {', '.join(map(repr, unknown))}; known: {known}")
        return cls(**value)


def _schema_text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidGuide(f"guide's json_schema is not JSON: {error}") from error
    if not isinstance(value, str):
        raise InvalidGuide(f"guide's json_schema must be a mapping or its JSON text, got {value!r}")
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidGuide(f"guide's json_schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidGuide(f"guide's json_schema must be a JSON object, got {value[:100]!r}")
    return value


def _choices(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise InvalidGuide(f"guide's choice must be a list of non-empty strings, got {value!r}")
    if len(value) > MAX_CHOICES:
        raise InvalidGuide(f"guide's choice may hold at most {MAX_CHOICES} strings, got {len(value)}")
    return tuple(value)
