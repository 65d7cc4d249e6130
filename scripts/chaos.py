#!/usr/bin/env python3
"""Breaks a service on purpose, again and again, and compares every output with that of an undisturbed run.

    python scripts/chaos.py --minutes 2 --tp 3 --seed 1 [--model smollm2] [--plot docs/chaos.png]

Steady load of chunked prompts and streams through handle and HTTP; faults at random moments, each kind once in random
order, then again:

    kill            SIGKILL of one rank
    kill two        of two at once
    kill again      of one, and of one while it is being replaced
    stop            SIGSTOP of a rank for good: the watchdog must notice
    pause           SIGSTOP of a rank for a moment that the watchdog must bear
    long pause      for 30 s, so that it comes back when another has its place
    driver          SIGKILL of the driver
    pause driver    SIGSTOP of the driver for 3, 8 or 30 s
    pause front     the same of `quadriga serve`
    client          SIGKILL of a client amid its streams
    poison          a request with which a rank raises, runs out of memory or dies, whenever it is computed
    nan             a request whose logits are not numbers
    crowd           64 requests at once, more than may wait
    slow reader     of HTTP streams: one that dozes, and one that never reads on
    machine         a Ray node with a rank dies, all at once or its raylet alone; another one is started
    helper          SIGKILL of a log monitor, or of the agents beside that node's raylet
    pause ray       SIGSTOP of Ray's head process or of a raylet for 3 or 10 s

A request that fails, or a token more, less or other, is a difference. Only in a crowd may a request be refused for want
of room, and only while there is no driver because of that, which HTTP says at once; only the poisoned one must fail.
What is still there when all has ended (KV blocks, processes, shared memory, files) is a leak. The last line is a JSON
object; the exit code is 1 if there is any of either.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
from chaos_faults import KINDS, OF_TWO_NODES, Chaos
from chaos_load import Load, make_asks
from chaos_service import Service, until
from chaos_tally import Tally, draw, report

from quadriga import Client


def look_for_leaks(service: Service, client: Client, folder: str, shared: set[str]) -> list[str]:
    """Ends the service, and says what of it is left."""
    import ray  # which reads the service's token from the environment as soon as it is imported

    leaks = []
    for _ in until(20):
        stats = client.stats()
        held = stats["kv_blocks"] - stats["kv_blocks_free"]
        if held == 0 and stats["running"] == stats["waiting"] == 0:
            break
    else:
        leaks.append(f"{held} KV blocks are held, {stats['running']} requests run, {stats['waiting']} wait")
    client.close()
    ray.shutdown()  # whoever is connected to a private Ray ends with it
    leaks += service.end()
    left = shared_memory() - shared
    leaks += sorted(left - _mapped_by_others() if left else left)
    return leaks + [
        str(path)
        for path in Path(folder).iterdir()
        if path.name not in ("serve.log", "ray") and "hang" not in path.name
    ]


def shared_memory() -> set[str]:
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


def _mapped_by_others() -> set[str]:
    """Files that living processes use; this service has none any more."""
    found = set()
    for process in psutil.process_iter():
        try:
            found |= {area.path for area in process.memory_maps()}
        except psutil.Error:
            continue  # it has ended, or is not ours to look at
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tp", type=int, default=3, help="tensor-parallel size")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, choices=(1, 2), help="machines; not given: 2 from TP 2 on")
    parser.add_argument("--kinds", metavar="KIND,..", help="faults of these kinds only")
    parser.add_argument("--plot", metavar="FILE", help="draw the run here")
    parser.add_argument("--keep-logs", metavar="FOLDER", help="copy what the service has logged there")
    args = parser.parse_args()
    args.nodes = args.nodes or min(args.tp, 2)
    if args.nodes > args.tp:
        parser.error(f"--nodes {args.nodes} needs as many ranks, --tp is {args.tp}")
    possible = [kind for kind in KINDS if args.nodes > 1 or kind not in OF_TWO_NODES]
    args.kinds = args.kinds.split(",") if args.kinds else possible
    if unknown := set(args.kinds) - set(possible):
        parser.error(f"--kinds: {', '.join(sorted(unknown))} not among: {', '.join(possible)}")
    return args


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # the service ends with this program
    rng, tally, shared = random.Random(args.seed), Tally(), shared_memory()
    with tempfile.TemporaryDirectory(prefix="q", dir="/tmp") as folder:
        service = Service(args, folder)
        try:
            service.start()
            with Client.connect(service.name, service.ray_address()) as client:
                load = Load(make_asks(rng), service.url, client, tally, args.seed)
                load.learn()
                tally.rss_mib.append(service.rss_mib())
                began = time.monotonic()
                load.start()
                chaos = Chaos(service, client, load, tally, rng, args.kinds)
                while time.monotonic() < began + 60 * args.minutes and service.process.poll() is None:
                    time.sleep(rng.uniform(1, 4))
                    when = time.monotonic()
                    kind = chaos.commit_one()
                    chaos.wait_for_calm()
                    print(f"{when - began:7.1f} s  {kind}, over after {time.monotonic() - when:.1f} s", flush=True)
                ended = time.monotonic()
                load.stop()
                tally.rss_mib.append(service.rss_mib())
                if service.process.poll() is None:
                    tally.leaks += look_for_leaks(service, client, folder, shared)
                else:
                    tally.differences.append(f"the service has ended:\n{service.log()[-2000:]}")
        finally:
            try:
                if args.keep_logs:
                    service.copy_logs(Path(args.keep_logs))
            finally:
                service.kill()
    if args.plot:
        draw(tally, began, ended, args.plot)
    for trouble in (*tally.differences[:20], *tally.leaks):
        print(trouble[:2000])
    return report(tally, ended)


if __name__ == "__main__":
    raise SystemExit(main())
