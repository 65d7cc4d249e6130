"""Run by test_nodes.py on the Ray that RAY_ADDRESS names; prints one JSON object.

`generate FOLDER MAX_TOKENS TOKEN..`: an engine of two ranks, its tokens and its ranks' places.
`loss FOLDER MAX_TOKENS TOKEN..`: tells the places of the ranks and generates until one has been lost.
`gpus FOLDER`: the places of the ranks of two engines with two GPUs each, none of which does anything.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import ray

from driver.config import EngineConfig
from driver.executor import Executor
from driver.ranks import Ranks
from driver.setup import make_executor, read_model, worker_specs
from quadriga import LLM, SamplingParams
from scheduler.limits import Limits


def places(actors: Sequence[Any]) -> list[dict[str, Any]]:
    """Of each rank: node, address of the node, the GPUs that Ray gave it, and what CUDA would show it."""
    return ray.get([actor.__ray_call__.options(concurrency_group="watch").remote(_place) for actor in actors])


def _place(actor: Any) -> dict[str, Any]:
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids()["GPU"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"node": context.get_node_id(), "ip": actor.place().node_ip, "gpus": gpus, "visible": visible}


def generate(folder: str, max_tokens: str, *prompt: str) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=int(max_tokens), ignore_eos=True)
    with LLM(folder, tensor_parallel_size=2, device="cpu", dtype="float32", num_kv_blocks=64) as llm:
        tokens = llm.generate([int(word) for word in prompt], params).output_token_ids
        driver_node = ray.get_runtime_context().get_node_id()
        return {"tokens": tokens, "driver": driver_node, "places": places(llm._engine.executor.ranks.actors)}


def loss(folder: str, max_tokens: str, *prompt: str) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=int(max_tokens), ignore_eos=True)
    answers = []
    with LLM(folder, tensor_parallel_size=2, device="cpu", dtype="float32", num_kv_blocks=64) as llm:
        recoveries, ranks = llm._engine.recoveries, llm._engine.executor.ranks
        print(json.dumps(places(ranks.actors)), flush=True)
        while recoveries.restarts == 0:
            answers.append(llm.generate([int(word) for word in prompt], params).output_token_ids)
        return {"answers": answers, "restarts": recoveries.restarts, "places": places(ranks.actors)}


def gpus(folder: str) -> dict[str, Any]:
    first, second = _placed(folder), _placed(folder)
    try:
        return {"places": places([*first.ranks.actors, *second.ranks.actors])}
    finally:
        first.close()
        second.close()


def _placed(folder: str) -> Executor:
    """Two ranks that have their GPUs but have not opened them: there are none."""
    config = EngineConfig(model=folder, tensor_parallel_size=2, device="cuda")
    executor = make_executor(config)
    specs = worker_specs(config, read_model(config), Limits(64, 4), executor)
    executor.ranks = Ranks(executor._cluster, "cuda", specs, 60.0, "")
    return executor


if __name__ == "__main__":
    logging.basicConfig()
    print(json.dumps({"generate": generate, "loss": loss, "gpus": gpus}[sys.argv[1]](*sys.argv[2:])))
