"""The manifest of `examples/clusters`: against a schema of PyTorchJob, and with what the operator gives its pods.

What breaks here first: a field that Kubernetes would refuse, or a variable of the operator that our launcher overrides.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from zoo_tests.booster.cli.started import Started
from zoo_tests.booster.clusters.job import STEPS, plain_losses
from zoo_tests.booster.clusters.test_torchrun import free_port
from zoo_tests.harness.environment import REPOSITORY

JOB = Path(__file__).with_name("job.py")
MANIFEST = REPOSITORY / "examples" / "clusters" / "pytorchjob.yaml"
SCHEMA = json.loads(Path(__file__).with_name("pytorchjob_schema.json").read_text())


def manifest() -> dict[str, Any]:
    return copy.deepcopy(yaml.safe_load(MANIFEST.read_text()))


def pod_of(job: dict[str, Any], kind: str = "Worker") -> dict[str, Any]:
    return job["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"]


def environments_of(job: dict[str, Any], port: str) -> list[dict[str, str]]:
    """What the training operator adds to the environment of each pod of a job with a master, the master's first."""
    kinds = job["spec"]["pytorchReplicaSpecs"]
    num_pods = sum(each["replicas"] for each in kinds.values())
    per_node = job["spec"]["nprocPerNode"]
    own = {variable["name"]: variable["value"] for variable in pod_of(job)["containers"][0]["env"]}
    common = {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "127.0.0.1",  # in a cluster, the name of the master's service
        "MASTER_PORT": port,
        "WORLD_SIZE": str(num_pods * int(per_node)),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
        "PET_NPROC_PER_NODE": per_node,
        "PET_NNODES": str(num_pods),
    }
    return [own | common | {"RANK": str(pod), "PET_NODE_RANK": str(pod)} for pod in range(num_pods)]


def test_the_manifest_fits_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(manifest(), SCHEMA)


def test_its_volumes_and_sizes_agree() -> None:
    job = manifest()
    for kind in ("Master", "Worker"):
        pod = pod_of(job, kind)
        (container,) = pod["containers"]
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
        own = {variable["name"]: variable["value"] for variable in container["env"]}
        assert int(own["PET_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"], "killed before it has saved"


def as_a_number(job: dict[str, Any]) -> None:
    job["spec"]["nprocPerNode"] = 8


def with_a_slip(job: dict[str, Any]) -> None:
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartpolicy"] = "OnFailure"


def with_another_name(job: dict[str, Any]) -> None:
    pod_of(job)["containers"][0]["name"] = "train"


def with_two_masters(job: dict[str, Any]) -> None:
    job["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = 2


def with_a_number_for_an_argument(job: dict[str, Any]) -> None:
    pod_of(job)["containers"][0]["args"] = ["--tp", 8]


@pytest.mark.parametrize(
    "change", [as_a_number, with_a_slip, with_another_name, with_two_masters, with_a_number_for_an_argument]
)
def test_the_schema_finds(change: Callable[[dict[str, Any]], None]) -> None:
    job = manifest()
    change(job)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, SCHEMA)


def started(job: dict[str, Any], script: Path, *arguments: object) -> list[Started]:
    """Its pods on this machine, with another script."""
    (container,) = pod_of(job)["containers"]
    assert container["command"] == ["booster", "run"]
    command = ("-m", *container["command"], str(script), *map(str, arguments))
    return [Started(*command, **environment) for environment in environments_of(job, free_port())]


@pytest.mark.campaign
def test_two_pods_train(tmp_path: Path) -> None:
    job = manifest()
    job["spec"]["nprocPerNode"] = "1"
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 1
    results = [pod.ended() for pod in started(job, JOB, tmp_path)]
    assert [result.code for result in results] == [0, 0], "\n".join(result.err for result in results)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["losses"] == pytest.approx(plain_losses(), rel=1e-6, abs=0)
    assert result["worlds"] == [2] * STEPS
    assert "mesh: dp 2 on 2 machines; dp crosses machines\n" in results[0].err
