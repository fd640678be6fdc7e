"""Files for clusters: manifests against KubeRay's schema and the settings of their commands, and the TPU VM script."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from rolljax import cli, sampler_host
from rolljax.cluster.placement import Ray
from rolljax.commands import train

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SCHEMA = ROOT / "tests" / "data" / "raycluster_schema.json"
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))
SCRIPT = str(DEPLOY / "tpu_vm.sh")
OPTIONS = [
    "--dry_run",
    "--zone",
    "us-east5-b",
    "--trainer",
    "t",
    "--samplers",
    "s-0,s-1",
    "--run_dir",
    "/shared/my run",
]


def strict(node):
    """Refuse fields that a schema does not have, as `kubectl apply` does."""
    if isinstance(node, dict):
        more = {"additionalProperties": False} if "properties" in node and node["properties"] != {} else {}
        return more | {key: strict(value) for key, value in node.items()}
    return [strict(each) for each in node] if isinstance(node, list) else node


def errors(manifest):
    return [
        e.json_path
        for e in jsonschema.Draft202012Validator(strict(json.loads(SCHEMA.read_text()))).iter_errors(manifest)
    ]


def settings_of(path):
    """Return the arguments of the command in a manifest's comment."""
    comment = "".join(m[1] for m in re.finditer(r"^# ?(.*\n)", path.read_text(), re.M)).replace("\\\n", " ")
    words = shlex.split(re.search(r"python -m rolljax\.train (.*)", comment)[1])
    return train.parse(words)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_the_schema_of_kuberay(path):
    manifest = yaml.safe_load(path.read_text())
    assert errors(manifest) == []
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    worker = manifest["spec"]["workerGroupSpecs"][0]
    worker["minReplicas"], worker["replica"] = "2", 1
    assert sorted(errors(manifest)) == ["$.spec.workerGroupSpecs[0]", "$.spec.workerGroupSpecs[0].minReplicas"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_samplers_of_the_command_fit_the_pods(path):
    args = settings_of(path)
    placement = cli.load_recipe(["quickstart"], args.set).value.placement
    spec = yaml.safe_load(path.read_text())["spec"]
    assert isinstance(placement.launcher, Ray) and placement.samplers > 1
    pods = next(group for group in spec["workerGroupSpecs"] if group["groupName"] == "samplers")
    limits = pods["template"]["spec"]["containers"][0]["resources"]["limits"]
    if placement.launcher.topology:
        node = pods["template"]["spec"]["nodeSelector"]
        assert node["cloud.google.com/gke-tpu-topology"] == placement.launcher.topology
        assert placement.launcher.generation in node["cloud.google.com/gke-tpu-accelerator"]
        chips, device = 8, "google.com/tpu"
    else:
        chips, device = placement.launcher.resources["GPU"], "nvidia.com/gpu"
    assert int(limits[device]) * pods["replicas"] == chips * placement.samplers
    assert placement.launcher.cpus * placement.samplers <= int(limits["cpu"]) * pods["replicas"]
    head = spec["headGroupSpec"]["rayStartParams"]
    assert head.get("num-gpus") == "0" or json.loads(head["resources"].strip("'")) == {"TPU": 0}


def dry_run(*words):
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True)


def test_the_script_prints_the_commands_that_it_would_run():
    done = dry_run(*OPTIONS, "--", "--gin", "my.gin", "--set", "Remote.weights = 'gs://bucket/weights'")
    assert done.returncode == 0
    ssh = [shlex.split(line) for line in done.stdout.splitlines()]
    assert all(words[:6] == "gcloud compute tpus tpu-vm ssh".split() + [words[5]] for words in ssh)
    on = [("t", "all"), *((name, hosts) for name in ("s-0", "s-1") for hosts in ("0", "all"))]
    assert [(words[5], words[9]) for words in ssh] == on
    started, *rest = (words[-1] for words in ssh)
    words = shlex.split(started.partition(" > ")[0])
    assert words[2:4] == ["-m", "rolljax.train"]
    args = train.parse(words[4:])
    assert (args.gin, args.run_dir) == (["my.gin"], "/shared/my run")
    placement = cli.load_recipe(["quickstart"], args.set).value.placement
    assert (placement.samplers, placement.weights, placement.launcher.port) == (2, "gs://bucket/weights", 8477)
    for name, (key, sampler) in zip(("s-0", "s-1"), (rest[:2], rest[2:]), strict=True):
        assert key == "umask 077; cat > rolljax.key"
        args = sampler_host.parse(shlex.split(sampler.partition(" > ")[0])[4:])
        assert (args.name, args.key_file, args.join) == (name, "rolljax.key", "ADDRESS:8477")
    assert "cat '\\''/shared/my run/samplers/key'\\''" in done.stderr


def test_the_script_names_what_is_wrong():
    assert dry_run("--zone").stderr == "tpu_vm.sh: --zone needs a value\n"
    assert dry_run(*OPTIONS[:-2]).stderr == "tpu_vm.sh: --run_dir is needed\n"
    assert dry_run("--no").returncode == 2


def test_shellcheck_finds_nothing():
    done = subprocess.run([Path(sys.executable).parent / "shellcheck", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
