"""The command line: `quadriga generate`, `serve`, `simulate` and others, also as `python -m quadriga`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from driver import generate, launch, options, serve, simulate, stop, top
from driver.engine import EngineDead
from driver.errors import is_input_fault
from driver.executor import WorkerFailed
from driver.startup import LOG_FORMAT
from driver.wire import ServiceUnavailable
from scheduler.params import DEFAULT_MAX_TOKENS

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 when it failed at run time, 2 when it was asked for what cannot be had."""
    args = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=args.log_level.upper(), format=LOG_FORMAT)
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
    except (WorkerFailed, EngineDead, ServiceUnavailable) as error:
        print(f"quadriga: {error}", file=sys.stderr)
        return EXIT_FAILED
    except ValueError as error:
        if not is_input_fault(error):
            raise
        print(f"quadriga: {error}", file=sys.stderr)
        return EXIT_USAGE


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells defaults, other than those that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def _end_on_sigterm(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quadriga", description="Tensor-parallel LLM inference.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], help_: str, description: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_, description=description, formatter_class=_HelpFormatter)
        command.set_defaults(run=run)
        return command

    command = add(
        "generate",
        generate.run,
        "complete prompts",
        "Complete prompts: one is streamed to the terminal, many are printed in order.",
    )
    _add_prompts(command)
    _add_sampling(command)
    options.add_engine_options(command)
    _add_output(command)
    command = add(
        "serve",
        serve.run,
        "start a service for handles and HTTP",
        "Start a service on a Ray cluster, or in this process with --executor inline, and answer until SIGTERM or "
        "SIGINT; see docs/serving.md.",
    )
    serve.add_options(command)
    options.add_engine_options(command, executor_help="ray, which auto is too, or inline: without Ray")
    _add_log_level(command)
    command = add(
        "stop",
        stop.run,
        "end a service that was left running",
        "Drain and end a service on a Ray cluster, as one started with serve --detach.",
    )
    stop.add_options(command)
    _add_log_level(command)
    command = add(
        "top",
        top.run,
        "watch a running service",
        "Show load, rates and latencies of a running service in the terminal; Ctrl-C ends it.",
    )
    top.add_options(command)
    _add_log_level(command)
    command = add(
        "wait-for-devices",
        launch.run,
        "wait until a Ray cluster has room for a service",
        "Say what a Ray cluster lacks for a service, node by node, and wait until it is there; see "
        "docs/deploy/README.md.",
    )
    launch.add_options(command)
    _add_log_level(command)
    command = add(
        "simulate",
        simulate.run,
        "calculate how a model would be served on other hardware",
        "Run the scheduler on a load and a device that are only calculated; see docs/simulate.md.",
    )
    simulate.add_options(command)
    _add_output(command)
    return parser


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a line and nothing else to standard output"
    )
    _add_log_level(parser)


def _add_log_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="what goes to standard error"
    )


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


if __name__ == "__main__":
    raise SystemExit(main())
