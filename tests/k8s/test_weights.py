"""What pods fetch: each script runs in bash against the real parsers of the commands that it calls."""

import fnmatch
import json
import os
import re
import subprocess
import sys

import pytest
from tests.k8s.support import (
    VALUES,
    compose,
    groups_of,
    needs_helm,
    of_kind,
    overlay,
    render,
    service_of,
    templates_of,
    values_of,
)
from tests.k8s.test_manifests import args_of, check_confinement

pytestmark = needs_helm

TARGET, DRAFT = "Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B"
SMALL = ["*.json", "*.txt", "*.model", "*.jinja"]
"""Of the target's repository routers and drafts need no more."""

NEEDED = {"router": {TARGET: SMALL}, "draft": {TARGET: SMALL, DRAFT: None}, "target": {TARGET: None}}
"""Pool -> repository -> patterns of its files, None: all."""

HF = """
import json, sys
import huggingface_hub.cli.download as command
def record(repo_id, filename=None, allow_patterns=None, **_):
    print("CALL", json.dumps([repo_id, filename, allow_patterns]), file=open({calls!r}, "a"))
    return "/nowhere"
command.hf_hub_download = command.snapshot_download = record
from huggingface_hub.cli.hf import app
app()
"""
OTHER = """
import json, sys
print("CALL", json.dumps(sys.argv[1:]), file=open({calls!r}, "a"))
"""


@pytest.fixture(name="run_script")
def _run_script(tmp_path):
    """``run_script(command, **environment)``: the arguments of each call of ``hf`` (what it fetches), ``aws``, ..."""
    calls, binaries = tmp_path / "calls", tmp_path / "bin"
    binaries.mkdir()
    for name, text in (("hf", HF), ("aws", OTHER), ("gcloud", OTHER), ("touch", OTHER), ("mkdir", OTHER)):
        (binaries / name).write_text(f"#!{sys.executable}\n" + text.format(calls=str(calls)))
        (binaries / name).chmod(0o755)

    def run(command, **environment):
        calls.write_text("")
        path = f"{binaries}:{os.environ['PATH']}"
        (tmp_path / "here").mkdir(exist_ok=True)  # no file that a pattern without quotes would find
        done = subprocess.run(
            command,
            cwd=tmp_path / "here",
            env=os.environ | {"PATH": path, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"} | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line.removeprefix("CALL ")) for line in calls.read_text().splitlines()]

    return run


def check_fetched(calls, pool):
    """That these calls fetch what a pool needs: whole repositories, or the files that match patterns."""
    assert all(filename is None for _, filename, _ in calls), calls
    assert {repository: patterns for repository, _, patterns in calls} == NEEDED[pool]


def init_container(service, pool, name):
    """One init container of a pool's pods."""
    containers = groups_of(service)[pool]["template"]["spec"]["initContainers"]
    (found,) = (container for container in containers if container["name"] == name)
    return found


def test_pods_download_what_their_pool_needs(run_script):
    documents = compose("gpu", ("model-download",))
    service = service_of(documents)
    config = args_of(service)
    assert (config.target_config.model_loading_config.source, config.draft_config.model_loading_config.source) == (
        TARGET,
        DRAFT,
    )
    for pool in NEEDED:
        fetch = init_container(service, pool, "fetch-models")
        check_fetched(run_script(fetch["command"]), pool)
        assert fetch["image"] == groups_of(service)[pool]["template"]["spec"]["containers"][0]["image"]


def test_one_option_with_two_values_is_noticed(run_script):
    calls = run_script(["bash", "-ec", f'hf download {TARGET} --include "*.json" "*.txt"'])
    with pytest.raises(AssertionError):
        check_fetched(calls, "router")


def test_the_patterns_find_what_a_router_reads():
    names = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
    )
    for name in (*names, "tokenizer.model", "chat_template.jinja"):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in SMALL), name
    assert not any(fnmatch.fnmatch("model-00001-of-00014.safetensors", pattern) for pattern in SMALL)


