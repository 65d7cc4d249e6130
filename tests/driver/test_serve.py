"""`quadriga serve --executor inline`: a process of its own, over HTTP, and how it ends."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.serving import NUM_BLOCKS
from tests.end_to_end.serving import Serve

KEY = "s3cret"


def get(url: str, key: str | None = None) -> tuple[int, dict]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def inline_options(folder: Path, *options: str) -> list[str]:
    return ["--model", str(folder), "--executor", "inline", "--num-kv-blocks", str(NUM_BLOCKS), *options]


@pytest.fixture(scope="module")
def serve(folder: Path) -> Iterator[Serve]:
    serve = Serve(*inline_options(folder, "--served-model-name", "tiny", "--api-key", "other", KEY))
    yield serve
    serve.close()
