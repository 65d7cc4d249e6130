"""What the log tells of each rank's memory, and how many requests it is enough for."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest

from driver.setup import _report
from workers.spec import WorkerReady

MIB = 1 << 20


def ready(rank: int) -> WorkerReady:
    sizes = {"weight_bytes": 500 * MIB, "activation_bytes": 60 * MIB, "graph_bytes": 7 * MIB, "cache_bytes": 300 * MIB}
    names = {"backend": "flash_attn", "transport": "nccl and symmetric memory"}
    return WorkerReady(
        rank=rank, num_blocks=35, block_size=256, load_seconds=1.0, peak_rss_bytes=90 * MIB, **sizes, **names
    )


@pytest.mark.parametrize(("length", "fit"), [(2048, 4), (2049, 3), (256, 35), (9000, 0)])
def test_the_log_tells_where_memory_went_and_what_fits(caplog: pytest.LogCaptureFixture, length: int, fit: int) -> None:
    with caplog.at_level(logging.INFO):
        _report(SimpleNamespace(max_model_len=length), [ready(0), ready(1)], 256)
    assert (
        "rank 1: weights 500 MiB, activations 60 MiB, graphs 7 MiB, KV cache up to 300 MiB, peak RSS 90 MiB, "
        "attention flash_attn, collectives nccl and symmetric memory" in caplog.text
    )
    wanted = f"35 blocks of 256 tokens: {fit} requests of full length, {length} tokens each, fit at once"
    assert wanted in caplog.text
    assert ("fewer than the model's context of 9000" in caplog.text) == (fit == 0)


def test_what_nobody_measured_is_not_told_as_nothing(caplog: pytest.LogCaptureFixture) -> None:
    on_cpu = dataclasses.replace(ready(0), activation_bytes=0, graph_bytes=0)
    with caplog.at_level(logging.INFO):
        _report(SimpleNamespace(max_model_len=2048), [on_cpu], 256)
    assert "rank 0: weights 500 MiB, KV cache up to 300 MiB, peak RSS 90 MiB, attention" in caplog.text