def test_gated_models_have_a_token_and_every_download_has_room():
    service = service_of(compose("gpu", ("model-download",)))
    for pool in NEEDED:
        fetch = init_container(service, pool, "fetch-models")
        (token,) = (entry for entry in fetch["env"] if entry["name"] == "HF_TOKEN")
        reference = token["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "paceline-hugging-face", "key": "token", "optional": True}
        spec = groups_of(service)[pool]["template"]["spec"]
        (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "models")
        room = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi"))
        for container in (fetch, spec["containers"][0]):
            assert int(container["resources"]["requests"]["ephemeral-storage"].removesuffix("Gi")) > room


@pytest.mark.parametrize("name", ["small", "gpu", "gpu-tp4", "gpu-two-hosts"])
def test_pods_ask_for_the_disk_that_they_use(name):
    for template in templates_of(service_of(overlay(name))).values():
        assert template["spec"]["containers"][0]["resources"]["requests"]["ephemeral-storage"]


# -- one volume for all ----------------------------------------------------------------------------------------------


def test_a_job_fills_the_claim_from_the_hub(run_script):
    documents = compose("gpu", ("model-fill",))
    (job,) = (job["spec"]["template"] for job in of_kind(documents, "Job").values())
    (container,) = job["spec"]["containers"]
    calls = run_script(container["command"])
    assert {repository for repository, filename, patterns in calls if filename is patterns is None} == {TARGET, DRAFT}
    (volume,) = (volume for volume in job["spec"]["volumes"] if volume["name"] == "models")
    claim = volume["persistentVolumeClaim"]
    assert claim["claimName"] in of_kind(documents, "PersistentVolumeClaim")
    assert not claim.get("readOnly")
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "models")
    home = next(entry["value"] for entry in container["env"] if entry["name"] == "HF_HOME")
    assert mount == {"name": "models", "mountPath": home}
    assert home == next(iter(of_kind(documents, "ConfigMap").values()))["data"]["HF_HOME"]  # where workers read
    assert next(e for e in container["env"] if e["name"] == "HF_TOKEN")["valueFrom"]["secretKeyRef"]["optional"]
    check_confinement(documents)


def test_jobs_fill_the_claim_from_stores_of_objects(run_script):
    for kind in ("s3", "gs"):
        documents = compose("gpu", (f"model-fill-{kind}",))
        (job,) = (job["spec"]["template"]["spec"] for job in of_kind(documents, "Job").values())
        (container,) = job["containers"]
        calls = run_script(container["command"], PACELINE_MODELS=f"{kind}://bucket/models")
        copies = [call for call in calls if call[0] in ("s3", "storage")]
        folders = ["hub/models--Qwen--Qwen3-32B", "hub/models--Qwen--Qwen3-0.6B"]
        assert [call[-2:] for call in copies] == [
            [f"{kind}://bucket/models/{folder}", f"/models/{folder}"] for folder in folders
        ]
        assert all("blobs" in " ".join(call) for call in copies)  # snapshots hold them as files
        (address,) = (entry for entry in container["env"] if entry["name"] == "PACELINE_MODELS")
        assert address["value"] == f"{kind}://bucket/models"
        assert job["serviceAccountName"] in of_kind(documents, "ServiceAccount")
        secret = container["envFrom"][0]["secretRef"] if kind == "s3" else job["volumes"][-1]["secret"]
        assert secret == {"optional": True} | (
            {"name": "paceline-s3"} if kind == "s3" else {"secretName": "paceline-gs"}
        )
        check_confinement(documents)


STORAGE = sorted(VALUES.glob("models-*.yaml"))


@pytest.mark.parametrize("storage", STORAGE, ids=lambda path: path.stem)
def test_each_kind_of_storage_provides_a_claim_that_many_machines_read(storage):
    documents = render(*values_of("gpu"), storage)
    (claim,) = of_kind(documents, "PersistentVolumeClaim").values()
    (mode,) = claim["spec"]["accessModes"]
    assert mode in ("ReadWriteMany", "ReadOnlyMany")
    classes, volumes = of_kind(documents, "StorageClass"), of_kind(documents, "PersistentVolume")
    assert bool(of_kind(documents, "Job")) is (mode == "ReadWriteMany")  # which fills it
    if claim["spec"]["storageClassName"]:
        assert claim["spec"]["storageClassName"] in classes
        assert mode == "ReadWriteMany"
    else:
        volume = volumes[claim["spec"]["volumeName"]]["spec"]
        assert volume["accessModes"] == [mode]
        assert volume["claimRef"] == {"namespace": "paceline", "name": claim["metadata"]["name"]}
        assert volume["storageClassName"] == ""
        assert volume["persistentVolumeReclaimPolicy"] == "Retain"
    for group in groups_of(service_of(documents)).values():
        (used,) = (v for v in group["template"]["spec"]["volumes"] if v["name"] == "models")
        assert used["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"], "readOnly": True}


