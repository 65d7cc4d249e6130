"""A tiny model for all driver tests, and the command line run in this process."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from driver import cli
from driver.llm import LLM
from tests.driver.serving import Place, open_llm, open_place
from tests.models import make_byte_tokenizer, make_tiny_model


@dataclass
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Outcome]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a byte tokenizer. Not to be changed: copy it."""
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return make_byte_tokenizer(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    """The tiny model, started; modules that want it otherwise have a fixture of their own."""
    with open_llm(folder) as llm:
        yield llm


@pytest.fixture
def place(llm: LLM) -> Iterator[Place]:
    """A service on that model, and its port."""
    with open_place(llm) as place:
        yield place


@pytest.fixture
def process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a command that is run in this process changes in it is put back."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    root = logging.getLogger()
    kept = root.level, list(root.handlers)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    levels = {name: logging.getLogger(name).level for name in ("filelock", "urllib3", "httpx", "huggingface_hub")}
    yield
    root.setLevel(kept[0])
    root.handlers[:] = kept[1]
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], process_state: None) -> Run:
    """Runs `quadriga generate` on the tiny model."""

    def run(*options: str, model: Path | str = folder, cache: str = "64") -> Outcome:
        try:
            code = cli.main(["generate", "--model", str(model), "--device", "cpu", "--num-kv-blocks", cache, *options])
        except SystemExit as exit_:  # argparse
            code = exit_.code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Outcome(code, captured.out, captured.err)

    return run
