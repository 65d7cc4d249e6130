"""Chunked-prefill scheduling: each step mixes every running decode with as much prefill as the token budget allows.

The method is that of SARATHI (arXiv 2308.16369), Sarathi-Serve (arXiv 2403.02310) and Dynamic SplitFuse
(DeepSpeed-FastGen): decodes first, then prompts already begun, then waiting ones, the last one cut so that the step
is exactly full.
"""

from __future__ import annotations

from collections import deque

from scheduler.admission import admission_of
from scheduler.blocks import BlockPool
from scheduler.budget import StepBudget, TokenBudget
from scheduler.decoding import DecodingSet
from scheduler.frame import StepResult
from scheduler.limits import Limits
from scheduler.params import InvalidRequest
from scheduler.plan import Chunk, StepPlan
from scheduler.prefix import PrefixCache
from scheduler.request import Phase, Request
from scheduler.step import BegunChunk, Counters, Draft, StepInFlight, take_extras
from scheduler.step_time import StepWork, chunk_pairs


class Scheduler:
    """Decides what each step computes. Knows no clock, no device and no network.

    `schedule` may be called again before the result of the plan it returned is in; the caller bounds how often.
    Results must be passed to `update` in order.
    """

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        epoch: int = 0,
        prefix_caching: bool = True,
        budget: TokenBudget | None = None,
    ) -> None:
        self.limits = limits
        self.budget = budget or TokenBudget(limits.max_num_batched_tokens)
        self.counters = Counters()
        self.waiting: list[Request] = []  # in their order
        self.running: list[Request] = []  # likewise
        # For the caller of `update` to take out: who could not follow its guide, and why; whose logits were not finite.
        self.failed: list[tuple[Request, str]] = []
        self.not_finite: list[Request] = []
        self.only: Request | None = None  # while set, no other waiting request is started
        self._prefix_caching = prefix_caching
        self._arrivals = 0
        self._start_epoch(pool, epoch)

    def _start_epoch(self, pool: BlockPool, epoch: int) -> None:
        self.pool = pool
        self.epoch = epoch
        self.in_flight: deque[StepInFlight] = deque()
        self._prefixes = PrefixCache(pool, self._prefix_caching)
        self._free_rows = list(range(self.limits.num_rows - 1, -1, -1))
        self._decoding = DecodingSet()
        self._step = 0
        self._last_ended = -1
        self._agreed = (-1, 0)

    def next_epoch(self) -> None:
        """The workers' caches are void and steps in flight are lost: every running request waits to be computed again.

        Their streams go on with the next token, since known tokens are kept and sampling depends on their count alone.
        """
        self._start_epoch(BlockPool(self.pool.num_blocks, self.pool.block_size), self.epoch + 1)
        lost, self.running = self.running, []
        for request in lost:
            request.phase = Phase.WAITING
            request.row = -1
            request.blocks = []
            request.scheduled = request.published = 0
            request.preemptions += 1
            _insert(self.waiting, request)
        for request in self.waiting:  # also of those that were preempted while a step sampled them
            request.in_flight, request.last_step = 0, -1
        self.check()

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest when the KV cache, or an uncut step, could never hold it."""
        most = request.num_prompt + request.max_tokens - 1  # the last token's keys and values are never computed
        needed = self.pool.blocks_for(most)
        if needed > self.pool.num_blocks:
            raise InvalidRequest(
                f"a prompt of {request.num_prompt} tokens and max_tokens {request.max_tokens} need {needed} KV blocks "
                f"of {self.pool.block_size} tokens, but the KV cache has {self.pool.num_blocks}"
            )
        if not self.limits.chunked_prefill and most > self.limits.max_num_batched_tokens:
            raise InvalidRequest(
                f"a prompt of {request.num_prompt} tokens and max_tokens {request.max_tokens} do not fit a step of "
                f"{self.limits.max_num_batched_tokens} tokens, and chunked prefill is off"
            )
        request.order = (self.limits.virtual_arrival(request, self.counters.steps), self._arrivals)
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
        draft = Draft(StepPlan(self.epoch, self._step, agreed=self._agreed))
        if self.limits.chunked_prefill:
            self._schedule_decodes(draft)
            self._schedule_begun_prefills(draft)
            self._admit_waiting(draft)
            self._fill_up(draft)
        else:
            draft.budget = self._budget_beside([])
            self._admit_waiting(draft)
            if not draft.chunks:
                self._schedule_decodes(draft)
        if not draft.decodes and not draft.chunks:
            return None
        self._publish(draft)
        return draft.plan

    def update(self, result: StepResult, tokens_crc: int) -> list[tuple[Request, int]]:
        """Takes in the oldest awaited step's result; returns (request, new token) for those that have not ended.

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
        for request, token in zip(entry.sampled, result.tokens, strict=True):
            if token < 0 and request.phase is not Phase.FINISHED:
                self._prefixes.withdraw(request)
                self.finish(request, "error")
                self.not_finite.append(request)
                self.counters.not_finite += 1
        for request, preemptions, computed in entry.filled:
            if request.row >= 0 and request.preemptions == preemptions:
                self._prefixes.publish(request, computed)
        self.pool.step_ended(entry.step)
        for request, reason in take_extras(entry, result.extras) if result.extras else ():
            if request.phase is not Phase.FINISHED:
                self.finish(request, "error")
                self.failed.append((request, reason))
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
        self.pool.check(block for request in self.running for block in request.blocks)
        if sorted([r.row for r in self.running] + self._free_rows) != list(range(self.limits.num_rows)):
            raise RuntimeError("rows are lost or doubled")
        if any(request.blocks or request.row >= 0 for request in self.waiting):
            raise RuntimeError("a waiting request holds blocks or a row")

    # ---- the phases of `schedule`, in order

    def _schedule_decodes(self, draft: Draft) -> None:
        """Every decoding request computes its newest token, as long as blocks last."""
        step, block_size = draft.plan.step, self.pool.block_size
        for request in self.running[:]:
            if request.phase is not Phase.DECODE:
                continue  # in mid-prefill, or preempted by an earlier one in this very loop
            if len(request.tokens) + request.in_flight >= request.num_prompt + request.max_tokens:
                continue  # all its tokens are on their way
            if request.scheduled < len(request.blocks) * block_size or self._grow(
                draft, request, request.scheduled + 1
            ):
                request.last_step = step
                draft.decodes.append(request)
        draft.budget = self._budget_beside(draft.decodes)

    def _schedule_begun_prefills(self, draft: Draft) -> None:
        for request in [r for r in self.running if r.phase is Phase.PREFILL]:
            if request.phase is Phase.PREFILL:
                self._schedule_chunk(draft, request)

    def _admit_waiting(self, draft: Draft) -> None:
        """Starts waiting requests in order. Not in a step that had to preempt: that would only swap victims."""
        index = 0
        while index < len(self.waiting) and self._free_rows and not draft.preempted:
            request = self.waiting[index]
            if self.only not in (None, request) or self._must_let_others_pass(request):
                index += 1
                continue
            shared = self._prefixes.find(request)
            limit = draft.budget.chunk_limit(len(shared) * self.pool.block_size)
            if limit <= 0 or request.in_flight or not self._has_room_for(request, shared, limit):
                return
            self.waiting.pop(index)
            self._start(draft, request, shared)
            self._schedule_chunk(draft, request)

    def _fill_up(self, draft: Draft) -> None:
        """Gives what is left of the budget to the prompts that the long-prefill threshold held back, in order."""
        for chunk in draft.chunks:
            more = self._affordable(chunk.request, draft.budget.chunk_limit(chunk.request.scheduled, begun=True))
            if more > 0 and not draft.preempted:
                self._extend(draft, chunk, more)

    # ---- pieces

    def _budget_beside(self, decodes: list[Request]) -> StepBudget:
        """What these decodes leave for prefill. Their contexts are summed only where a target makes them count."""
        counts = self.budget.target_seconds is not None
        context = sum([request.scheduled for request in decodes]) + len(decodes) if counts else 0
        return self.budget.for_step(len(decodes), context)

    def _must_let_others_pass(self, request: Request) -> bool:
        """Whether a long prompt must wait because as many as may are in mid-prefill already."""
        limit = self.limits.max_partial_prefills
        if not limit or not self.limits.is_long(request.num_known):
            return False
        begun = sum(r.phase is Phase.PREFILL and self.limits.is_long(r.num_known) for r in self.running)
        return begun >= limit

    def _schedule_chunk(self, draft: Draft, request: Request) -> None:
        """Computes as many of the request's known tokens as budget, threshold and blocks allow, if any."""
        limit = draft.budget.chunk_limit(request.scheduled)
        if limit <= 0:
            return
        threshold = self.limits.long_prefill_token_threshold if self.limits.chunked_prefill else 0
        most = min(limit, threshold or limit)
        length = self._affordable(request, most)
        if length <= 0:
            if not self._grow(draft, request, request.scheduled + 1):
                return
            length = 1
        chunk = BegunChunk(request, request.scheduled, 0)
        draft.chunks.append(chunk)
        request.last_step = draft.plan.step
        self._extend(draft, chunk, length)

    def _extend(self, draft: Draft, chunk: BegunChunk, length: int) -> None:
        request = chunk.request
        self._grow(draft, request, request.scheduled + length)
        draft.budget.spend(request.scheduled, length, begun=chunk.length > 0)
        chunk.length += length
        request.scheduled += length

    def _affordable(self, request: Request, most: int) -> int:
        """How many of the request's known tokens can be computed next with at most `most` and the free blocks."""
        room = (len(request.blocks) + self.pool.num_free) * self.pool.block_size
        return min(request.num_known, room, request.scheduled + most) - request.scheduled

    def _grow(self, draft: Draft, request: Request, num_tokens: int) -> bool:
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
        self._give_blocks(draft, request, self.pool.take(missing))
        return True

    def _give_blocks(self, draft: Draft, request: Request, blocks: list[int]) -> None:
        self._decoding.blocks_added(request, blocks)
        request.blocks += blocks
        draft.plan.new_blocks.append((request.row, blocks))

    def _victim(self, draft: Draft, request: Request) -> Request | None:
        """The running request that is last in order, unless it takes part in this step already."""
        victim = self.running[-1]
        if victim.order < request.order or victim.last_step == draft.plan.step:
            return None
        return victim

    def _preempt(self, draft: Draft, victim: Request) -> None:
        """Takes the victim's blocks; it waits, and later computes again all tokens it then knows."""
        draft.preempted = True
        self._stop_running(victim)
        victim.phase = Phase.WAITING
        victim.scheduled = 0
        victim.preemptions += 1
        self.counters.preemptions += 1
        _insert(self.waiting, victim)

    def _has_room_for(self, request: Request, shared: list[int], budget: int) -> bool:
        """Whether starting the request leaves a little room for those that run; always true when none does."""
        cached = len(shared) * self.pool.block_size
        missing = request.num_known - cached
        if not self.limits.chunked_prefill and missing > budget:
            return False
        free = self.pool.num_free - self.pool.num_unused(shared)
        if not self.running and self.limits.chunked_prefill:
            return free > 0
        first = missing if request.preemptions or not self.limits.chunked_prefill else min(missing, budget)
        reserve = max(1, self.pool.num_blocks // 100) if self.running else 0
        return free >= self.pool.blocks_for(cached + first) - len(shared) + reserve

    def _start(self, draft: Draft, request: Request, shared: list[int]) -> None:
        request.row = self._free_rows.pop()
        request.phase = Phase.PREFILL
        _insert(self.running, request)
        self._decoding.open_row(request.row)
        if shared:
            self.pool.share(shared)
            self._give_blocks(draft, request, list(shared))
        request.scheduled = len(shared) * self.pool.block_size
        request.published = len(shared)
        if not request.preemptions:
            request.cached_tokens = request.scheduled
        self.counters.cached_tokens += request.scheduled
        draft.plan.admissions.append(admission_of(request))

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks, request.last_step, self._last_ended)
        request.blocks = []
        self._decoding.close_row(request)
        self._free_rows.append(request.row)
        request.row = -1

    # ---- the plan

    def _publish(self, draft: Draft) -> None:
        """Turns the draft into the step: what changed in the decoding set, and what the workers must then hold."""
        plan, sampled, filled, pairs = draft.plan, [], [], 0
        for chunk in draft.chunks:
            pairs += chunk_pairs(chunk.start, chunk.length)
            request = chunk.request
            sample = request.scheduled == request.num_known
            plan.chunks.append(Chunk(request.row, chunk.start, chunk.length, sample))
            filled.append((request, request.preemptions, request.scheduled))
            if sample:
                sampled.append(request)
                request.phase = Phase.DECODE
                request.in_flight += 1
        decoding, block_size = self._decoding, self.pool.block_size
        decoding.put_into(plan, draft.decodes)
        num_rows = len(plan.chunks) + plan.num_decodes
        work = StepWork(plan.num_tokens, num_rows, pairs, decoding.context + plan.num_decodes)
        decoding.advance()
        for request in decoding.requests.values():
            request.scheduled += 1
            request.in_flight += 1
            if request.scheduled % block_size == 0:
                filled.append((request, request.preemptions, request.scheduled))
        sampled += decoding.requests.values()
        self._step += 1
        chunks = [chunk.request for chunk in draft.chunks]
        budget = plan.num_decodes + draft.budget.granted
        self.in_flight.append(StepInFlight(plan.step, sampled, filled, chunks, work, self.budget.predict(work), budget))
        self.counters.steps += 1
        self.counters.late_steps += draft.budget.forced
        self.counters.prefill_tokens += plan.num_prefill_tokens
        self.counters.decode_tokens += plan.num_decodes


def _insert(requests: list[Request], request: Request) -> None:
    """Inserts in order of (priority, arrival); newcomers go to the end in one comparison."""
    position = len(requests)
    while position and requests[position - 1].order > request.order:
        position -= 1
    requests.insert(position, request)