# -- a copy on each machine ------------------------------------------------------------------------------------------


def test_pods_find_what_a_daemonset_has_put_on_their_machine(run_script):
    documents = compose("gpu", ("node-cache",))
    sets = of_kind(documents, "DaemonSet")
    volume = of_kind(documents, "PersistentVolume")["paceline-models"]["spec"]
    (home,) = {doc["metadata"]["namespace"] for doc in sets.values()}  # where pods may mount a folder of the machine
    assert (
        of_kind(documents, "Namespace")[home]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "privileged"
    )
    marks = {}
    for name, doc in sets.items():
        spec = doc["spec"]["template"]["spec"]
        (host,) = (entry["hostPath"] for entry in spec["volumes"] if "hostPath" in entry)
        assert host["path"] == volume["hostPath"]["path"]
        marks[name] = run_script(spec["initContainers"][0]["command"])
        assert spec["nodeSelector"] == {"paceline/models": name.removeprefix("paceline-")}
    service = service_of(documents)
    for pool, name in (("router", "tokenizers"), ("draft", "weights"), ("target", "weights")):
        script = init_container(service, pool, "wait-for-models")["command"][-1]
        mark = script.split("until [ -e ")[1].split(" ]")[0]
        calls = marks[f"paceline-{name}"]
        before = [call for call in calls[: calls.index([mark])] if len(call) == 3]
        fetched = {repository: patterns for repository, _, patterns in before}
        for repository, patterns in NEEDED[pool].items():
            assert fetched[repository] in (None, patterns), (pool, repository)
    check_confinement(documents)


# -- other models ----------------------------------------------------------------------------------------------------


OTHER_MODELS = (
    *("target.model=big", "target.source=org/big", "target.tokenizer=org/tokenizer"),
    *("draft.model=small", "draft.source=/models/small"),
)


def fetches(container):
    """The models that a script fetches, in its order."""
    return re.findall(r"hf download (\S+)", container["command"][-1])


def test_what_is_fetched_follows_the_models():
    service = service_of(compose("gpu", ("model-download", *OTHER_MODELS)))
    args = args_of(service)
    assert args.target_config.model_loading_config.source == "org/big"
    for pool, models in (("router", ["org/big", "org/tokenizer"]), ("target", ["org/tokenizer", "org/big"])):
        assert fetches(init_container(service, pool, "fetch-models")) == models
    assert fetches(init_container(service, "draft", "fetch-models")) == [
        "org/big",
        "org/tokenizer",
    ]  # its own has a folder
    for source in ("model-fill", "model-fill-s3", "model-fill-gs", "node-cache"):
        documents = compose("gpu", (source, *OTHER_MODELS))
        jobs = (*of_kind(documents, "Job").values(), *of_kind(documents, "DaemonSet").values())
        assert jobs
        assert "Qwen" not in str(jobs)
        assert "tokenizer" in str(jobs)


def test_what_a_job_does_is_in_its_name():
    """Kubernetes refuses a change of a Job: helm has to make another."""
    chosen = (("model-fill",), ("model-fill", *OTHER_MODELS), ("model-fill-s3",), ("model-fill", "image.tag=new"))
    elsewhere = ("model-fill-s3", "models.fill.address=s3://other/models")
    jobs = [of_kind(compose("gpu", values), "Job") for values in (*chosen, elsewhere, ("model-fill",))]
    specs = {name: job["spec"] for found in jobs for name, job in found.items()}
    assert len(specs) == len(chosen) + 1  # and the first of them once more
    assert all(specs[name] == job["spec"] for found in jobs for name, job in found.items())


def test_another_model_has_another_mark():
    """A pod waits for the models of its own configuration, not for those of the one before."""
    scripts = [
        init_container(service_of(compose("gpu", chosen)), "router", "wait-for-models")["command"][-1]
        for chosen in (("node-cache",), ("node-cache", *OTHER_MODELS))
    ]
    assert scripts[0] != scripts[1]


def test_without_a_draft_none_is_fetched():
    service = service_of(compose("gpu", ("model-download", "draft.enabled=false")))
    assert args_of(service).draft_config is None
    assert set(groups_of(service)) == {"router", "target"}
    assert fetches(init_container(service, "target", "fetch-models")) == [TARGET]
