"""The step channel: one frame per step from the driver to all ranks, results and errors back.

The driver binds one ROUTER socket; each rank connects a DEALER. On one host the address is an abstract Unix socket,
which leaves no file behind; across hosts it is TCP, encrypted and authenticated by CURVE. A rank first shows a token
that it was given through Ray; what comes from anyone else is dropped. Delivery is in order, and nothing is dropped.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass

import zmq
import zmq.utils.monitor

from parallel.wake import WakePipe

# Heartbeats give the kernels something to acknowledge, and nobody waits for the answers: a process that is merely
# stopped or busy is not taken for gone, for one that ends closes its connections, and one that hangs is the watchdog's.
HEARTBEAT_MS = 500
# How long the other machine's kernel may leave them unacknowledged. The driver notices a machine that vanishes within
# 2 s and ends the epoch; a rank, which ends itself and its weights then, gives the network more time to come back.
VANISHED_MS, DRIVER_VANISHED_MS = 1200, 8000
CONNECT_SECONDS = 10.0  # the driver listens before it gives its address away
_DOUBT_SECONDS, _DOUBT_TICK_MS = 1.0, 50
_MAX_RESULT_BYTES = 64 << 20


class ChannelClosed(RuntimeError):
    """The other side is gone; `farewell` tells whether it said so itself."""

    def __init__(self, message: str, farewell: bool = False) -> None:
        super().__init__(message)
        self.farewell = farewell


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where to connect, and what proves that one may. The key is set for TCP only."""

    url: str
    token: bytes
    server_key: bytes | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """What a rank sends; `kind` tells how to read the body."""

    rank: int
    kind: bytes
    body: bytes


def bind(socket: zmq.Socket, host: str | None) -> ChannelAddress:
    """Makes a socket listen: on TCP at `host`, encrypted, or on an abstract Unix socket when that is None.

    The address is to be handed out on a trusted way; whoever connects must show its token.
    """
    token = secrets.token_bytes(32)
    if host is None:
        url = f"ipc://@quadriga-{secrets.token_hex(16)}"
        socket.bind(url)
        return ChannelAddress(url, token)
    public_key, secret_key = zmq.curve_keypair()
    socket.curve_server = True
    socket.curve_secretkey = secret_key
    socket.curve_publickey = public_key
    port = socket.bind_to_random_port(f"tcp://{host}")
    return ChannelAddress(f"tcp://{host}:{port}", token, public_key)


def connect(socket: zmq.Socket, address: ChannelAddress) -> None:
    """Connects a socket to what `bind` made."""
    if address.server_key is not None:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = address.server_key
    socket.connect(address.url)


