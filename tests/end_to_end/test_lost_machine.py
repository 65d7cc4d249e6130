"""A machine that vanishes without a word: no connection is closed, no process says goodbye."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.end_to_end.clusters import ROOT
from tests.end_to_end.conftest import TinyModels
from tests.end_to_end.machines import ray_machines, why_not

PROMPT, MAX_TOKENS = [1, 2, 3, 200, 7], 60


def test_a_rank_on_a_machine_that_vanishes_is_noticed_and_made_anew_on_another(tiny: TinyModels) -> None:
    if reason := why_not():
        pytest.skip(reason)
    folder = str(tiny.folder("llama"))
    with ray_machines(3) as machines:
        command = [sys.executable, "-m", "tests.end_to_end.nodes_program", "loss", folder, str(MAX_TOKENS)]
        process = subprocess.Popen(
            machines[0].command(*command, *map(str, PROMPT)),
            env=machines[0].environment,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            before = [place["ip"] for place in json.loads(process.stdout.readline())]
            victim = next(machine for machine in machines[1:] if machine.ip in before)
            victim.pull_cable(machines[0])
            output, log = process.communicate(timeout=120)
        finally:
            process.kill()
    answer = json.loads(output.splitlines()[-1])
    assert answer["restarts"] == 1
    assert answer["answers"] == [tiny.greedy("llama", PROMPT, MAX_TOKENS)] * len(answer["answers"])
    # Not Ray's word, which comes later.
    assert f"epoch 0 has ended: rank {before.index(victim.ip)} is no longer connected" in log
    after = {place["ip"] for place in answer["places"]}
    assert after == {machine.ip for machine in machines if machine is not victim}
