"""`quadriga top`: fetches a running service's figures, over HTTP or by a handle, for driver/top_frame.py to show."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from driver.config import ConfigError
from driver.wire import ServiceUnavailable

Stats = Mapping[str, Any]
ANSWER_SECONDS = 10.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options to its parser."""
    group = parser.add_argument_group("service")
    group.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="where `quadriga serve` answers")
    group.add_argument("--api-key", metavar="K", help="one of the service's keys, where it has any")
    group.add_argument("--name", help="ask the service of this name on a Ray cluster instead, without HTTP")
    group.add_argument("--ray-address", default="auto", metavar="ADDRESS", help="of that cluster")
    group.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks")
    group.add_argument("--once", action="store_true", help="look twice, print one frame and end")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    if not 0.05 <= args.interval <= 3600:
        raise ConfigError(f"--interval must be between 0.05 and 3600 s, got {args.interval:g}")
    from driver.top_frame import show  # whoever starts another command need not wait for rich

    if args.name is None:
        return show(lambda: fetch(args.url, args.api_key), args.interval, args.once)
    from driver.handle import Client

    with Client.connect(args.name, args.ray_address) as client:
        return show(client.stats, args.interval, args.once)


def fetch(url: str, api_key: str | None) -> Stats:
    """/stats of a service. Raises ServiceUnavailable, or ConfigError for a URL or key that is none."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/stats", headers=headers)
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            stats = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConfigError(f"{url} wants a valid --api-key") from error
        raise ServiceUnavailable(f"{url} answers {error.code} {error.reason}") from error
    except OSError as error:  # also what urllib makes of one
        raise ServiceUnavailable(f"{url} does not answer: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{url} is not where a service answers: {error}") from error
    if not isinstance(stats, dict) or "histograms" not in stats:
        raise ConfigError(f"{url} is not where a service of this version answers")
    return stats
