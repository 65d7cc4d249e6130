"""What joining or ending a Ray leaves of the program's own, also when it goes wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from driver import cluster
from driver.config import ConfigError


@pytest.fixture
def own_handler() -> Iterator[object]:
    before = signal.getsignal(signal.SIGTERM)
    own = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGTERM, own)
    yield own
    signal.signal(signal.SIGTERM, before)


def test_the_programs_handling_of_sigterm_outlives_a_ray_that_cannot_be_reached(
    own_handler: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(address: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as ray.init does
        raise ConfigError("nobody is there")

    monkeypatch.setattr(cluster.Cluster, "_connection", None)
    monkeypatch.setattr(cluster, "_connect", connect)
    with pytest.raises(ConfigError):
        cluster.Cluster("10.0.0.9:6379", 1)
    assert signal.getsignal(signal.SIGTERM) is own_handler


def test_a_cleaner_that_hangs_keeps_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cluster, "CLEANER_SECONDS", 0.2)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(60)"], stdin=subprocess.PIPE
    ) as cleaner:
        try:
            cluster._Connection(ours=False, folder="/tmp/quadriga-abc", cleaner=cleaner).close()
        finally:
            cleaner.kill()
    assert f"process {cleaner.pid}) has not removed /tmp/quadriga-abc within 0.2 s" in caplog.text
