"""Chunked-prefill scheduling: each step mixes every running decode with as much prefill as the token budget allows.

The method is that of SARATHI (arXiv 2308.16369), Sarathi-Serve (arXiv 2403.02310) and Dynamic SplitFuse
(DeepSpeed-FastGen): decodes first, then prompts already begun, then waiting ones, the last one cut so that the step
is exactly full.
"""

from __future__ import annotations

from collections import deque

from scheduler.blocks import BlockPool
from scheduler.frame import StepResult
from scheduler.limits import Limits
from scheduler.params import InvalidRequest
from scheduler.plan import Admission, Chunk, StepPlan, block_weight, row_weight, rows_checksum
from scheduler.prefix import PrefixCache
from scheduler.request import Phase, Request
from scheduler.step import BegunChunk, Counters, Draft, StepInFlight


class Scheduler:
    """Decides what each step computes. Knows no clock, no device and no network.

    `schedule` may be called again before the result of the plan it returned is in; the caller bounds how often.
    Results must be passed to `update` in order.
    """

    def __init__(self, limits: Limits, pool: BlockPool, epoch: int = 0, prefix_caching: bool = True) -> None:
        self.limits = limits
        self.pool = pool
        self.epoch = epoch
        self._prefixes = PrefixCache(pool, prefix_caching)
        self.counters = Counters()
        self.waiting: list[Request] = []  # in their order
        self.running: list[Request] = []  # likewise
        self.in_flight: deque[StepInFlight] = deque()
        self._free_rows = list(range(limits.num_rows - 1, -1, -1))
        self._decoding: dict[int, Request] = {}  # row -> request, as the workers hold it: in order of joining
        self._decodes: list[Request] = []  # the decodes of the last plan, in the order of `running`
        self._block_sums: dict[int, int] = {}
        self._weights = 0  # of the decoding rows, kept up to date: in steady decode no row is looked at for it
        self._row_sum = 0  # of the decoding rows' numbers, each plus one
        self._leaving: list[int] = []  # decoding rows given up since the last plan
        self._arrivals = 0
        self._step = 0
        self._last_ended = -1
        self._agreed = (-1, 0)

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
        request.order = (self.limits.virtual_arrival(request, self._step), self._arrivals)
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
        draft = Draft(StepPlan(self.epoch, self._step, agreed=self._agreed), self.limits.max_num_batched_tokens)
        if self.limits.chunked_prefill:
            self._schedule_decodes(draft)
            self._schedule_begun_prefills(draft)
            self._admit_waiting(draft)
            self._fill_up(draft)
        else:
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
        for request, preemptions, computed in entry.filled:
            if request.row >= 0 and request.preemptions == preemptions:
                self._prefixes.publish(request, computed)
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
        draft.budget -= len(draft.decodes)

    def _schedule_begun_prefills(self, draft: Draft) -> None:
        for request in [r for r in self.running if r.phase is Phase.PREFILL]:
            if draft.budget > 0 and request.phase is Phase.PREFILL:
                self._schedule_chunk(draft, request)

    def _admit_waiting(self, draft: Draft) -> None:
        """Starts waiting requests in order. Not in a step that had to preempt: that would only swap victims."""
        index = 0
        while index < len(self.waiting) and draft.budget > 0 and self._free_rows and not draft.preempted:
            request = self.waiting[index]
            if self._must_let_others_pass(request):
                index += 1
                continue
            shared = self._prefixes.find(request)
            if request.in_flight or not self._has_room_for(request, shared, draft.budget):
                return
            self.waiting.pop(index)
            self._start(draft, request, shared)
            self._schedule_chunk(draft, request)

    def _fill_up(self, draft: Draft) -> None:
        """Gives what is left of the budget to the prompts that the long-prefill threshold held back, in order."""
        for chunk in draft.chunks:
            more = self._affordable(chunk.request, draft.budget)
            if more > 0 and not draft.preempted:
                self._extend(draft, chunk, more)

    # ---- pieces

    def _must_let_others_pass(self, request: Request) -> bool:
        """Whether a long prompt must wait because as many as may are in mid-prefill already."""
        limit = self.limits.max_partial_prefills
        if not limit or not self.limits.is_long(request.num_known):
            return False
        begun = sum(r.phase is Phase.PREFILL and self.limits.is_long(r.num_known) for r in self.running)
        return begun >= limit

    def _schedule_chunk(self, draft: Draft, request: Request) -> None:
        """Computes as many of the request's known tokens as budget, threshold and blocks allow, if any."""
        most = min(draft.budget, self.limits.long_prefill_token_threshold or draft.budget)
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
        chunk.length += length
        request.scheduled += length
        draft.budget -= length

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
        added = sum(block_weight(index, block) for index, block in enumerate(blocks, start=len(request.blocks)))
        self._block_sums[request.row] += added
        if request.row in self._decoding:
            self._weights += row_weight(request.row, 0, added)
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
        self._block_sums[request.row] = 0
        if shared:
            self.pool.share(shared)
            self._give_blocks(draft, request, list(shared))
        request.scheduled = len(shared) * self.pool.block_size
        request.published = len(shared)
        if not request.preemptions:
            request.cached_tokens = request.scheduled
        self.counters.cached_tokens += request.scheduled
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
                request.scheduled,
            )
        )

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks, request.last_step, self._last_ended)
        request.blocks = []
        if request.row in self._decoding:
            self._leave(request.row)
        del self._block_sums[request.row]
        self._free_rows.append(request.row)
        request.row = -1

    # ---- the plan

    def _publish(self, draft: Draft) -> None:
        """Turns the draft into the step: what changed in the decoding set, and what the workers must then hold."""
        plan, sampled, filled = draft.plan, [], []
        for chunk in draft.chunks:
            request = chunk.request
            sample = request.scheduled == request.num_known
            plan.chunks.append(Chunk(request.row, chunk.start, chunk.length, sample))
            filled.append((request, request.preemptions, request.scheduled))
            if sample:
                sampled.append(request)
                request.phase = Phase.DECODE
                request.in_flight += 1
        self._update_decoding_set(draft)
        plan.num_decodes = len(self._decoding)
        plan.checksum = rows_checksum(self._weights)
        self._weights += self._row_sum * row_weight(0, 1, 0)
        block_size = self.pool.block_size
        for request in self._decoding.values():
            request.scheduled += 1
            request.in_flight += 1
            if request.scheduled % block_size == 0:
                filled.append((request, request.preemptions, request.scheduled))
        sampled += self._decoding.values()
        self._step += 1
        self.in_flight.append(StepInFlight(plan.step, sampled, filled))
        self.counters.steps += 1
        self.counters.prefill_tokens += plan.num_prefill_tokens
        self.counters.decode_tokens += plan.num_decodes

    def _update_decoding_set(self, draft: Draft) -> None:
        plan = draft.plan
        if draft.decodes != self._decodes or self._leaving:
            rows = {request.row for request in draft.decodes}
            for row in [row for row in self._decoding if row not in rows]:
                self._leave(row)
            plan.leave, self._leaving = self._leaving, []
            for request in draft.decodes:
                if request.row not in self._decoding:
                    self._join(request)
                    plan.join.append(request.row)
            self._decodes = draft.decodes

    def _join(self, request: Request) -> None:
        row = request.row
        self._decoding[row] = request
        self._weights += row_weight(row, request.scheduled, self._block_sums[row])
        self._row_sum += row + 1

    def _leave(self, row: int) -> None:
        request = self._decoding.pop(row)
        self._weights -= row_weight(row, request.scheduled, self._block_sums[row])
        self._row_sum -= row + 1
        self._leaving.append(row)


def _insert(requests: list[Request], request: Request) -> None:
    """Inserts in order of (priority, arrival); newcomers go to the end in one comparison."""
    position = len(requests)
    while position and requests[position - 1].order > request.order:
        position -= 1
    requests.insert(position, request)
