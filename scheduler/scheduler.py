"""Chunked-prefill scheduling: each step mixes every running decode with as much prefill as the token budget allows.

The method is that of SARATHI (arXiv 2308.16369), Sarathi-Serve (arXiv 2403.02310) and Dynamic SplitFuse
(DeepSpeed-FastGen): decodes first, then prompts already begun, then waiting ones, the last one cut so that the step
is exactly full.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scheduler.blocks import BlockPool
from scheduler.frame import StepResult
from scheduler.params import InvalidRequest
from scheduler.plan import Admission, Chunk, StepPlan, block_weight, row_weight, rows_checksum
from scheduler.request import Phase, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """max_num_batched_tokens: tokens a step computes at most. max_num_seqs: requests that run at once at most.

    No more requests run than the token budget has tokens, so that no decode ever waits for its turn.
    """

    max_num_batched_tokens: int
    max_num_seqs: int

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens must be at least 1, got {self.max_num_batched_tokens}")

    @property
    def num_rows(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)


@dataclass(slots=True)
class StepInFlight:
    """A published plan whose result is awaited: the requests whose tokens it samples, in the result's order."""

    step: int
    sampled: list[Request]


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    discarded_tokens: int = 0


@dataclass(slots=True)
class _Draft:
    """The step being put together."""

    plan: StepPlan
    budget: int
    sampled: list[Request] = field(default_factory=list)
    preempted: bool = False


