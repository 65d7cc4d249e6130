"""The engine loop: schedule, publish, take results, stream text.

One thread owns the scheduler and everything about running requests. Other threads hand it commands and get their
tokens through each request's sink. Up to `async_depth` steps are in flight: while the workers compute one, the next is
planned, so that they never wait for the driver.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from driver.awake import LONGEST_GAP, AwakeClock
from driver.executor import CLOSE_SECONDS, Executor, WorkerFailed
from driver.figures import Figures
from driver.recovery import Recoveries, RequestPoisonous, Suspects
from driver.text import TextStream
from driver.trace import StepTrace
from driver.watchdog import Watchdog
from driver.wire import RequestFailed
from scheduler.budget import MIN_PREFILL_TOKENS
from scheduler.frame import StepResult, encode_plan, tokens_crc
from scheduler.logprobs import TokenLogprobs
from scheduler.params import InvalidRequest
from scheduler.request import Request
from scheduler.scheduler import Scheduler

logger = logging.getLogger("quadriga.engine")


class EngineDead(RuntimeError):
    """The engine has failed or is closed; the message says why."""


@dataclass(frozen=True, slots=True)
class Update:
    """News of one request: text and token ids since the last one, and how it ended if it did.

    cached_tokens: prompt tokens that the prefix cache had.
    logprobs: of the token ids, one each; None where they were not asked for.
    prompt_logprobs: of the prompt's tokens, None for the first; comes once, with the first output token at the latest.
    error: why it failed; set together with finish_reason "error".
    at: `time.perf_counter()` when the engine had the token.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str | None
    at: float
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    error: Exception | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


Sink = Callable[[Update], None]


@dataclass(slots=True)
class FrameSizes:
    """Number and total size in bytes of the plans that carried prefill, and of those that did not."""

    prefill_frames: int = 0
    prefill_bytes: int = 0
    decode_frames: int = 0
    decode_bytes: int = 0

    def count(self, frame: bytes, prefill: bool) -> None:
        if prefill:
            self.prefill_frames += 1
            self.prefill_bytes += len(frame)
        else:
            self.decode_frames += 1
            self.decode_bytes += len(frame)


@dataclass(slots=True)
class LateSteps:
    """Says in the log, once a minute at most, that the target TBT cannot be held."""

    reported: int = 0
    next_report: float = 0.0

    def report(self, scheduler: Scheduler, now: float) -> None:
        late = scheduler.counters.late_steps
        if late == self.reported or now < self.next_report:
            return
        logger.warning(
            "a TBT of %.0f ms cannot be held: in %d steps the %d requests that decode left no time for prefill, "
            "which went on by %d tokens a step all the same",
            scheduler.budget.target_seconds * 1000,
            late - self.reported,
            len(scheduler.running),
            MIN_PREFILL_TOKENS,
        )
        self.reported, self.next_report = late, now + 60


@dataclass(slots=True)
class _Live:
    """A request in the engine, its text so far, and where its updates go.

    asked_at, told_at: `time.perf_counter()` of its arrival and of its newest token, 0 before the first.
    """

    request: Request
    text: TextStream
    sink: Sink
    asked_at: float
    told_at: float = 0.0
    told_prompt: bool = False

    def take_logprobs(self) -> list[TokenLogprobs] | None:
        """Those of the tokens that are told of next."""
        if self.request.params.logprobs is None:
            return None
        taken, self.request.logprobs = self.request.logprobs, []
        return taken

    def take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """The prompt's, once, as soon as all of them are known."""
        request = self.request
        if request.params.prompt_logprobs is None or self.told_prompt or not request.is_scored:
            return None
        self.told_prompt = True
        taken, request.prompt_logprobs = request.prompt_logprobs, [None] * request.num_prompt
        return taken


