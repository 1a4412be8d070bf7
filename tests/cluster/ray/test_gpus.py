"""Tensor-parallel targets on a host of four GPUs, which Ray counts and ``torch.cuda`` is replaced for: the shape of
``cluster/serve-gpu.yaml`` at degree 2. The tensors are on the CPU.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.ray.conftest import ON_RAY, START_S, until

pytestmark = ON_RAY

SERVE = Path(__file__).parents[3] / "cluster/serve-gpu.yaml"
NUM_GPUS = 4
_NAMESPACE = "test-gpus"


def replace_cuda() -> None:
    """Makes torch see GPUs as a driver does: CUDA_VISIBLE_DEVICES is read once, when GPUs are first counted.

    The exchange of the ranks notes which GPU each has taken, and goes on with tensors on the CPU.
    """
    import torch
    from ray.experimental.internal_kv import _internal_kv_put

    from paceline.model.parallel import runner

    counted: list[list[str]] = []
    current: list[torch.device] = []

    def found() -> list[str]:
        if not counted:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = [str(number) for number in range(NUM_GPUS)] if visible is None else visible.split(",")
            counted.append([name for name in names if name])
        return counted[0]

    def join(rendezvous: Any, device: torch.device) -> Any:
        assert [device] == current, "it is the thread's current device"
        taken = {"sees": found(), "takes": found()[device.index]}
        _internal_kv_put(f"{rendezvous.store} {rendezvous.rank}", json.dumps(taken), namespace=_NAMESPACE)
        return joined(rendezvous, torch.device("cpu"))

    joined, runner.connect_rank = runner.connect_rank, join
    torch.cuda.is_available = lambda: bool(found())
    torch.cuda.device_count = lambda: len(found())
    torch.cuda.set_device = current.append


def gpu_target() -> type:
    """The class of a target's replicas on a host with GPUs, which also makes its other ranks see them."""
    from paceline.cluster import rank_actors
    from paceline.cluster.replicas import Target

    class GpuRank(rank_actors.Rank):
        def run(self, factory: bytes, on_cpu: bool) -> None:
            assert not on_cpu
            replace_cuda()
            super().run(factory, on_cpu)

    class GpuTarget(Target):
        async def __init__(self, *args: Any, **options: Any) -> None:
            replace_cuda()
            rank_actors.Rank = GpuRank
            await super().__init__(*args, **options)

    return GpuTarget


def taken_gpus() -> dict[str, dict[int, dict[str, Any]]]:
    """What each rank of each replica sees and takes, by where the ranks meet."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    found: dict[str, dict[int, dict[str, Any]]] = {}
    for key in _internal_kv_list("", namespace=_NAMESPACE):
        store, _, rank = key.decode().rpartition(" ")
        found.setdefault(store, {})[int(rank)] = json.loads(_internal_kv_get(key, namespace=_NAMESPACE))
    return found


@pytest.mark.parametrize(
    "hides", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["Ray hides GPUs", "Ray hides none"]
)
def test_every_replica_of_a_host_owns_its_gpus_and_all_its_ranks_see_them(hides, app):
    """Two replicas of two ranks: one owns two GPUs, the other the other two, and each rank takes its own of both."""
    from ray import serve
    from ray.experimental.internal_kv import _internal_kv_del

    from paceline.cluster.app import build_target_deployment
    from paceline.config import ServiceConfig

    data = yaml.safe_load(SERVE.read_text())["applications"][0]["args"]
    target = data["target_config"]
    target["model_loading_config"] = {"model_id": "tests/gpus", "model_source": str(app.pair / "target")}
    target["engine_kwargs"] |= {"tensor_parallel_size": 2, "dtype": "float32", "compile": False, "max_sessions": 4}
    target["engine_kwargs"] |= {"kv_fraction": None, "batch_invariant": "off"}
    environment = {} if hides else {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    actor = {"num_cpus": 0.0, "num_gpus": 1, "runtime_env": {"env_vars": environment}}
    target["deployment_config"] = {"num_replicas": 2, "ray_actor_options": actor, "graceful_shutdown_timeout_s": 1.0}
    deployment = build_target_deployment(ServiceConfig.parse(data), deployment_cls=gpu_target())
    try:
        run = serve.RunTarget(deployment, name="gpus", route_prefix=None)
        serve.run_many([run], wait_for_applications_running=False)

        def started():
            application = serve.status().applications["gpus"]
            assert application.status != "DEPLOY_FAILED", application.message
            return application.status == "RUNNING"

        asyncio.run(until(started, START_S, "both replicas run"))
        found = taken_gpus()
    finally:
        serve.delete("gpus")
        _internal_kv_del("", del_by_prefix=True, namespace=_NAMESPACE)
    assert all(sorted(ranks) == [0, 1] for ranks in found.values())
    for ranks in found.values():
        pair = [ranks[0]["takes"], ranks[1]["takes"]]
        assert [ranks[rank]["sees"] for rank in ranks] == [pair, pair], "each sees both, in the order of the ranks"
    owned = [rank["takes"] for ranks in found.values() for rank in ranks.values()]
    assert sorted(owned) == ["0", "1", "2", "3"], "no two ranks share a GPU"
