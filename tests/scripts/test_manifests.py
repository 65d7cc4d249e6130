"""scripts/cluster.yaml and the KubeRay manifest, as far as they can be checked without machines or Kubernetes."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml  # comes with ray, as does the JSON schema's checker

from driver import cli, launch
from tests.end_to_end.clusters import ROOT

CLUSTER, KUBERAY = ROOT / "scripts" / "cluster.yaml", ROOT / "docs" / "deploy" / "kuberay.yaml"


@pytest.fixture
def cluster() -> dict[str, Any]:
    return yaml.safe_load(CLUSTER.read_text())


@pytest.fixture
def manifests() -> dict[str, dict[str, Any]]:
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(KUBERAY.read_text())}


def test_ray_up_would_take_the_configuration(cluster: dict[str, Any]) -> None:
    """By the steps of `ray up` before it opens a connection: defaults, then Ray's JSON schema."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(cluster)
    validate_config(prepared)
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == 2


def test_ray_up_refuses_what_it_does_not_know(cluster: dict[str, Any]) -> None:
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    with pytest.raises(jsonschema.ValidationError, match="start_commands"):
        validate_config(prepare_config({**cluster, "start_commands": []}))


def test_every_node_of_ray_up_starts_with_the_token_and_this_code(cluster: dict[str, Any]) -> None:
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert cluster["file_mounts"]["~/quadriga"] == "."
    for part in ("head", "worker"):
        start = cluster[f"{part}_start_ray_commands"][-1]
        for needed in ("RAY_AUTH_MODE=token", "PYTHONPATH=~/quadriga", "PATH=~/quadriga/.venv/bin:$PATH", "ray start"):
            assert needed in start


def test_the_kuberay_job_is_whole(manifests: dict[str, dict[str, Any]]) -> None:
    job = manifests["RayJob"]
    assert job["apiVersion"] == "ray.io/v1"
    spec = job["spec"]["rayClusterSpec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52, 0)  # the first with tokens
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "quadriga:0.1.0"
        assert {"requests", "limits"} == set(container["resources"])


def test_the_kuberay_job_asks_for_the_gpus_that_its_workers_have(manifests: dict[str, dict[str, Any]]) -> None:
    spec = manifests["RayJob"]["spec"]
    program, *words = shlex.split(spec["entrypoint"])
    assert program == "quadriga"
    args = cli._parser().parse_args(words)
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    resources = group["template"]["spec"]["containers"][0]["resources"]["requests"]
    nodes = [
        launch.Node(f"worker {at}", each, each)
        for at in range(group["replicas"])
        for each in [{"GPU": float(resources["nvidia.com/gpu"]), "CPU": float(resources["cpu"])}]
    ]
    assert sum(node.ranks(args.device) for node in nodes) == args.tp


def test_the_kuberay_service_leads_to_the_http_port_of_the_head(manifests: dict[str, dict[str, Any]]) -> None:
    service, head = manifests["Service"]["spec"], manifests["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert service["selector"].items() <= head["template"]["metadata"]["labels"].items()
    (container,) = head["template"]["spec"]["containers"]
    target = service["ports"][0]["targetPort"]
    assert target in [port["containerPort"] for port in container["ports"]]
    args = cli._parser().parse_args(shlex.split(manifests["RayJob"]["spec"]["entrypoint"])[1:])
    assert (args.port, args.host) == (target, "0.0.0.0")
