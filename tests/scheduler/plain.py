"""The scheduling policy said as plainly as possible, to compare the scheduler with.

Nothing is kept that can be counted: who runs, who waits, what a step holds and what it costs are found by looking at
every request again whenever they are needed. Only blocks and prefixes are the scheduler's own, with tests of their own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from scheduler.blocks import BlockPool
from scheduler.budget import MIN_PREFILL_TOKENS
from scheduler.limits import STEPS_PER_PRIORITY, STEPS_PER_PROMPT_TOKEN, Limits
from scheduler.plan import Admission, Chunk, StepPlan, block_weight, row_weight, rows_checksum
from scheduler.prefix import PrefixCache
from scheduler.request import Phase, Request
from scheduler.step_time import StepCosts, StepWork


@dataclass
class PlainStep:
    """A step in flight.

    computed: who takes part, in which of its runs, and how many of its tokens are computed then.
    budget: tokens it could have had.
    """

    number: int
    sampled: list[Request]
    computed: list[tuple[Request, int, int]]
    work: StepWork
    budget: int


class PlainScheduler:
    """target: what a step with decodes may cost at most, as `costs` says; None for anything."""

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        prefix_caching: bool,
        target: float | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        self.limits, self.pool, self.prefixes = limits, pool, PrefixCache(pool, prefix_caching)
        self.costs, self.target = costs, target if costs is not None else None
        self.requests: list[Request] = []  # that have not ended
        self.in_flight: deque[PlainStep] = deque()
        rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)  # no decode ever waits for its turn
        self.free_rows = list(range(rows))[::-1]  # given up last, used first
        self.decoding: list[tuple[int, Request]] = []  # rows that the workers decode since the last plan, as joined
        self.step, self.last_ended, self.agreed, self.arrivals = 0, -1, (-1, 0), 0
        self.preemptions = self.late_steps = 0

    # ---- what one finds by looking

    def running(self) -> list[Request]:
        return sorted((r for r in self.requests if r.row >= 0), key=lambda r: r.order)

    def waiting(self) -> list[Request]:
        return sorted((r for r in self.requests if r.row < 0), key=lambda r: r.order)

    def awaited(self, request: Request) -> int:
        """Tokens of the request that steps in flight sample."""
        return sum(request in step.sampled for step in self.in_flight)

    def known(self, request: Request) -> int:
        return len(request.tokens) + self.awaited(request)

    def is_long(self, request: Request) -> bool:
        return self.known(request) > self.limits.long_prefill_token_threshold

    def work(self, chunks: dict[Request, range]) -> StepWork:
        """The step's work if these were its chunks. Each position of a chunk looks at all before it and itself."""
        return StepWork(
            tokens=sum(map(len, chunks.values())) + len(self.decodes),
            sequences=len(chunks) + len(self.decodes),
            prefill_pairs=sum(sum(range(part.start + 1, part.stop + 1)) for part in chunks.values()),
            decode_context=sum(request.scheduled + 1 for request in self.decodes),
        )

    def longest(self, request: Request, start: int) -> int:
        """The most tokens from `start` on that the step can take of this request."""
        longest = self.find_longest(request, start)
        if self.granted is None:
            self.granted = longest
        return longest

    def find_longest(self, request: Request, start: int) -> int:
        left = self.limits.max_num_batched_tokens - len(self.decodes) - sum(map(len, self.chunks.values()))
        if self.target is None or not self.decodes:
            return left
        begun = request in self.chunks
        first = self.chunks[request].start if begun else start
        for length in range(left, 0 if begun else min(MIN_PREFILL_TOKENS, left) - 1, -1):
            if self.costs.seconds(self.work({**self.chunks, request: range(first, start + length)})) <= self.target:
                return length
        return 0 if self.chunks else min(MIN_PREFILL_TOKENS, left)  # prefill must not stand still

    def affordable(self, request: Request, most: int) -> int:
        """As many of the request's next tokens, up to `most`, as are known and find a place in free blocks."""
        room = (len(request.blocks) + self.pool.num_free) * self.pool.block_size
        return min(most, self.known(request) - request.scheduled, room - request.scheduled)

    # ---- requests come and go

    def add(self, request: Request) -> None:
        late = {"priority": request.params.priority * STEPS_PER_PRIORITY}
        late["shortest-prefill"] = request.num_prompt * STEPS_PER_PROMPT_TOKEN
        request.order = (self.step + late.get(self.limits.policy, 0), self.arrivals)
        self.arrivals += 1
        self.requests.append(request)

    def finish(self, request: Request, reason: str) -> None:
        if request in self.requests:
            self.give_up(request, Phase.FINISHED)
            self.requests.remove(request)
            request.finish_reason = reason

    def give_up(self, request: Request, phase: Phase) -> None:
        """Row and blocks are free, the blocks once the last step that touches them has ended."""
        if request.row >= 0:
            steps = [step.number for step in self.in_flight for member, *_ in step.computed if member is request]
            self.pool.release(request.blocks, max(steps, default=-1), self.last_ended)
            self.free_rows.append(request.row)
        request.phase, request.row, request.blocks, request.scheduled = phase, -1, [], 0

    def update(self, tokens: list[int], crc: int) -> list[tuple[Request, int]]:
        step = self.in_flight.popleft()
        self.last_ended, self.agreed = step.number, (step.number, crc)
        for request, run, computed in step.computed:
            if request.row >= 0 and request.preemptions == run:
                self.prefixes.publish(request, computed)
        self.pool.step_ended(step.number)
        news = [(r, token) for r, token in zip(step.sampled, tokens, strict=True) if r.phase is not Phase.FINISHED]
        for request, token in news:
            request.tokens.append(token)
            if token in request.stop_ids:
                self.finish(request, "stop")
            elif len(request.output_token_ids) == request.max_tokens:
                self.finish(request, "length")
        return news

    # ---- one step

    def schedule(self) -> StepPlan | None:
        self.plan = StepPlan(0, self.step, agreed=self.agreed)
        self.decodes: list[Request] = []
        self.chunks: dict[Request, range] = {}  # positions that each computes
        self.preempted = False
        self.granted: int | None = None  # what the first to ask could have had of the step
        if self.limits.chunked_prefill:
            self.decode()
            for request in self.running():
                if request.phase is Phase.PREFILL:
                    self.prefill(request)
            self.admit()
            for request in self.chunks:
                more = self.affordable(request, self.longest(request, request.scheduled))
                if not self.preempted and more:
                    self.compute(request, more)
        else:
            self.admit()
            if not self.chunks:
                self.granted = None
                self.decode()
        return self.publish() if self.chunks or self.decodes else None

    def decode(self) -> None:
        for request in self.running():
            all_sampled = self.known(request) == request.num_prompt + request.max_tokens
            if request.phase is Phase.DECODE and not all_sampled and self.make_room(request, 1):
                self.decodes.append(request)

    def prefill(self, request: Request) -> None:
        limit = self.longest(request, request.scheduled)
        if self.limits.chunked_prefill and self.limits.long_prefill_token_threshold:
            limit = min(limit, self.limits.long_prefill_token_threshold)
        if limit:
            length = max(1, self.affordable(request, limit))
            if self.make_room(request, length):
                self.compute(request, length)

    def admit(self) -> None:
        for request in self.waiting():
            if self.preempted or not self.free_rows:
                return
            begun = sum(r.phase is Phase.PREFILL and self.is_long(r) for r in self.running())
            if self.is_long(request) and 0 < self.limits.max_partial_prefills <= begun:
                continue
            shared = self.prefixes.find(request)
            limit = self.longest(request, len(shared) * self.pool.block_size)
            if not limit or self.awaited(request) or not self.may_start(request, shared, limit):
                return
            self.start(request, shared)
            self.prefill(request)

    def may_start(self, request: Request, shared: list[int], limit: int) -> bool:
        """The first chunk must fit beside a reserve of a hundredth; all of a request that is to be computed whole."""
        free = self.pool.num_free - self.pool.num_unused(shared)
        running, chunked = bool(self.running()), self.limits.chunked_prefill
        if chunked and not running:
            return free > 0
        cached = len(shared) * self.pool.block_size
        missing = self.known(request) - cached
        if missing > limit and not chunked:
            return False
        first = min(missing, limit) if chunked and not request.preemptions else missing
        reserve = max(1, self.pool.num_blocks // 100) if running else 0
        return self.pool.blocks_for(cached + first) - len(shared) + reserve <= free

    def start(self, request: Request, shared: list[int]) -> None:
        request.row, request.phase = self.free_rows.pop(), Phase.PREFILL
        self.pool.share(shared)
        request.blocks, request.published = list(shared), len(shared)
        request.scheduled = len(shared) * self.pool.block_size
        request.cached_tokens = request.cached_tokens if request.preemptions else request.scheduled
        if shared:
            self.plan.new_blocks.append((request.row, shared))
        p = request.params
        sampling = request.seed, p.temperature, p.top_k, p.top_p, p.min_p
        self.plan.admissions.append(Admission(request.row, list(request.tokens), *sampling, request.scheduled))

    def make_room(self, request: Request, length: int) -> bool:
        """Gives the request blocks for so many more tokens, at the cost of the last in order if there is no other."""
        missing = self.pool.blocks_for(request.scheduled + length) - len(request.blocks)
        while missing > self.pool.num_free:
            if missing <= self.pool.num_free + self.pool.num_pending:
                return False  # these come by themselves
            last = self.running()[-1]
            if last in self.decodes or last in self.chunks:
                return False
            self.give_up(last, Phase.WAITING)
            last.preemptions += 1
            self.preemptions += 1
            self.preempted = True
            if last is request:
                return False
        if missing > 0:
            blocks = self.pool.take(missing)
            request.blocks += blocks
            self.plan.new_blocks.append((request.row, blocks))
        return True

    def compute(self, request: Request, length: int) -> None:
        assert self.make_room(request, length)
        first = self.chunks[request].start if request in self.chunks else request.scheduled
        request.scheduled += length
        self.chunks[request] = range(first, request.scheduled)

    def publish(self) -> StepPlan:
        plan, work = self.plan, self.work(self.chunks)
        for request, part in self.chunks.items():
            plan.chunks.append(Chunk(request.row, part.start, len(part), request.scheduled == self.known(request)))
        plan.leave = [row for row, request in self.decoding if request not in self.decodes]
        joined = [r for r in self.decodes if r not in [member for _, member in self.decoding]]
        plan.join = [request.row for request in joined]
        self.decoding = [(row, request) for row, request in self.decoding if request in self.decodes]
        self.decoding += [(request.row, request) for request in joined]
        plan.num_decodes = len(self.decodes)
        plan.checksum = rows_checksum(
            sum(
                row_weight(r.row, r.scheduled, sum(block_weight(index, block) for index, block in enumerate(r.blocks)))
                for r in self.decodes
            )
        )
        if self.target is not None and self.decodes and self.chunks:
            self.late_steps += self.costs.seconds(work) > self.target
        decodes = [request for _, request in self.decoding]
        sampled = [r for r, chunk in zip(self.chunks, plan.chunks, strict=True) if chunk.sample]
        for request in sampled:
            request.phase = Phase.DECODE
        for request in decodes:
            request.scheduled += 1
        computed = [(r, r.preemptions, r.scheduled) for r in [*self.chunks, *decodes]]
        granted = self.limits.max_num_batched_tokens - len(decodes) if self.granted is None else self.granted
        self.in_flight.append(PlainStep(self.step, sampled + decodes, computed, work, len(decodes) + granted))
        self.step += 1
        return plan