def _beat(socket: zmq.Socket, vanished_ms: int) -> None:
    """Heartbeats on a socket that has no connection yet; the limit is of TCP alone."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 0)  # none
    socket.setsockopt(zmq.TCP_MAXRT, vanished_ms)


class DriverChannel:
    """The driver's end. `publish` and `receive` belong to one thread; `wake` may be called from any."""

    def __init__(self, size: int, host: str | None = None) -> None:
        """host: as in `bind`, for ranks on other hosts."""
        self.size = size
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_RESULT_BYTES)
        _beat(self._socket, VANISHED_MS)
        self._monitor: zmq.Socket | None = None
        self._doubt_until = 0.0  # `time.monotonic()`; somebody has hung up, and it may have been a rank
        self._waker = WakePipe()
        self._poller = zmq.Poller()
        if host is not None:
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._poller.register(self._monitor, zmq.POLLIN)
        self.address = bind(self._socket, host)
        self._peers: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker.fileno(), zmq.POLLIN)
        self._closed = False

    @property
    def missing_rank(self) -> int | None:
        """The first rank that has not connected yet, or None when all have."""
        return next((rank for rank in range(self.size) if rank not in self._peers), None)

    def publish(self, frame: bytes) -> None:
        """Sends one frame to every rank. Raises ChannelClosed when a rank's connection is gone."""
        self._send_all(b"plan", frame)

    def receive(self, timeout_seconds: float | None) -> Message | None:
        """The next message of a rank, or None when woken or when time is up.

        None may also come early. Raises ChannelClosed when the TCP connection of a rank breaks.
        """
        in_doubt = time.monotonic() < self._doubt_until
        timeout = None if timeout_seconds is None else int(timeout_seconds * 1000)
        ready = dict(self._poller.poll(_DOUBT_TICK_MS if in_doubt else timeout))
        if self._monitor in ready:
            zmq.utils.monitor.recv_monitor_message(self._monitor)
            self._doubt_until = time.monotonic() + _DOUBT_SECONDS
        if in_doubt:
            self._send_all(b"ping", b"")
        if self._waker.fileno() in ready:
            self._waker.take()
        if self._socket not in ready:
            return None
        return self._take(self._socket.recv_multipart())

    def wake(self) -> None:
        """Makes a `receive` that waits, or the next one, return."""
        self._waker.wake()

    def close(self) -> None:
        """Says goodbye to the ranks and frees the sockets. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()  # ending the context would wait for it for ever
        for peer in self._peers.values():
            try:
                self._socket.send_multipart([peer, b"close", b""], flags=zmq.NOBLOCK)
            except zmq.ZMQError:
                continue  # that rank is gone, which is what was wanted
        self._socket.close()
        self._context.term()
        self._waker.close()

    def _send_all(self, kind: bytes, body: bytes) -> None:
        for rank, peer in self._peers.items():
            try:
                self._socket.send_multipart([peer, kind, body], copy=len(body) < 65536)
            except zmq.ZMQError as error:
                raise ChannelClosed(f"rank {rank} is no longer connected") from error

    def _take(self, parts: list[bytes]) -> Message | None:
        if len(parts) != 3:
            return None
        peer, kind, body = parts
        if kind == b"hello":
            token, _, rank = body.rpartition(b":")
            if secrets.compare_digest(token, self.address.token) and rank.isdigit() and int(rank) < self.size:
                self._peers[int(rank)] = peer
                self._ranks[peer] = int(rank)
            return None
        if peer not in self._ranks:
            return None
        return Message(self._ranks[peer], kind, body)


class WorkerChannel:
    """A rank's end. All calls belong to one thread."""

    def __init__(self, address: ChannelAddress, rank: int) -> None:
        self.rank = rank
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        _beat(self._socket, DRIVER_VANISHED_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._connect_deadline: float | None = time.monotonic() + CONNECT_SECONDS
        self._lost = False
        connect(self._socket, address)
        self._socket.send_multipart([b"hello", address.token + b":%d" % rank])
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def receive(self, timeout_seconds: float | None) -> bytes | None:
        """The next plan frame, or None when time is up. Raises ChannelClosed when the driver ends."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            ready = dict(self._poller.poll(self._patience_ms(deadline)))
            if self._monitor in ready:
                self._take_event()
            # Looked at in any case: what the driver sent before it left must not be lost.
            if self._socket.poll(0):
                frame = self._take()
                if frame is not None:
                    return frame
                continue
            if self._lost:
                raise ChannelClosed("the driver has gone away")
            if self._connect_deadline is not None and time.monotonic() > self._connect_deadline:
                raise ChannelClosed(f"no driver answered within {CONNECT_SECONDS:g} s")
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def _patience_ms(self, deadline: float | None) -> int | None:
        ends = [end for end in (deadline, self._connect_deadline) if end is not None]
        return max(0, math.ceil((min(ends) - time.monotonic()) * 1000)) if ends else None

    def _take_event(self) -> None:
        event = zmq.utils.monitor.recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_CONNECTED:
            self._connect_deadline = None
        elif event == zmq.EVENT_DISCONNECTED:
            self._lost = True

    def _take(self) -> bytes | None:
        """A frame; None for a message that only asked whether anybody is here."""
        kind, body = self._socket.recv_multipart()
        if kind == b"close":
            raise ChannelClosed("the driver has closed the channel", farewell=True)
        return body if kind == b"plan" else None

    def send(self, kind: bytes, body: bytes) -> None:
        self._socket.send_multipart([kind, body])

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()  # ending the context would wait for it for ever
        self._socket.close()
        self._context.term()
