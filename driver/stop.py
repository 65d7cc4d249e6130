"""`quadriga stop`: drains and ends a service that was left running on a Ray cluster."""

from __future__ import annotations

import argparse
import sys

from driver.config import ConfigError, check_drain_seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.add_argument("--name", default="llm", help="of the service")
    parser.add_argument("--ray-address", default="auto", metavar="ADDRESS", help="the Ray cluster; auto: a running one")
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, metavar="S", help="seconds that running requests get to finish"
    )


def run(args: argparse.Namespace) -> int:
    """Returns the exit code. Raises ServiceUnavailable when there is no such service."""
    if not args.name:
        raise ConfigError("--name must not be empty")
    check_drain_seconds(args.drain_seconds)
    from driver.service_actor import end_service, find_actor, join_cluster_of

    join_cluster_of(args.name, args.ray_address)
    aborted = end_service(find_actor(args.name), args.drain_seconds)
    print(f"quadriga: {args.name!r} has ended; {aborted} requests were aborted", file=sys.stderr, flush=True)
    return 0