class Engine:
    """Runs requests on an executor that has been started."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        async_depth: int,
        watchdog: Watchdog,
        trace: StepTrace | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.frames = FrameSizes()
        self.recoveries = Recoveries()
        self._suspects = Suspects(scheduler)
        self._watchdog = watchdog
        self._newest_frame = b""
        self.figures = Figures()
        self._trace = trace
        self._max_in_flight = max(1, async_depth)
        self._clock = AwakeClock()  # by which steps are judged
        self._published_at: deque[float] = deque()  # of the steps in flight
        self._last_done = 0.0
        self._late = LateSteps()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[str, _Live] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._dead: Exception | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="quadriga-engine", daemon=True)
        self._thread.start()

    # ---- for any thread

    @property
    def dead(self) -> Exception | None:
        """Why the engine has stopped, or None while it runs."""
        return self._dead

    def submit(self, request: Request, text: TextStream, sink: Sink) -> None:
        """Hands over a request. Its sink is called from the engine's thread. Raises EngineDead."""
        live = _Live(request, text, sink, time.perf_counter())
        self._command(lambda: self._add(live))

    def abort(self, request_id: str) -> None:
        """Ends a request with finish reason "abort"; one that has ended already, or never was, is left alone."""
        try:
            self._command(lambda: self._abort(request_id))
        except EngineDead:
            return  # its requests have ended with it

    def close(self) -> None:
        """Ends the loop; requests still running end with an error. The executor is left to its owner."""
        self._closing = True
        self.executor.give_up()
        self.executor.wake()
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.error("the engine's thread has not ended within %g s; its workers end under it", CLOSE_SECONDS)

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:  # a command must not slip in behind the thread's last look
            if self._dead is not None:
                raise EngineDead(f"the engine has stopped: {self._dead}") from self._dead
            self._commands.put(command)
        self.executor.wake()

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._turn()
                except WorkerFailed as failure:
                    self._recover(failure)
            self._stop(EngineDead("it was closed"))
        except WorkerFailed as failure:
            if not self._closing:
                logger.error("the engine has failed: %s", failure)
            self._stop(EngineDead("it was closed") if self._closing else failure)
        except BaseException as error:  # a panic in a library's Rust is no Exception, and all wait for this thread
            logger.error("the engine has failed: %s", error, exc_info=error)
            self._stop(error if isinstance(error, Exception) else EngineDead(f"it has failed: {error!r}"))

    def _turn(self) -> None:
        self._take_commands()
        self._suspects.review()
        self._publish_ahead()
        result = self._receive()
        if result is not None:
            self._take_result(result)

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _publish_ahead(self) -> None:
        scheduler = self.scheduler
        while len(scheduler.in_flight) < self._max_in_flight:
            plan = scheduler.schedule()
            if plan is None:
                return
            frame = encode_plan(plan)
            self.frames.count(frame, prefill=bool(plan.chunks))
            if self._trace:
                self._trace.published(plan, scheduler)
            self._published_at.append(self._clock.now())
            self._newest_frame = frame
            self.executor.publish(frame)

    def _receive(self) -> StepResult | None:
        if not self.scheduler.in_flight:
            return self.executor.receive(None)
        step = self.scheduler.in_flight[0]
        # From when the workers could begin it, however often this thread has been woken since.
        began = max(self._published_at[0], self._last_done)
        model = self.scheduler.budget.model
        waited = self._clock.now() - began
        next_look = self._watchdog.next_look(step, model, waited)
        result = self.executor.receive(min(max(0.0, next_look - waited), LONGEST_GAP / 2))
        waited = self._clock.now() - began
        if result is None and waited >= next_look and self._watchdog.hangs(step, model, waited, self.executor):
            try:
                report = f"who did what then is in {self._watchdog.report(step, self._newest_frame, self.executor)}"
            except OSError as error:  # a full disk must not keep anybody from going on
                report = f"who did what then cannot be written down: {error}"
            raise WorkerFailed(f"step {step.step} took longer than {waited:.1f} s; {report}")
        return result

    def _take_result(self, result: StepResult) -> None:
        if result.epoch < self.scheduler.epoch:
            return  # of an engine that ran on these workers before
        self.recoveries.in_vain = 0
        self._learn(result)
        now = time.perf_counter()
        for request, token in self.scheduler.update(result, tokens_crc(result.tokens)):
            live = self._live[request.id]
            ended_by_token = request.finish_reason == "stop"
            text = "" if ended_by_token else live.text.push(token)
            if live.text.stop is not None:
                self.scheduler.finish(request, "stop", live.text.stop)
            self._tell(live, text, [token], now)
        self.figures.told_step(now)
        while self.scheduler.not_finite:
            request = self.scheduler.not_finite.pop()
            where = f"behind {len(request.tokens)} tokens"
            self._fail(request, RequestFailed(f"the model's logits of this request, {where}, are not finite numbers"))
        while self.scheduler.failed:
            request, reason = self.scheduler.failed.pop()
            self._fail(request, InvalidRequest(f"the guide cannot be followed any further: {reason}"))

    def _learn(self, result: StepResult) -> None:
        """Tells trace and step-time model what the step took: from when the workers could begin it to its result."""
        step, now = self.scheduler.in_flight[0], self._clock.now()
        seconds = now - max(self._published_at.popleft(), self._last_done)
        self._last_done = now
        self.figures.took_step(seconds, step.budget, step.work.tokens)
        if self._trace:
            self._trace.done(step, result, seconds)
        self.scheduler.budget.observe(step.work, seconds)
        self._late.report(self.scheduler, now)

    def _tell(self, live: _Live, text: str, token_ids: list[int], now: float) -> None:
        request = live.request
        if token_ids:
            self.figures.told_token(live.asked_at, live.told_at, now)
            live.told_at = now
        if request.finish_reason is not None:
            del self._live[request.id]
            text += live.text.finish()
            # A stop string wins over "length": it is found in the text that the last token completes.
            if live.text.stop is not None:
                request.finish_reason, request.stop_reason = "stop", live.text.stop
            self.figures.ended_request(request.finish_reason, now - live.asked_at)
        live.sink(
            Update(
                request.id,
                text,
                token_ids,
                request.finish_reason,
                now,
                request.stop_reason,
                request.cached_tokens,
                logprobs=live.take_logprobs(),
                prompt_logprobs=live.take_prompt_logprobs(),
            )
        )

    def _recover(self, failure: WorkerFailed) -> None:
        """Starts the next epoch, in which all requests go on with their next token. Raises WorkerFailed for good."""
        scheduler, recoveries = self.scheduler, self.recoveries
        if self._closing or recoveries.hopeless:
            raise failure
        logger.error("epoch %d has ended: %s", scheduler.epoch, failure)
        with recoveries.counted():
            for request in self._suspects.epoch_ended():
                self._fail(request, RequestPoisonous(f"the workers fail whenever this request runs: {failure}"))
            num_blocks = self.executor.recover()[0].num_blocks
            if num_blocks < scheduler.pool.num_blocks:
                raise WorkerFailed(f"the KV cache has {num_blocks} blocks now, {scheduler.pool.num_blocks} before")
        scheduler.next_epoch()
        self._published_at.clear()
        self._last_done = self._clock.now()
        if self._trace:
            self._trace.epoch_ended()
        logger.warning(
            "epoch %d begins after %.1f s; %d requests go on", scheduler.epoch, recoveries.last_seconds, len(self._live)
        )

    def _fail(self, request: Request, error: Exception) -> None:
        live, now = self._live.pop(request.id), time.perf_counter()
        self.scheduler.finish(request, "error")
        self.figures.ended_request("error", now - live.asked_at)
        live.sink(Update(request.id, "", [], "error", now, error=error))

    def _add(self, live: _Live) -> None:
        request = live.request
        try:
            if request.id in self._live:
                raise InvalidRequest(f"a request with id {request.id!r} is running already")
            self.scheduler.add(request)
        except InvalidRequest as error:
            live.sink(Update(request.id, "", [], "error", time.perf_counter(), error=error))
            return
        self._live[request.id] = live

    def _abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            self.scheduler.finish(live.request, "abort")
            self._tell(live, "", [], time.perf_counter())

    def _stop(self, reason: Exception) -> None:
        with self._lock:
            self._dead = reason
        self._take_commands()  # what came too late joins the others below
        for live in list(self._live.values()):
            live.sink(Update(live.request.id, "", [], "error", time.perf_counter(), error=reason))
        self._live.clear()
        if self._trace:
            self._trace.close()
