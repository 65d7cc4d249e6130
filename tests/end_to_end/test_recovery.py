"""What a lost rank costs: a pause, and nothing else."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from driver.cluster import Cluster
from driver.executor import WorkerFailed
from driver.recovery import RequestPoisonous
from driver.wire import RequestFailed
from quadriga import LLM, SamplingParams
from tests.driver import serving
from tests.end_to_end.conftest import TinyModels

PROMPT = [1, 2, 3]
LENGTH = 40
# Greedy, seeded, and cut off the distribution's tail.
PARAMS = [
    SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=8, max_tokens=LENGTH, ignore_eos=True),
]
POISON = 200


@pytest.fixture
def folder(tiny: TinyModels) -> Path:
    return tiny.folder("llama")


def open_llm(folder: Path, **options: Any) -> LLM:
    return serving.open_llm(folder, **{"executor": "ray", "num_kv_blocks": 64, "hang_seconds": 1.5, **options})


def outputs(llm: LLM) -> list[list[int]]:
    """Of a few requests that run together, with a chunked prompt among them."""
    prompts = [PROMPT, PROMPT, PROMPT, list(range(60))]
    found = llm.generate(prompts, [*PARAMS, PARAMS[0]], use_tqdm=False)
    assert [completion.error for completion in found] == [None] * 4
    assert [completion.finish_reason for completion in found] == ["length"] * 4
    return [completion.output_token_ids for completion in found]


@pytest.fixture(scope="module")
def undisturbed(tiny: TinyModels, ray_cluster: Cluster) -> list[list[int]]:
    with open_llm(tiny.folder("llama"), executor="inline") as llm:
        return outputs(llm)


@pytest.mark.parametrize(
    ("size", "faults"),
    [
        (1, "0:9:kill"),
        (2, "0:9:kill"),
        (2, "1:0:kill"),
        (3, "1:9:kill,2:9:kill"),
        (2, "1:9:raise"),
        (2, "0:9:memory"),
        (2, "1:9:stop"),
        (2, "0:25:hang"),
        (2, "1:load:kill"),
        (2, "1:9:kill,1:reload:kill"),
    ],
)
def test_every_request_goes_on_with_its_next_token(
    folder: Path,
    ray_cluster: Cluster,
    undisturbed: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    size: int,
    faults: str,
) -> None:
    monkeypatch.setenv("QUADRIGA_FAULT", faults)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the watchdog writes
    with open_llm(folder, tensor_parallel_size=size, max_num_batched_tokens=16) as llm:
        assert outputs(llm) == undisturbed
        stats = llm.stats()
        assert stats["restarts"] == (0 if faults == "1:load:kill" else 1)
        assert stats["kv_blocks_free"] == 64
        reports = [path.read_text() for path in tmp_path.glob("quadriga-hang-*")]
    assert len(reports) == (1 if "stop" in faults or "hang" in faults else 0)
    for report in reports:
        assert re.search(r"==== step \d+ hangs", report)
        assert "StepPlan(" in report
        assert "==== rank 1" in report
        assert ("on_plan" if "hang" in faults else "it does not answer") in report
        assert re.search(r"==== driver\s+Thread|==== driver\s+Current thread", report)


@pytest.mark.parametrize("faults", ["1:load:stop", "1:9:kill,1:reload:stop"])
def test_a_rank_that_hangs_while_it_loads_is_made_anew(
    folder: Path, ray_cluster: Cluster, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch, faults: str
) -> None:
    monkeypatch.setenv("QUADRIGA_FAULT", faults)
    with open_llm(folder, tensor_parallel_size=2, max_num_batched_tokens=16, start_timeout_seconds=6.0) as llm:
        assert outputs(llm) == undisturbed


def test_ranks_that_survive_keep_their_processes(
    folder: Path, ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUADRIGA_FAULT", "1:5:kill")
    with open_llm(folder, tensor_parallel_size=3) as llm:
        ranks = llm._engine.executor.ranks
        before = [place.pid for place in ranks._places]
        outputs(llm)
        after = [place.pid for place in ranks._places]
        assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


def test_a_request_that_ends_every_epoch_fails_alone(
    folder: Path, ray_cluster: Cluster, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUADRIGA_FAULT", f"1:token={POISON}:kill")
    with open_llm(folder, tensor_parallel_size=2, max_num_batched_tokens=16) as llm:
        streams = [llm.stream(PROMPT, params) for params in PARAMS]
        poison = llm.stream([5, POISON], PARAMS[0])
        with pytest.raises(RequestPoisonous, match="the workers fail whenever this request runs"):
            list(poison)
        found = [[token for piece in stream for token in piece.token_ids] for stream in streams]
        assert found == undisturbed[:3]
        assert llm.stats()["restarts"] == 3
        assert llm.stats()["kv_blocks_free"] == 64


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded", "truncated"])
def test_logits_that_are_not_finite_fail_their_request_alone(
    folder: Path,
    ray_cluster: Cluster,
    undisturbed: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    rank: int,
    params: SamplingParams,
) -> None:
    monkeypatch.setenv("QUADRIGA_FAULT", f"{rank}:token={POISON}:nan")
    with open_llm(folder, tensor_parallel_size=size, executor="auto", max_num_seqs=4) as llm:
        good = [llm.stream(PROMPT, one) for one in PARAMS]
        with pytest.raises(
            RequestFailed, match=r"the model's logits of this request, behind \d+ tokens, are not finite"
        ):
            llm.generate([*range(20), POISON], params)
        found = [[token for piece in stream for token in piece.token_ids] for stream in good]
        assert found == undisturbed[:3]
        stats = llm.stats()
        assert (stats["restarts"], stats["not_finite"], stats["kv_blocks_free"]) == (0, 1, 64)


def test_epochs_in_vain_come_to_an_end(folder: Path, ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(folder, executor="inline") as llm:
        failing = llm._engine.executor._worker.runner
        monkeypatch.setattr(failing, "launch", lambda plan, started: (_ for _ in ()).throw(RuntimeError("too hot")))
        began = time.monotonic()
        # With nothing that any request could be blamed for, each would be tried; here the engine is what is broken.
        monkeypatch.setattr("driver.recovery.EPOCHS_TO_SUSPECT", 1000)
        with pytest.raises(WorkerFailed, match="too hot"):
            llm.generate(PROMPT, PARAMS[0])
        assert time.monotonic() - began < 20
        assert llm.stats()["restarts"] == 5
