"""The load of scripts/chaos.py: the same questions over and over, whose answers must not change."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from chaos_tally import Tally

from quadriga import Client, RequestFailed, SamplingParams

STREAMS, PROMPTS, BURST = 6, 24, 64
SECONDS = 150.0  # no answer takes longer
MOST_SHOWN = 20  # differences, as they come
READ_SECONDS, FEW_BYTES = 5.0, 4096  # how long a slow reader dozes, and what its socket holds meanwhile
TRIGGERS = {"nan": 49_151, "raise": 49_150, "memory": 49_149, "death": 49_148}  # tokens of requests that do harm


class Refused(Exception):
    """The service does not take the request, and says so: it has no room (429), or no driver at the moment (503)."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


@dataclass(frozen=True)
class Ask:
    """A request; seed None takes the likeliest tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None

    @property
    def params(self) -> SamplingParams:
        temperature = 0.0 if self.seed is None else 1.0
        return SamplingParams(temperature=temperature, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=True)

    @property
    def body(self) -> bytes:
        params = self.params
        fields = {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": params.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
        }
        return json.dumps(fields).encode()


def make_asks(rng: random.Random) -> list[Ask]:
    """Short and long prompts, greedy and seeded; some share a prefix."""
    shared = tuple(rng.randrange(100, 40_000) for _ in range(200))
    asks = []
    for index in range(PROMPTS):
        own = tuple(rng.randrange(100, 40_000) for _ in range(rng.choice((4, 30, 300))))
        prompt = shared + own if index % 4 == 0 else own
        asks.append(Ask(prompt, rng.choice((12, 40, 90)), None if index % 2 else index))
    return asks


class Load:
    """Threads that ask in random order, and compare the answers with the undisturbed ones."""

    def __init__(self, asks: list[Ask], url: str, client: Client, tally: Tally, seed: int) -> None:
        self._asks, self._client, self._tally = asks, client, tally
        self._host = urllib.parse.urlsplit(url).netloc
        self._expected: dict[tuple[int, bool], Any] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._crowd = 0  # bursts that go on; only then may a request be refused
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {i}"), i % 3 == 0), daemon=True)
            for i in range(STREAMS)
        ]

    def learn(self) -> None:
        """The undisturbed answers."""
        for index, ask in enumerate(self._asks):
            tokens = self._expected[index, False] = self._by_handle(ask)
            self._expected[index, True] = self._by_http(ask)
            if harm := {*ask.prompt, *tokens} & set(TRIGGERS.values()):
                raise SystemExit(f"answer {index} has tokens {harm}, which are to do harm; take another seed")

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(SECONDS)
            if thread.is_alive():
                self._tally.differences.append("a stream never ended")

    # ---- beside the steady load

    def burst(self, rng: random.Random) -> None:
        """More requests at once than the service takes: each is answered as ever, or refused at once."""
        self._crowd += 1
        chosen = [rng.randrange(len(self._asks)) for _ in range(BURST)]
        with ThreadPoolExecutor(BURST) as pool:
            for refused in pool.map(lambda index: self._ask(index, True, may_be_refused=True), chosen):
                self._tally.refused += refused
        self._crowd -= 1

    def read_slowly(self, rng: random.Random) -> None:
        """A reader that takes one event, dozes, and reads on; and one that never reads on."""
        index = rng.randrange(len(self._asks))
        left = self._open(self._asks[index], slow=True)
        self._ask(index, True, slow=True)
        left[0].close()

    def do_harm(self, kind: str) -> None:
        """A request that spoils its logits, or ends ranks whenever it is computed. It alone is to fail."""
        prompt = [5] * 6 + [TRIGGERS[kind]]
        params = SamplingParams(temperature=0, max_tokens=4)
        began = time.monotonic()
        try:
            outcome: object = self._client.generate(prompt, params).token_ids
        except RequestFailed:
            return
        except Exception as error:  # noqa: BLE001 whatever it is, it is not what was to come
            outcome = error
        self._differs(f"{kind}: {outcome!r} after {time.monotonic() - began:.1f} s instead of RequestFailed")

    # ---- one request

    def _run(self, rng: random.Random, http_way: bool) -> None:
        while not self._stop.is_set():
            index = rng.randrange(len(self._asks))
            if self._ask(index, http_way, may_be_refused=self._crowd > 0):
                self._tally.refused += 1
                self._stop.wait(0.5)
            if len(self._tally.differences) > 10 * MOST_SHOWN:
                return  # nothing more is to be learned

    def _ask(self, index: int, http_way: bool, slow: bool = False, may_be_refused: bool = False) -> bool:
        """Whether it was refused, as it may be in a crowd; else the answer is compared."""
        ask, began = self._asks[index], time.monotonic()
        try:
            found: object = self._by_http(ask, slow) if http_way else self._by_handle(ask)
        except Refused as refusal:
            if may_be_refused or self._crowd > 0 or refusal.status == 503:
                return True
            found = repr(refusal)
        except Exception as error:  # noqa: BLE001 whatever it is, the request was lost
            found = f"{type(error).__name__}: {error}"
        with self._lock:
            self._tally.requests += 1
            self._tally.compared += ask.max_tokens
        expected = self._expected[index, http_way]
        if found != expected:
            way, took = "HTTP" if http_way else "handle", time.monotonic() - began
            self._differs(f"request {index} by {way}, {took:.1f} s: {found!r} instead of {expected!r}")
        return False

    def _differs(self, what: str) -> None:
        if len(self._tally.differences) < MOST_SHOWN:
            print(what[:500], flush=True)
        self._tally.differences.append(what)

    def _by_handle(self, ask: Ask) -> list[int]:
        tokens: list[int] = []
        for piece in self._client.stream(list(ask.prompt), ask.params):
            tokens += piece.token_ids
            self._tally.arrivals += [time.monotonic()] * len(piece.token_ids)
        return tokens

    def _by_http(self, ask: Ask, slow: bool = False) -> str:
        """The text. Raises Refused."""
        connection, answer = self._open(ask, slow)
        text, ended = "", False
        with answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    ended |= data == "[DONE]"
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    text += choice["text"]
                    self._tally.arrivals.append(time.monotonic())
                if slow:
                    time.sleep(READ_SECONDS)
                    slow = False
        connection.close()
        return text if ended else f"{text} (cut off)"

    def _open(self, ask: Ask, slow: bool) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, timeout=SECONDS)
        connection.connect()
        if slow:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, FEW_BYTES)
        connection.request("POST", "/v1/completions", ask.body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status in (429, 503):
            connection.close()
            raise Refused(answer.status)
        if answer.status != 200:
            raise RuntimeError(f"HTTP {answer.status}: {answer.read()[:300]!r}")
        return connection, answer
