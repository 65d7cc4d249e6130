"""What clients of the OpenAI interface may send: fields, their types and bounds.

Fields that change nothing in an answer are taken and ignored; one that would change it and cannot be honoured is
refused by name, unless it has the value that asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from driver.chat_messages import ROLES
from scheduler.params import (
    MAX_COUNT,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_STOP_TOKENS,
    MAX_TEMPERATURE,
    SEED_MAX,
    SEED_MIN,
    InvalidRequest,
    SamplingParams,
)

MAX_SEQUENCES = 1 << 16  # of one request; the service's own limits are lower

IGNORED = frozenset(
    {
        *("metadata", "service_tier", "store", "user", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "request_id", "extra_headers"),
    }
)
# Fields that are not supported, and the values of them that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": (),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def check_prompt(value: Any) -> Any:
    """One prompt or a list of them, each text or token ids; the ids' values are judged with the vocabulary at hand."""
    many = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    for at, prompt in enumerate(value if many else [value]):
        where = f"prompt {at}" if many else "it"
        if not isinstance(prompt, str | list):
            raise ValueError(f"{where} must be a string or a list of token ids")
        wrong = None if isinstance(prompt, str) else next((i for i in prompt if type(i) is not int), None)
        if wrong is not None:
            raise ValueError(f"{where} must hold integers alone where it is no string, but has {wrong!r:.100}")
        if not isinstance(prompt, str) and not prompt:
            raise ValueError(f"{where} is empty, at least 1 token is needed")
    return value


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
PromptField = Annotated[Any, BeforeValidator(check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE_SCHEMA = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA, "minItems": 1}]},
        "name": {"type": "string"},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": {"type": "string"},
    },
    "required": ["role", "content"],
}
_TOOL_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}, "parameters": {"type": "object"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}


def _as_documented(schema: dict[str, Any]) -> None:
    """What a body may hold beside its fields: those that are taken and change nothing."""
    schema["properties"].update({name: {} for name in sorted(IGNORED)})
    schema["additionalProperties"] = False


class Body(BaseModel):
    """Of a request; what it does not know by name it refuses."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, json_schema_extra=_as_documented)

    @model_validator(mode="after")
    def refuse_unknown(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or (name in NEUTRAL and (value is None or value in NEUTRAL[name])):
                continue
            if name in NEUTRAL:
                raise ValueError(f"{name} is not supported, got {value!r:.100}")
            raise ValueError(f"unknown field {name!r:.100}")
        return self


Message = Annotated[dict[str, Any], WithJsonSchema(_MESSAGE_SCHEMA)]
Tool = Annotated[dict[str, Any], WithJsonSchema(_TOOL_SCHEMA)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's newer way to say what the older guided_... fields do."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationBody(Body):
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=SEED_MIN, le=SEED_MAX)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_PENALTY)] | None = None
    logit_bias: dict[str, float] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def wants_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def wants_running_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    prompt: PromptField
    best_of: Annotated[int, Field(ge=1, le=MAX_SEQUENCES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]


def sampling_params(body: GenerationBody, **fields: Any) -> SamplingParams:
    """The body's parameters for the engine, and others that only the caller knows. Raises InvalidRequest."""
    names = (
        *("temperature", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos", "priority", "cache_salt"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "stop"),
    )
    values = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        values["top_k"] = max(0, body.top_k)  # -1 is vLLM's way to say all
    if body.logit_bias:
        values["logit_bias"] = body.logit_bias
    guide = guide_of(body)
    if guide is not None:
        values["guide"] = guide
    return SamplingParams.from_mapping({**values, **fields})


def guide_of(body: GenerationBody) -> dict[str, Any] | None:
    """What the text must look like, as SamplingParams.guide has it. Raises InvalidRequest."""
    guides: dict[str, dict[str, Any]] = {}
    form = body.response_format
    if form is not None and form.type == "json_object":
        guides["response_format"] = {"json_object": True}
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise InvalidRequest("response_format: json_schema.schema is missing")
        guides["response_format"] = {"json_schema": form.json_schema.schema_}
    kinds = {"json_": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
    for name, kind in kinds.items():
        asked = {f"guided_{name.strip('_')}": getattr(body, f"guided_{name.strip('_')}")}
        if body.structured_outputs is not None:
            asked[f"structured_outputs.{name.strip('_')}"] = getattr(body.structured_outputs, name)
        for field, value in asked.items():
            if value is not None:
                guides[field] = {kind: _schema(field, value) if kind == "json_schema" else value}
    if body.structured_outputs is not None and body.structured_outputs.json_object:
        guides["structured_outputs.json_object"] = {"json_object": True}
    if len(guides) > 1:
        raise InvalidRequest(f"only one of {', '.join(guides)} can say what the text must look like")
    return next(iter(guides.values()), None)


def _schema(field: str, value: dict[str, Any] | str) -> dict[str, Any]:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field} must be a JSON schema, got {value!r:.100}")
    return schema
