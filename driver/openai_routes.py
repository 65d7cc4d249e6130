"""The routes of the OpenAI interface, and vLLM's beside it for token ids."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

from driver import openai_chat, openai_completions
from driver.api_errors import json_response
from driver.front import Front, ServedModel
from driver.intake import checked_ids
from driver.openai_logprobs import TokenNames
from driver.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from driver.tool_calls import read_tool_use
from scheduler.params import InvalidRequest


class ErrorText(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorText


# For the OpenAPI document: any of these statuses may come, and none of FastAPI's own 422.
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}


def add_routes(app: FastAPI, front: Front) -> None:
    """Adds them to an application."""

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> Response:
        """The one model that is served."""
        return json_response({"object": "list", "data": [_about(front, await front.model())]})

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> Response:
        """That model, by its name."""
        return json_response(_about(front, await front.model(name)))

    @app.post("/v1/completions", responses=ERRORS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Completes prompts; a stream of server-sent events with `stream`."""
        return await openai_completions.answer(front, request, body)

    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Says the next message of a conversation; a stream of server-sent events with `stream`."""
        return await openai_chat.answer(front, request, body)

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeBody) -> Response:
        """The token ids of a prompt or a conversation."""
        served = await front.model(body.model)
        ids = await _encoded(front, served, body)
        answer = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids}
        if body.return_token_strs:
            names = TokenNames(served.tokenizer)
            answer["token_strs"] = [names.text(token_id) for token_id in ids]
        return json_response(answer)

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        served = await front.model(body.model)
        ids = checked_ids(body.tokens, served.vocab_size)
        return json_response({"prompt": await front.decode(served, ids)})


def _about(front: Front, model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": front.began,
        "owned_by": "quadriga",
        "max_model_len": model.max_model_len,
    }


async def _encoded(front: Front, model: ServedModel, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages to tokenize")
    if body.prompt is not None:
        return await front.encode(model, body.prompt, body.add_special_tokens is not False)
    tools = read_tool_use(body.tools, None, model.tokenizer and model.tokenizer.chat_template)
    return await openai_chat.encode(front, model, body, tools.tools)
