"""Drafts on cores of the targets' nodes: where Ray places them, how many there may be, and what is refused.

Mutants: labels of the target that are not passed on; a draft pool without the limit of one for each target; a refusal
that is left out.
"""

from typing import Any

import pytest

from paceline.config import ServiceConfig
from paceline.errors import ConfigError

KEY = "draft_config.deployment_config.on_target_nodes"
POOL = {"paceline/pool": "target"}


def near(*, target: dict[str, Any] | None = None, draft: dict[str, Any] | None = None, **engine: Any) -> ServiceConfig:
    """A pair with up to four targets on labelled nodes, and drafts beside them."""
    placed = {"ray_actor_options": {"label_selector": POOL}, "autoscaling_config": {"max_replicas": 4}}
    scaled = {"autoscaling_config": {"min_replicas": 0, "max_replicas": 4}}
    return ServiceConfig.parse(
        {
            "target_config": {"deployment_config": placed | (target or {})},
            "draft_config": {
                "engine_kwargs": {"device": "cpu"} | engine,
                "deployment_config": {"on_target_nodes": True} | scaled | (draft or {}),
            },
        }
    )


def test_a_draft_asks_for_a_core_of_a_node_of_targets() -> None:
    config = near()
    options = config.draft_options()
    assert options["ray_actor_options"] == {"num_cpus": 0.9, "label_selector": POOL}
    assert "on_target_nodes" not in options, "Ray Serve does not know it"
    two = near(tensor_parallel_size=2).draft_options()
    assert two["placement_group_bundle_label_selector"] == [POOL]
    assert "label_selector" not in ServiceConfig().draft_options()["ray_actor_options"]


def test_the_kind_of_gpu_tells_the_nodes_of_targets_too() -> None:
    config = ServiceConfig.parse(
        {
            "target_config": {"accelerator_type": "H100", "deployment_config": {"ray_actor_options": {}}},
            "draft_config": {"engine_kwargs": {"device": "cpu"}, "deployment_config": {"on_target_nodes": True}},
        }
    )
    assert config.draft_options()["ray_actor_options"]["label_selector"] == {"ray.io/accelerator-type": "H100"}


@pytest.mark.parametrize(("given", "most"), [(None, 1.0), ("auto", 1.0), (0.5, 0.5)])
def test_the_monitor_wants_no_more_than_one_for_each_target(given: float | str | None, most: float) -> None:
    """Another would ask the cloud for a node with the targets' GPUs."""
    policy = {} if given is None else {"policy": {"drafts_per_target": given}}
    config = near(draft={"autoscaling_config": {"max_replicas": 4} | policy})
    assert config.scaling()["pools"]["draft"]["policy"]["drafts_per_target"] == most
    assert ServiceConfig.parse(config.to_dict()) == config


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"target": {"ray_actor_options": {}}}, "names no nodes: give it an accelerator_type, or a label_selector"),
    ({"device": "cuda"}, "engine_kwargs.device is 'cuda': a draft on its target's node runs on 'cpu'"),
    ({"device": "auto"}, "engine_kwargs.device is 'auto'"),
    ({"draft": {"ray_actor_options": {"num_gpus": 0.5}}}, "while num_gpus is set"),
    ({"draft": {"ray_actor_options": {"label_selector": {"a": "b"}}}}, "a label_selector of the draft's own"),
    ({"draft": {"autoscaling_config": {"max_replicas": 8}}}, "with 8 drafts at most for 4 targets at most"),
    (
        {"draft": {"autoscaling_config": {"min_replicas": 2, "max_replicas": 4}}},
        "with 2 drafts at least for 1 targets at least",
    ),
    ({"draft": {"autoscaling_config": None, "num_replicas": "auto"}}, "with num_replicas 'auto'"),
    (
        {"draft": {"autoscaling_config": {"max_replicas": 4, "target_ongoing_requests": 4}}},
        "with a policy that counts requests",
    ),
    (
        {"draft": {"autoscaling_config": {"max_replicas": 4, "policy": {"drafts_per_target": 2.0}}}},
        "with drafts_per_target 2: only Paceline's policy is allowed, with at most 1 per target",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda given: given if isinstance(given, str) else "")
def test_what_cannot_be_kept_is_refused_by_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        near(**changes)
    assert str(refused.value).startswith(f"{KEY} is true ")
    assert message in str(refused.value)
