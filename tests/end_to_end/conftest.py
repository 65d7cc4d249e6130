"""One Ray for all tests of this folder, and the real model with what transformers answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.cluster import Cluster
from tests.models import greedy, make_tiny_model
from workers.source import resolve_model

STORY = (
    "The keeper of the lighthouse climbed the stairs each evening before the sun went down. He carried oil, a cloth "
    "for the lens, and a book in which he wrote the names of the ships. "
)
SMOLLM2_PROMPTS = (
    "The sea is",
    "def fibonacci(n):\n    ",
    "Gravity is the force that",
    "La capitale de la France est",
    "你好，世界！今天",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once",  # one token
    STORY * 27,  # over a thousand tokens
    "Write a haiku about autumn leaves.\n\n",
)
SMOLLM2_TOKENS = 16


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """A private Ray that engines join; it ends with the tests."""
    cluster = Cluster("local", 8)
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def smollm2_expected(smollm2: Path) -> list[tuple[list[int], list[int]]]:
    """For each prompt its token ids and transformers' greedy continuation in fp32."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    encoded = [tokenizer.encode(prompt).ids for prompt in SMOLLM2_PROMPTS]
    assert min(map(len, encoded)) == 1
    assert max(map(len, encoded)) > 1000
    return [(ids, greedy(smollm2, ids, SMOLLM2_TOKENS)) for ids in encoded]


class TinyModels:
    """Tiny random models, made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._expected: dict[str, list[int]] = {}

    def folder(self, kind: str) -> Path:
        folder = self._root / kind
        return folder if folder.is_dir() else make_tiny_model(kind, folder)

    def greedy(self, kind: str, prompt: list[int], max_tokens: int) -> list[int]:
        """transformers' greedy continuation, computed once."""
        key = json.dumps([kind, prompt, max_tokens])
        if key not in self._expected:
            self._expected[key] = greedy(self.folder(kind), prompt, max_tokens)
        return self._expected[key]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))
