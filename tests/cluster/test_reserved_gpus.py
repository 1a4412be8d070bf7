"""A replica uses the GPUs that Ray has reserved for it, and no others."""

import asyncio
import os

import pytest

from paceline.config import LogConfig, TargetModel, TargetSetup, visible_gpus
from paceline.types import ReservedGpus

pytest.importorskip("ray", reason="replicas are actors of Ray")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Reached(Exception):
    """The replica has been shown its GPUs."""


@pytest.mark.parametrize("names", [("3",), ("2", "3"), ("GPU-a1",), ()])
def test_a_replica_sees_its_own_gpus_where_ray_hides_none(names, monkeypatch) -> None:
    """Else the second replica of a host takes the first one's GPU, and one without a GPU takes another's."""
    from paceline.cluster import replicas

    def reach() -> str:
        raise Reached

    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(variable, "0,1,2,3")
    monkeypatch.setattr(replicas, "apply_worker_environment", lambda: None)
    monkeypatch.setattr(replicas, "reserved_gpus", lambda: ReservedGpus("node", names))
    monkeypatch.setattr(replicas, "replica_id", reach)
    setup = TargetSetup("a/model", TargetModel(path="a/model"))
    with pytest.raises(Reached):
        asyncio.run(_make(replicas.Target, setup))
    assert visible_gpus() == [*names]
    assert os.environ["HIP_VISIBLE_DEVICES"] == ",".join(names), "AMD's drivers read another variable"


async def _make(kind: type, setup: TargetSetup) -> None:
    replica = kind.__new__(kind)
    await replica.__init__(setup, model="a/model", log_config=LogConfig())
