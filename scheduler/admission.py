"""How a request's row starts: what the workers must know of it, told once."""

from __future__ import annotations

from scheduler.plan import Admission, Extras
from scheduler.request import Request


def admission_of(request: Request) -> Admission:
    """Of a request that has been given its row; its first `scheduled` tokens are in shared blocks."""
    params = request.params
    return Admission(
        request.row,
        list(request.tokens),
        request.seed,
        float(params.temperature),
        params.top_k,
        float(params.top_p),
        float(params.min_p),
        request.scheduled,
        _extras(request),
    )


def _extras(request: Request) -> Extras | None:
    """None when everything is as it is by default."""
    params, num_prompt = request.params, request.num_prompt
    biases = params.logit_bias or {}
    holds_end = params.min_tokens > len(request.tokens) - num_prompt
    guide = params.guide
    extras = Extras(
        num_prompt,
        float(params.frequency_penalty),
        float(params.presence_penalty),
        float(params.repetition_penalty),
        list(biases),
        list(biases.values()),
        params.min_tokens if holds_end else 0,
        sorted(request.stop_ids) if holds_end or guide else [],
        params.logprobs,
        None if request.is_scored else params.prompt_logprobs,
        0 if request.is_scored else len(request.prompt_logprobs),
        (guide.kind, guide.text) if guide else None,
    )
    return None if extras == Extras(num_prompt) else extras