class Scheduler:
    """Decides what each step computes. Knows no clock, no device and no network.

    `schedule` may be called again before the result of the plan it returned is in; the caller bounds how often.
    Results must be passed to `update` in order.
    """

    def __init__(self, limits: Limits, pool: BlockPool, epoch: int = 0) -> None:
        self.limits = limits
        self.pool = pool
        self.epoch = epoch
        self.counters = Counters()
        self.waiting: list[Request] = []  # kept in order of (priority, arrival)
        self.running: list[Request] = []  # likewise
        self.in_flight: deque[StepInFlight] = deque()
        self._free_rows = list(range(limits.num_rows - 1, -1, -1))
        self._decoding: dict[int, Request] = {}  # row -> request, as the workers hold it: in order of joining
        self._block_sums: dict[int, int] = {}
        self._leaving: list[int] = []  # decoding rows given up since the last plan
        self._arrivals = 0
        self._step = 0
        self._last_ended = -1
        self._agreed = (-1, 0)

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest when the KV cache could never hold it."""
        most = request.num_prompt + request.max_tokens
        needed = self.pool.blocks_for(most - 1)  # the last token's keys and values are never computed
        if needed > self.pool.num_blocks:
            raise InvalidRequest(
                f"a prompt of {request.num_prompt} tokens and max_tokens {request.max_tokens} need {needed} KV blocks "
                f"of {self.pool.block_size} tokens, but the KV cache has {self.pool.num_blocks}"
            )
        request.arrival = self._arrivals
        self._arrivals += 1
        _insert(self.waiting, request)

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a request at once; tokens of it that are in flight are discarded when they come."""
        if request.phase is Phase.FINISHED:
            return
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        else:
            self._stop_running(request)
        request.phase = Phase.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.in_flight)

    # ---- one step

    def schedule(self) -> StepPlan | None:
        """The next step's plan, or None when nothing can be computed before further results are in."""
        plan = StepPlan(self.epoch, self._step, agreed=self._agreed)
        draft = _Draft(plan, self.limits.max_num_batched_tokens)
        decodes = self._schedule_decodes(draft)
        self._schedule_begun_prefills(draft)
        self._admit_waiting(draft)
        if not decodes and not plan.chunks:
            return None
        self._publish(draft, decodes)
        return plan

    def update(self, result: StepResult, tokens_crc: int) -> list[tuple[Request, int]]:
        """Takes in the oldest awaited step's result; returns (request, new token) for those still running.

        A request that ends by its own rule (end token, length) is finished here.
        """
        entry = self.in_flight.popleft()
        if (result.epoch, result.step) != (self.epoch, entry.step):
            raise RuntimeError(
                f"result of step {result.step}, epoch {result.epoch} came when step {entry.step}, "
                f"epoch {self.epoch} was awaited"
            )
        if len(result.tokens) != len(entry.sampled):
            raise RuntimeError(f"step {entry.step} samples {len(entry.sampled)} tokens, got {len(result.tokens)}")
        self._last_ended = entry.step
        self._agreed = (entry.step, tokens_crc)
        self.pool.step_ended(entry.step)
        news = []
        for request, token in zip(entry.sampled, result.tokens, strict=True):
            request.in_flight -= 1
            if request.phase is Phase.FINISHED:
                self.counters.discarded_tokens += 1
                continue
            request.tokens.append(token)
            news.append((request, token))
            if token in request.stop_ids:
                self.finish(request, "stop", token)
            elif len(request.tokens) - request.num_prompt >= request.max_tokens:
                self.finish(request, "length")
        return news

    def check(self) -> None:
        """Raises RuntimeError when blocks or rows are lost, doubled or held by a request that does not run."""
        self.pool.check()
        held = [block for request in self.running for block in request.blocks]
        if (
            len(set(held)) != len(held)
            or len(held) + self.pool.num_free + self.pool.num_pending != self.pool.num_blocks
        ):
            raise RuntimeError(f"{len(held)} held blocks, {self.pool.num_free} free of {self.pool.num_blocks}")
        if sorted([r.row for r in self.running] + self._free_rows) != list(range(self.limits.num_rows)):
            raise RuntimeError("rows are lost or doubled")
        if any(request.blocks or request.row >= 0 for request in self.waiting):
            raise RuntimeError("a waiting request holds blocks or a row")

    # ---- the phases of `schedule`, in order

    def _schedule_decodes(self, draft: _Draft) -> list[Request]:
        """Every decoding request computes its newest token, as long as blocks last."""
        decodes = []
        for request in [r for r in self.running if r.phase is Phase.DECODE]:
            if request.phase is not Phase.DECODE:
                continue  # preempted by an earlier one in this very loop
            if request.num_outputs >= request.max_tokens:
                continue  # all its tokens are on their way
            if self._grow(draft, request, request.scheduled + 1):
                draft.budget -= 1
                request.last_step = draft.plan.step
                decodes.append(request)
        return decodes

    def _schedule_begun_prefills(self, draft: _Draft) -> None:
        for request in [r for r in self.running if r.phase is Phase.PREFILL]:
            if draft.budget > 0 and request.phase is Phase.PREFILL:
                self._schedule_chunk(draft, request)

    def _admit_waiting(self, draft: _Draft) -> None:
        """Starts waiting requests in order. Not in a step that had to preempt: that would only swap victims."""
        while self.waiting and draft.budget > 0 and self._free_rows and not draft.preempted:
            request = self.waiting[0]
            if request.in_flight or not self._has_room_for(request, draft.budget):
                return
            self.waiting.pop(0)
            self._start(draft, request)
            self._schedule_chunk(draft, request)

    # ---- pieces

    def _schedule_chunk(self, draft: _Draft, request: Request) -> None:
        """Computes as many of the request's known tokens as budget and blocks allow, at least one or none."""
        length = min(request.num_known - request.scheduled, draft.budget)
        room = (len(request.blocks) + self.pool.num_free) * self.pool.block_size - request.scheduled
        length = min(length, room)
        if length <= 0:
            if not self._grow(draft, request, request.scheduled + 1):
                return
            length = 1
        self._grow(draft, request, request.scheduled + length)
        sample = request.scheduled + length == request.num_known
        draft.plan.chunks.append(Chunk(request.row, request.scheduled, length, sample))
        draft.budget -= length
        request.scheduled += length
        request.last_step = draft.plan.step
        if sample:
            request.in_flight += 1
            draft.sampled.append(request)

    def _grow(self, draft: _Draft, request: Request, num_tokens: int) -> bool:
        """Gives the request blocks for `num_tokens` tokens, preempting later ones. False when it cannot be now."""
        missing = self.pool.blocks_for(num_tokens) - len(request.blocks)
        if missing <= 0:
            return True
        while self.pool.num_free < missing:
            # Blocks that steps in flight still use come back by themselves: rather wait than preempt for them.
            if self.pool.num_free + self.pool.num_pending >= missing:
                return False
            victim = self._victim(draft, request)
            if victim is None:
                return False
            self._preempt(draft, victim)
            if victim is request:
                return False
        blocks = self.pool.take(missing)
        block_sum = self._block_sums[request.row]
        for index, block in enumerate(blocks, start=len(request.blocks)):
            block_sum += block_weight(index, block)
        self._block_sums[request.row] = block_sum
        request.blocks += blocks
        draft.plan.new_blocks.append((request.row, blocks))
        return True

    def _victim(self, draft: _Draft, request: Request) -> Request | None:
        """The youngest running request of the lowest priority, unless it takes part in this step already."""
        victim = self.running[-1]
        if victim.order < request.order or victim.last_step == draft.plan.step:
            return None
        return victim

    def _preempt(self, draft: _Draft, victim: Request) -> None:
        """Takes the victim's blocks; it waits, and later computes again all tokens it then knows."""
        draft.preempted = True
        self._stop_running(victim)
        victim.phase = Phase.WAITING
        victim.scheduled = 0
        victim.preemptions += 1
        self.counters.preemptions += 1
        _insert(self.waiting, victim)

    def _has_room_for(self, request: Request, budget: int) -> bool:
        """Whether starting the request leaves a little room for those that run; always true when none does."""
        if not self.running:
            return self.pool.num_free > 0
        first_chunk = request.num_known if request.preemptions else min(request.num_known, budget)
        reserve = max(1, self.pool.num_blocks // 100)
        return self.pool.num_free >= self.pool.blocks_for(first_chunk) + reserve

    def _start(self, draft: _Draft, request: Request) -> None:
        request.row = self._free_rows.pop()
        request.phase = Phase.PREFILL
        self._block_sums[request.row] = 0
        _insert(self.running, request)
        params = request.params
        draft.plan.admissions.append(
            Admission(
                request.row,
                list(request.tokens),
                request.seed,
                float(params.temperature),
                params.top_k,
                float(params.top_p),
                float(params.min_p),
            )
        )

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks, request.last_step, self._last_ended)
        request.blocks = []
        if request.row in self._decoding:
            del self._decoding[request.row]
            self._leaving.append(request.row)
        del self._block_sums[request.row]
        self._free_rows.append(request.row)
        request.row = -1

    def _publish(self, draft: _Draft, decodes: list[Request]) -> None:
        """Turns the draft into the step: what changed in the decoding set, and what the workers must then hold."""
        plan = draft.plan
        rows = {request.row for request in decodes}
        for row in [row for row in self._decoding if row not in rows]:
            del self._decoding[row]
            self._leaving.append(row)
        plan.leave, self._leaving = self._leaving, []
        for request in decodes:
            if request.row not in self._decoding:
                self._decoding[request.row] = request
                plan.join.append(request.row)
        weights = 0
        for row, request in self._decoding.items():
            weights += row_weight(row, request.scheduled, self._block_sums[row])
            request.scheduled += 1
            request.in_flight += 1
            draft.sampled.append(request)
        plan.num_decodes = len(self._decoding)
        plan.checksum = rows_checksum(weights)
        for request in draft.sampled:
            request.phase = Phase.DECODE
        self._step += 1
        self.in_flight.append(StepInFlight(plan.step, draft.sampled))
        self.counters.steps += 1
        self.counters.prefill_tokens += plan.num_prefill_tokens
        self.counters.decode_tokens += plan.num_decodes


def _insert(requests: list[Request], request: Request) -> None:
    """Inserts in order of (priority, arrival); newcomers go to the end in one comparison."""
    position = len(requests)
    while position and requests[position - 1].order > request.order:
        position -= 1
    requests.insert(position, request)
