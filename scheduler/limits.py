"""What bounds a step, and the order in which requests are served."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.request import Request

POLICIES = ("fcfs", "priority", "shortest-prefill")

# Aging. A request is served as if it had arrived this many steps later for each level of its priority number, or for
# each token of its prompt. Newer requests can pass it only during that many steps, so none starves.
STEPS_PER_PRIORITY = 1000
STEPS_PER_PROMPT_TOKEN = 0.25


@dataclass(frozen=True, slots=True)
class Limits:
    """max_num_batched_tokens: tokens a step computes at most. max_num_seqs: requests that run at once at most.

    No more requests run than the token budget has tokens, so that no decode ever waits for its turn.

    policy: `fcfs` serves by arrival, `priority` lower priority numbers first, `shortest-prefill` shorter prompts first;
        the last two with aging (STEPS_PER_PRIORITY, STEPS_PER_PROMPT_TOKEN).
    chunked_prefill: whether prompts may be cut. If not, steps are either whole prompts or decodes, prompts first, as
        in engines before chunked prefill; the token budget must then hold the longest prompt.
    max_partial_prefills: prompts longer than long_prefill_token_threshold that may be in mid-prefill at once; 0 for
        any number. Shorter ones pass those that wait for this.
    long_prefill_token_threshold: tokens of one prompt in a step while other prompts could use the rest; 0 for any.
        Without chunked prefill it only says which prompts are long.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    policy: str = "fcfs"
    chunked_prefill: bool = True
    max_partial_prefills: int = 0
    long_prefill_token_threshold: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_partial_prefills", 0),
            ("long_prefill_token_threshold", 0),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")

    @property
    def num_rows(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def virtual_arrival(self, request: Request, step: int) -> float:
        """The step at which the request counts as arrived; requests are served in this order, then by arrival."""
        if self.policy == "priority":
            return step + request.params.priority * STEPS_PER_PRIORITY
        if self.policy == "shortest-prefill":
            return step + request.num_prompt * STEPS_PER_PROMPT_TOKEN
        return step

    def is_long(self, num_tokens: int) -> bool:
        return num_tokens > self.long_prefill_token_threshold
