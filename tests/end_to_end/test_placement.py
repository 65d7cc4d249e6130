"""What a Ray cluster that cannot hold the workers makes the driver say."""

from __future__ import annotations

import time

import pytest

from driver.cluster import Cluster
from driver.config import ConfigError
from tests.end_to_end.conftest import TinyModels


def test_more_ranks_than_gpus_are_refused_with_both_numbers(ray_cluster: Cluster, tiny: TinyModels) -> None:
    from quadriga import LLM

    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2 needs 2 GPUs, but the Ray cluster has 0: 127\.0"):
        LLM(str(tiny.folder("llama")), tensor_parallel_size=2, device="cuda")


def test_two_models_in_one_process_share_its_ray_and_end_one_by_one(ray_cluster: Cluster, tiny: TinyModels) -> None:
    from quadriga import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first = LLM(str(tiny.folder("llama")), tensor_parallel_size=2, dtype="float32")
    second = LLM(str(tiny.folder("qwen2")), tensor_parallel_size=2, dtype="float32")
    try:
        assert first.generate([1, 2], params).output_token_ids == tiny.greedy("llama", [1, 2], 4)
        first.close()
        assert second.generate([1, 2], params).output_token_ids == tiny.greedy("qwen2", [1, 2], 4)
    finally:
        first.close()
        second.close()


def test_waiting_for_room_ends_and_says_what_there_is(
    ray_cluster: Cluster, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cluster that was joined, where ranks take CPUs."""
    import ray

    from quadriga import LLM

    monkeypatch.setattr(Cluster, "bundle", lambda self, device: {"CPU": 1.0})
    cpus = int(ray.cluster_resources()["CPU"])
    hog = ray.remote(num_cpus=cpus - 1)(lambda: time.sleep(60)).remote()
    time.sleep(2)  # until the hog has its room
    began = time.monotonic()
    try:
        message = rf"no room for 2 workers with 1 CPU each within 5 s; the Ray cluster has 127.* with {cpus} CPUs"
        with pytest.raises(ConfigError, match=message):
            LLM(str(tiny.folder("llama")), tensor_parallel_size=2, start_timeout_seconds=5)
    finally:
        ray.cancel(hog, force=True)
    assert 4 < time.monotonic() - began < 20
