"""What pods fetch: each script runs in bash against the real parsers of the commands that it calls."""

from __future__ import annotations

import copy
import fnmatch
import json
import os
import subprocess
import sys

import pytest
import yaml
from tests.k8s.support import (
    K8S,
    build,
    compose,
    groups_of,
    needs_kubectl,
    of_kind,
    overlay,
    serve_config_of,
    service_of,
    templates_of,
)
from tests.k8s.test_manifests import args_of, check_confinement

pytestmark = needs_kubectl

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
            timeout=120,
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


def test_pods_download_what_their_pool_needs(tmp_path, run_script):
    documents = compose(tmp_path, "gpu", ("model-download",))
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


def test_gated_models_have_a_token_and_every_download_has_room(tmp_path):
    service = service_of(compose(tmp_path, "gpu", ("model-download",)))
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


def test_a_job_fills_the_claim_from_the_hub(tmp_path, run_script):
    documents = compose(tmp_path, "gpu", ("model-fill",))
    job = of_kind(documents, "Job")["paceline-models"]["spec"]["template"]
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


def test_jobs_fill_the_claim_from_stores_of_objects(tmp_path, run_script):
    for kind in ("s3", "gs"):
        (tmp_path / kind).mkdir()
        documents = compose(tmp_path / kind, "gpu", (f"model-fill-{kind}",))
        job = of_kind(documents, "Job")["paceline-models"]["spec"]["template"]["spec"]
        (container,) = job["containers"]
        calls = run_script(container["command"], PACELINE_MODELS=f"{kind}://bucket/models")
        copies = [call for call in calls if call[0] in ("s3", "storage")]
        folders = ["hub/models--Qwen--Qwen3-32B", "hub/models--Qwen--Qwen3-0.6B"]
        assert [call[-2:] for call in copies] == [
            [f"{kind}://bucket/models/{folder}", f"/models/{folder}"] for folder in folders
        ]
        assert all("blobs" in " ".join(call) for call in copies)  # snapshots hold them as files
        (address,) = (entry for entry in container["env"] if entry["name"] == "PACELINE_MODELS")
        source = of_kind(documents, "ConfigMap")[address["valueFrom"]["configMapKeyRef"]["name"]]
        assert source["data"]["address"].startswith(f"{kind}://")
        assert job["serviceAccountName"] in of_kind(documents, "ServiceAccount")
        secret = container["envFrom"][0]["secretRef"] if kind == "s3" else job["volumes"][-1]["secret"]
        assert secret == {"optional": True} | (
            {"name": "paceline-s3"} if kind == "s3" else {"secretName": "paceline-gs"}
        )
        check_confinement(documents)


@pytest.mark.parametrize("name", sorted(path.name for path in (K8S / "storage").iterdir()))
def test_each_kind_of_storage_provides_a_claim_that_many_machines_read(tmp_path, name):
    storage = os.path.relpath(K8S / "storage" / name, tmp_path)
    lines = {"resources": [os.path.relpath(K8S / "overlays" / "gpu", tmp_path)], "components": [storage]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(lines | {"kind": "Kustomization"}))
    documents = build(tmp_path)
    (claim,) = of_kind(documents, "PersistentVolumeClaim").values()
    (mode,) = claim["spec"]["accessModes"]
    assert mode in ("ReadWriteMany", "ReadOnlyMany")
    classes, volumes = of_kind(documents, "StorageClass"), of_kind(documents, "PersistentVolume")
    if claim["spec"]["storageClassName"]:
        assert claim["spec"]["storageClassName"] in classes
        assert mode == "ReadWriteMany"  # or nothing could fill it
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


def test_pods_find_what_a_daemonset_has_put_on_their_machine(tmp_path, run_script):
    documents = compose(tmp_path, "gpu", ("node-cache",))
    sets = of_kind(build(K8S / "node-cache"), "DaemonSet")
    volume = of_kind(documents, "PersistentVolume")["paceline-models-of-the-node"]["spec"]
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


def test_what_is_fetched_follows_the_serve_config(monkeypatch):
    monkeypatch.syspath_prepend(str(K8S))
    import weights

    args = serve_config_of(service_of(overlay("gpu")))["applications"][0]["args"]
    assert weights.Models.of(args) == weights.Models(TARGET, DRAFT)
    other = copy.deepcopy(args)
    other["target_config"]["model_loading_config"] = {"model_id": "big", "model_source": "org/big"}
    other["draft_config"]["model_loading_config"] = {"model_id": "small", "model_source": "/models/small"}
    other["target_config"]["model_loading_config"]["tokenizer_source"] = "org/tokenizer"
    models = weights.Models.of(other)
    assert models == weights.Models("org/big", None, ("org/tokenizer",))
    assert [command.split()[2] for command in models.fetches("router")] == ["org/big", "org/tokenizer"]
    assert models.fetches("target")[-1] == "hf download org/big"
    assert weights.Models.of(other | {"draft_config": None}).draft is None
    for text in (weights.fetch_patch(models), *weights.fill_jobs(models).values(), weights.node_cache(models)):
        assert "Qwen" not in text
        assert list(yaml.safe_load_all(text))
    assert weights.wait_patch(models) != weights.wait_patch(weights.Models(TARGET, DRAFT))  # another mark
