#!/usr/bin/env python3
"""Ours beside the peer (vLLM's CPU build) on one machine, through HTTP, by clients that belong to neither.

    bash scripts/bench_peer.sh --clients DIR [--rounds 3] [--json FILE] [--plot FILE]

Clients in DIR: `throughput_client.py URL --rounds 1`, `mixed_load.py URL --seed N`, which print a JSON object each.
Servers start one after the other, each timed from its start to its first token on a machine with nothing else to do,
then stay, and every round measures each of them in turn. Both engines have two settings, one for throughput and one for
short gaps between tokens: ours with its default budget and with a target; the peer compiled with a budget of 512 and
eager with one of 128. An engine's figure is that of its better setting, but the gaps, and the prompt tokens/s beside
them, are those of the setting with the shorter gaps. Memory is the largest sum of the resident sets of a server's
processes. The last line is a JSON object of ratios, ours to the peer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from workers.source import resolve_model

START_SECONDS = 600.0
WATCH_SECONDS = 1.0  # looking more often takes a tenth of the machine from who is measured
CONTEXT = "2048"
# Which way is better, by figure; those of long prompts beside streams are taken together.
LOADED = ("tbt_ms_p99", "prompt_tokens_per_s")
FIGURES = {
    "start_to_first_token_s": min,
    "single_stream_tokens_per_s": max,
    "output_tokens_per_s": max,
    "total_tokens_per_s": max,
    "tbt_ms_p99": min,
    "prompt_tokens_per_s": max,
    "peak_rss_mib": min,
}


class Server:
    """One engine behind its HTTP server, and the memory that it takes."""

    def __init__(self, name: str, command: list[str], port: int, folder: Path, environment: dict[str, str]) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._log = (folder / f"{name}.log").open("w+")
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, cwd=folder, env={**os.environ, **environment}
        )
        self._peak, self._closing = 0, threading.Event()
        self._watch = threading.Thread(target=self._watch_memory, daemon=True)
        self._watch.start()
        self.runs: list[dict[str, float]] = []
        self.start_seconds = self._first_token(began)

    @property
    def peak_mib(self) -> float:
        return self._peak / 2**20

    def close(self) -> None:
        self._closing.set()
        self._watch.join()
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for child in psutil.wait_procs(children, timeout=10)[1]:
            child.kill()
        self._log.close()

    def _first_token(self, began: float) -> float:
        """Asks until it is answered."""
        while time.perf_counter() < began + START_SECONDS:
            if self._process.poll() is not None:
                raise SystemExit(f"{self.name} ended:\n{Path(self._log.name).read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                    model = json.load(answer)["data"][0]["id"]
                body = json.dumps({"model": model, "prompt": [100, 200, 300], "max_tokens": 1}).encode()
                request = urllib.request.Request(
                    f"{self.url}/v1/completions", body, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=60):
                    return time.perf_counter() - began
            except OSError:
                time.sleep(0.05)
        raise SystemExit(f"{self.name} did not answer within {START_SECONDS:g} s")

    def _watch_memory(self) -> None:
        while not self._closing.wait(WATCH_SECONDS):
            total = 0
            try:
                processes = [(own := psutil.Process(self._process.pid)), *own.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in processes:
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self._peak = max(self._peak, total)


def start_all(args: argparse.Namespace, stack: ExitStack, bar: tqdm) -> list[Server]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peer-")))
    model = str(resolve_model(args.model))
    cores = len(os.sched_getaffinity(0))
    peer_environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
    }
    peer = [args.peer_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "bfloat16"]
    peer += ["--max-model-len", CONTEXT, "--no-enable-prefix-caching", "--host", "127.0.0.1"]
    ours = [sys.executable, "-m", "quadriga", "serve", "--model", args.model, "--dtype", "bfloat16", "--tp", "1"]
    ours += ["--max-model-len", CONTEXT, "--no-prefix-caching", "--kv-cache-gib", "2", "--executor", "inline"]
    commands = {
        "ours, default": (ours, {}),
        f"ours, target {args.target:g} ms": ([*ours, "--target-tbt-ms", str(args.target)], {}),
        "peer, eager, 128": ([*peer, "--max-num-batched-tokens", "128", "--enforce-eager"], peer_environment),
        "peer, compiled, 512": ([*peer, "--max-num-batched-tokens", "512"], peer_environment),
    }
    servers = []
    for at, (name, (command, environment)) in enumerate(commands.items()):
        bar.set_description(f"start {name}")
        port = args.port + at
        servers.append(Server(name, [*command, "--port", str(port)], port, folder, environment))
        stack.callback(servers[-1].close)
    return servers


def measure(server: Server, clients: Path, seed: int) -> dict[str, float]:
    throughput = _run(clients / "throughput_client.py", server.url, "--rounds", "1")
    mixed = _run(clients / "mixed_load.py", server.url, "--seed", str(seed))
    if mixed["errors"]:
        raise SystemExit(f"{server.name}: {mixed['errors']}")
    names = ("single_stream_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s")
    return {
        **{name: throughput[name] for name in names},
        "tbt_ms_p50": mixed["tbt_ms"]["p50"],
        "tbt_ms_p99": mixed["tbt_ms"]["p99"],
        "prompt_tokens_per_s": mixed["prompt_tokens_per_s"],
    }


def _run(client: Path, *arguments: str) -> dict[str, Any]:
    found = subprocess.run([sys.executable, str(client), *arguments], capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{client.name} failed:\n{found.stderr[-3000:]}")
    return json.loads(found.stdout.splitlines()[-1])


def summed_up(server: Server) -> dict[str, Any]:
    """Medians of the rounds."""
    medians = {name: statistics.median(run[name] for run in server.runs) for name in server.runs[0]}
    about = {"engine": server.name, "start_to_first_token_s": server.start_seconds, "peak_rss_mib": server.peak_mib}
    return {**about, **medians}


def figures_of(engine: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """An engine's figures, each at its better setting."""
    settings = [row for row in rows if row["engine"].startswith(engine)]
    steady = min(settings, key=lambda row: row["tbt_ms_p99"])
    best = {name: better(row[name] for row in settings) for name, better in FIGURES.items()}
    return best | {name: steady[name] for name in LOADED}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Each figure of each engine as a multiple of the best peer's; beyond 1 is better."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.6))
    width = 0.8 / len(rows)
    for at, row in enumerate(rows):
        shares = []
        for name, better in FIGURES.items():
            best = better(other[name] for other in rows if other["engine"].startswith("peer"))
            shares.append(row[name] / best if better is max else best / row[name])
        axes.barh([y + at * width for y in range(len(FIGURES))], shares, width, label=row["engine"])
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_yticks([y + 0.3 for y in range(len(FIGURES))], [name.replace("_", " ") for name in FIGURES])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("times as good as the peer at its best setting")
    axes.invert_yaxis()
    figure.legend(fontsize=8, loc="upper center", ncols=len(rows), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="python of the peer's virtual environment")
    parser.add_argument("--clients", type=Path, required=True, help="folder of the load clients")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8310, help="the first of four")
    parser.add_argument("--target", type=float, default=60.0, help="ms between tokens, of our second setting")
    parser.add_argument("--json", type=Path, help="write the medians here, as JSON lines")
    parser.add_argument("--plot", type=Path, help="draw them here")
    args = parser.parse_args()
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=4 * args.rounds, unit="measurement"))
        servers = start_all(args, stack, bar)
        for seed in range(args.rounds):
            for server in servers:
                bar.set_description(server.name)
                server.runs.append(measure(server, args.clients, seed))
                bar.write(json.dumps({"engine": server.name, **server.runs[-1]}))
                bar.update()
        rows = [summed_up(server) for server in servers]
    for row in rows:
        print(json.dumps(row))
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.plot:
        draw(rows, args.plot)
    ours, peers = figures_of("ours", rows), figures_of("peer", rows)
    print(json.dumps({name: round(ours[name] / peers[name], 3) for name in FIGURES}))


if __name__ == "__main__":
    main()
