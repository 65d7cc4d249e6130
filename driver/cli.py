"""The command line: `quadriga generate`, also as `python -m quadriga`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from typing import NoReturn

from driver import generate
from driver.config import DEVICES, EXECUTORS, MAX_ASYNC_DEPTH, EngineConfig
from driver.engine import EngineDead
from driver.errors import is_input_fault
from driver.executor import WorkerFailed
from scheduler.params import DEFAULT_MAX_TOKENS
from workers.spec import DTYPES

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 when it failed at run time, 2 when it was asked for what cannot be had."""
    args = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    for noisy in ("filelock", "urllib3", "httpx", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, _end_on_sigterm)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("quadriga: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; nothing may be written to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (WorkerFailed, EngineDead) as error:
        print(f"quadriga: {error}", file=sys.stderr)
        return EXIT_FAILED
    except ValueError as error:
        if not is_input_fault(error):
            raise
        print(f"quadriga: {error}", file=sys.stderr)
        return EXIT_USAGE


def _end_on_sigterm(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quadriga", description="Tensor-parallel LLM inference.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "generate",
        help="complete prompts",
        description="Complete prompts: one is streamed to the terminal, many are printed in order.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.set_defaults(run=generate.run)
    _add_prompts(command)
    _add_sampling(command)
    add_engine_options(command)
    command.add_argument(
        "--json", action="store_true", help="print one JSON object a line and nothing else to standard output"
    )
    command.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="what goes to standard error"
    )
    return parser


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts").add_mutually_exclusive_group(required=True)
    group.add_argument("--prompt", nargs="+", action="extend", metavar="P", help="one or more prompts")
    group.add_argument(
        "--prompt-file",
        metavar="F.jsonl",
        help="JSON lines: each a string, a list of token ids, or an object with prompt or prompt_token_ids and any "
        "sampling field of its own",
    )
    parser.add_argument("--chat", action="store_true", help="treat each prompt as a user's message to a chat model")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"new tokens at most; not given: {DEFAULT_MAX_TOKENS}, or the room left if that is less",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 always takes the likeliest token")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="probability mass to sample from, (0, 1]")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="tokens to sample from; 0 means all")
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="least probability relative to the likeliest, [0, 1]"
    )
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable; not given: a fresh one each")
    group.add_argument("--stop", nargs="+", action="extend", metavar="S", help="strings that end the text")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end tokens")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The options that make up an EngineConfig."""
    defaults = EngineConfig.__dataclass_fields__
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", required=True, help="model folder, GGUF file, Hugging Face id, or smollm2 (SmolLM2-135M-Instruct)"
    )
    group.add_argument(
        "--tp", type=int, default=1, metavar="N", help="tensor-parallel size in ranks; need not divide the heads"
    )
    group.add_argument("--executor", choices=EXECUTORS, default="auto", help="auto: inline for one rank, else ray")
    group.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU")
    group.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: the model's own")
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="token budget of a step; not given: 2048 on cuda, 512 on cpu",
    )
    group.add_argument(
        "--max-num-seqs", type=int, default=defaults["max_num_seqs"].default, metavar="N", help="requests at once"
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="prompt plus output tokens of a request; not given: the model's own limit",
    )
    group.add_argument(
        "--block-size", type=int, default=defaults["block_size"].default, metavar="N", help="tokens per KV block"
    )
    group.add_argument(
        "--kv-cache-gib",
        type=float,
        metavar="GIB",
        help="memory of each rank's KV cache in GiB; not given: 2 on cpu, what is left on cuda",
    )
    group.add_argument("--num-kv-blocks", type=int, metavar="N", help="exact number of KV blocks instead")
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=defaults["gpu_memory_utilization"].default,
        metavar="F",
        help="share of each GPU's memory to use, (0, 1]",
    )
    group.add_argument("--attention-backend", default="auto", metavar="NAME", help="auto or reference")
    group.add_argument(
        "--async-depth",
        type=int,
        default=defaults["async_depth"].default,
        metavar="N",
        help=f"steps in flight at once, 0 to {MAX_ASYNC_DEPTH}; 0 waits for each",
    )
    group.add_argument(
        "--ray-address",
        default="auto",
        metavar="ADDRESS",
        help="a Ray cluster to join, or local for a private one; auto: a running one, else private",
    )
    group.add_argument(
        "--start-timeout",
        type=float,
        default=defaults["start_timeout_seconds"].default,
        metavar="S",
        help="seconds to wait for devices and ranks",
    )


def engine_options(args: argparse.Namespace) -> dict[str, object]:
    """The parsed engine options under the names of EngineConfig's fields."""
    renamed = {"tensor_parallel_size": "tp", "start_timeout_seconds": "start_timeout"}
    names = [name for name in EngineConfig.__dataclass_fields__ if hasattr(args, renamed.get(name, name))]
    return {name: getattr(args, renamed.get(name, name)) for name in names}


if __name__ == "__main__":
    raise SystemExit(main())
