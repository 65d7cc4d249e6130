"""Whether a Ray cluster has room for a service: what is missing, node by node, and waiting until it is there."""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from driver.config import DEVICES, ConfigError

POLL_SECONDS = 1.0
CONNECT_SECONDS = 3.0
LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: Ray leaves a loopback address as it is
# As Cluster.bundle has it in a cluster that was joined.
EACH: dict[str, dict[str, float]] = {"cpu": {"CPU": 1.0}, "cuda": {"GPU": 1.0, "CPU": 1.0}}


@dataclass(frozen=True, slots=True)
class Node:
    """A live node: its resources in all, and those that nobody has taken."""

    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def ranks(self, device: str) -> int:
        """How many more ranks fit here."""
        return min(int(self.free.get(name, 0)) // int(amount) for name, amount in EACH[device].items())


@dataclass(frozen=True, slots=True)
class Needs:
    """tp: ranks. nodes: how many nodes are to be there. device: `cpu`, `cuda`, or `auto` for what the nodes have."""

    tp: int
    nodes: int = 1
    device: str = "auto"

    def on(self, nodes: Sequence[Node]) -> str:
        """The device on these nodes, picked as the engine does."""
        if self.device != "auto":
            return self.device
        return "cuda" if any(node.total.get("GPU", 0) >= 1 for node in nodes) else "cpu"

    def missing(self, nodes: Sequence[Node]) -> list[str]:
        """What is not there yet; empty when the service can start."""
        device = self.on(nodes)
        found = []
        if len(nodes) < self.nodes:
            found.append(_count(self.nodes - len(nodes), "node"))
        ranks = sum(node.ranks(device) for node in nodes)
        if ranks < self.tp:
            found.append(f"room for {_count(self.tp - ranks, 'rank')}")
        return found

    def report(self, nodes: Sequence[Node]) -> str:
        """What was asked for and what each node has."""
        device = self.on(nodes)
        each = " and ".join(f"{amount:g} {name}" for name, amount in EACH[device].items())
        lines = [
            f"{_count(self.tp, 'rank')} on {_count(self.nodes, 'node')}, {each} each; "
            f"found {_count(len(nodes), 'node')}{':' if nodes else ''}"
        ]
        share = math.ceil(self.tp / self.nodes)
        wanted = f" of the {_count(share, 'rank')} that are its share" if self.nodes > 1 else f" of {self.tp}"
        for node in nodes:
            has = ", ".join(f"{_of(node, name)} free" for name in EACH[device])
            lines.append(f"  {node.address}: {has}: room for {node.ranks(device)}{wanted}")
        return "\n".join(lines)


def wait_for_devices(
    needs: Needs, seconds: float, read: Callable[[], Sequence[Node]], say: Callable[[str], None]
) -> bool:
    """Waits until the needs are met. Says what is missing before it waits, and again whenever that changes.

    read: the live nodes; none while the cluster cannot be reached. Returns whether the needs were met in time.
    """
    deadline = time.monotonic() + seconds
    said = None
    while True:
        nodes = read()
        missing = needs.missing(nodes)
        report = needs.report(nodes)
        if not missing:
            say(f"enough devices: {report}")
            return True
        if report != said:
            said = report
            left = max(0.0, deadline - time.monotonic())
            say(f"needs {report}\nmissing: {' and '.join(missing)}; waiting for {left:.0f} s at most")
        if time.monotonic() >= deadline:
            say(f"gave up after {seconds:g} s; still missing: {' and '.join(missing)}")
            return False
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))


class ClusterReader:
    """Reads the nodes of a Ray cluster, which need not be up yet."""

    def __init__(self, address: str) -> None:
        """address: as in ray.init; `auto` for RAY_ADDRESS or the one that runs here."""
        self._address = address
        self.error: str | None = None

    def __call__(self) -> list[Node]:
        """The live nodes; none, and the reason in `error`, while there is no cluster."""
        self.error = self._connect()
        return [] if self.error else live_nodes()

    def _connect(self) -> str | None:
        import ray

        from driver.cluster import join, join_running, named_address

        if ray.is_initialized():
            return None
        try:
            address = named_address(self._address)
            if address != "auto":
                join(address)
            elif not join_running():
                return "no Ray cluster runs on this machine"
        except (ConnectionError, ValueError, RuntimeError) as error:
            return f"no Ray cluster at {self._address}: {error}"
        return None


def unreachable(address: str) -> str | None:
    """Why nobody can be spoken to at HOST:PORT; None where somebody listens, or for other kinds of address.

    To be asked before ray.init, which tries for many minutes. auto: RAY_ADDRESS, where that is set.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return None
    from ray._private.services import resolve_ip_for_localhost

    taken_for = resolve_ip_for_localhost(host.strip("[]"))
    try:
        socket.create_connection((taken_for, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        hint = "" if taken_for == host else f" (for Ray it is {taken_for}, unless {LOOPBACK_SWITCH}=0)"
        return f"no Ray cluster at {address}{hint}: {error}"
    return None


def live_nodes() -> list[Node]:
    """The nodes of the cluster that this process has joined."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        Node(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that the service will have")
    parser.add_argument("--nodes", type=int, default=1, metavar="K", help="nodes that are to be there")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where any node has a GPU")
    parser.add_argument("--wait-seconds", type=float, default=300.0, metavar="S", help="seconds to wait at most")
    parser.add_argument("--ray-address", default="auto", metavar="ADDRESS", help="the Ray cluster; auto: a running one")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 0 when everything is there, 1 when it did not come in time."""
    if args.tp < 1 or args.nodes < 1 or not args.wait_seconds >= 0:
        raise ConfigError("--tp and --nodes must be at least 1, and --wait-seconds must not be negative")
    read = ClusterReader(args.ray_address)
    came = wait_for_devices(Needs(args.tp, args.nodes, args.device), args.wait_seconds, read, _say)
    if not came and read.error is not None:
        _say(read.error)
    return 0 if came else 1


def _say(text: str) -> None:
    print(f"quadriga: {text}", file=sys.stderr, flush=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _of(node: Node, name: str) -> str:
    return f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name}s"
