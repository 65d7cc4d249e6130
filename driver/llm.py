"""The Python API: a model in hand, prompts in, completions out."""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from driver.config import EngineConfig
from driver.engine import Engine, EngineDead, Sink, Update
from driver.intake import Intake, paired
from driver.results import Completion, Prompt, Stream
from driver.setup import Model, Phases, read_model, start_engine
from driver.text import TextStream
from scheduler.params import InvalidRequest, SamplingParams
from scheduler.request import Request
from workers.spec import WorkerReady

logger = logging.getLogger("quadriga")


class LLM:
    """A model served in this process's name. A context manager; `close` leaves no process behind.

    with LLM("smollm2", tensor_parallel_size=3) as llm:
        print(llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=20)).text)

    Options are those of EngineConfig. Raises its ConfigError, or an error that names what is wrong with the model.
    """

    def __init__(self, model: str, *, start: bool = True, **options: Any) -> None:
        """start: bring up the workers now; otherwise `start` or the first request does."""
        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            raise TypeError(f"unknown option {', '.join(unknown)}; known: {sorted(EngineConfig.__dataclass_fields__)}")
        self.config = EngineConfig(model=model, **options)
        self.phases = Phases()
        self.workers: list[WorkerReady] = []
        self._ids = itertools.count()
        self._engine: Engine | None = None
        self._shut_down: Callable[[], object] | None = None
        self._closed = False
        with self.phases.phase("model files"):
            self.model: Model = read_model(self.config)
        self._intake = Intake(self.model)
        if start:
            self.start()

    # ---- life

    def start(self) -> LLM:
        """Brings up workers and engine if they are not up. Raises EngineDead after `close`."""
        if self._closed:
            raise EngineDead("this LLM is closed")
        if self._engine is None:
            self._engine, self.workers = start_engine(self.config, self.model, self.phases)
            self._intake.kv_tokens = self.kv_tokens
            # Also runs when the LLM is dropped or the interpreter ends without `close`.
            self._shut_down = weakref.finalize(self, _shut_down, self._engine)
        return self

    def close(self) -> None:
        """Ends engine, workers and a Ray cluster that was started for them. May be called twice."""
        self._closed = True
        if self._shut_down is not None:
            self._shut_down()

    def __enter__(self) -> LLM:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> Completion | list[Completion]:
        """Completes one prompt or many; a prompt is a string or a list of token ids.

        params: one for all prompts, or one for each. One prompt gives one Completion, a list gives a list in its
        order. Raises InvalidRequest for a single bad prompt; in a list, the bad one's Completion carries the error
        and the others are unaffected. Raises WorkerFailed or EngineDead when the engine fails.
        """
        prompts, params, single = paired(prompts, params)
        completions = self._run(prompts, params, use_tqdm and not single)
        if not single:
            return completions
        if completions[0].error is not None:
            raise completions[0].error
        return completions[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Iterates over a completion piece by piece. Closing the stream early, or dropping it, aborts the request.

        Raises InvalidRequest at once for a bad prompt; WorkerFailed or EngineDead when the engine fails.
        """
        self.start()
        request = self.prepare(prompt, params or SamplingParams())
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._submit([request], updates)
        return Stream(request.id, updates, functools.partial(self.abort, request.id))

    def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Completes a conversation of {"role", "content"} messages, laid out by the model's chat template."""
        return self.generate(self.encode_chat(messages), params)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The token ids of a conversation. Raises InvalidRequest when the model has no tokenizer or template."""
        return self._intake.encode_chat(messages)

    def stats(self) -> dict[str, Any]:
        """Totals since the start: steps, tokens by kind, preemptions, frame counts and sizes in bytes; see Figures."""
        engine = self.start()._engine
        counters = engine.scheduler.counters
        return {
            **{name: getattr(counters, name) for name in counters.__dataclass_fields__},
            **{name: getattr(engine.frames, name) for name in engine.frames.__dataclass_fields__},
            "restarts": engine.recoveries.restarts,
            "restart_seconds": round(engine.recoveries.restart_seconds, 3),
            **engine.figures.snapshot(),
            "kv_blocks": engine.scheduler.pool.num_blocks,
            "kv_blocks_free": engine.scheduler.pool.num_free,
        }

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raises InvalidRequest when this request could not be served, without starting anything."""
        self.prepare(prompt, params)

    # ---- for a service

    def prepare(self, prompt: Prompt, params: SamplingParams, produced: Sequence[int] = ()) -> Request:
        """A checked request; see Intake.prepare."""
        return self._intake.prepare(f"r{next(self._ids)}", prompt, params, produced)

    def submit(self, request: Request, sink: Sink, text: TextStream | None = None) -> None:
        """Hands a prepared request to the engine, whose thread calls the sink. Raises EngineDead.

        text: its output text so far, where the request goes on behind tokens that it has produced before.
        """
        self._engine.submit(request, text or self._intake.text_stream(request), sink)

    @property
    def failure(self) -> Exception | None:
        """Why the engine has stopped, or None while it runs."""
        return None if self._engine is None else self._engine.dead

    @property
    def recovering(self) -> bool:
        """Whether ranks are being replaced right now; requests wait meanwhile."""
        return self._engine.recoveries.recovering

    @property
    def max_running(self) -> int:
        """Requests that can run at once."""
        return self._engine.scheduler.limits.num_rows

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        pool = self._engine.scheduler.pool
        return pool.num_blocks * pool.block_size

    def load(self) -> tuple[int, int]:
        """Requests running and waiting now."""
        scheduler = self._engine.scheduler
        return len(scheduler.running), len(scheduler.waiting)

    def text_stream(self, request: Request) -> TextStream:
        return self._intake.text_stream(request)

    def abort(self, request_id: str) -> None:
        """Ends a request; one that has ended already is left alone."""
        if self._engine is not None:
            self._engine.abort(request_id)

    # ---- pieces

    def _run(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: bool) -> list[Completion]:
        self.start()
        completions: list[Completion] = []
        by_id: dict[str, Completion] = {}
        requests: list[Request] = []
        for prompt, one in zip(prompts, params, strict=True):
            completion = Completion(prompt if isinstance(prompt, str) else None)
            completions.append(completion)
            try:
                request = self.prepare(prompt, one)
            except InvalidRequest as error:
                completion.fail(error)
                continue
            completion.prompt_token_ids = list(request.tokens)
            completion.submitted = time.perf_counter()
            requests.append(request)
            by_id[request.id] = completion
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        try:
            self._submit(requests, updates)
            with tqdm(total=len(by_id), unit="request", disable=not use_tqdm or len(by_id) < 2) as bar:
                left = len(by_id)
                while left:
                    update = updates.get()
                    by_id[update.request_id].take(update)
                    if update.finish_reason is not None:
                        left -= 1
                        bar.update()
        except BaseException:  # an interrupt, say: nobody will read these any more
            for request_id in by_id:
                self.abort(request_id)
            raise
        for completion in completions:
            if completion.error is not None and not isinstance(completion.error, InvalidRequest):
                raise completion.error
        return completions

    def _submit(self, requests: Sequence[Request], updates: queue.SimpleQueue[Update]) -> None:
        for request in requests:
            self.submit(request, updates.put)


def _shut_down(engine: Engine) -> None:
    engine.close()
    engine.executor.close()
