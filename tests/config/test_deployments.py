"""What the configuration tells Ray Serve of each pool, bundles for the ranks of a replica included."""

import inspect

import pytest
from tests.config.support import needs_ray

from paceline.config import AutoscalingConfig, DeploymentConfig, RayActorOptions, ServiceConfig
from paceline.errors import ConfigError


@needs_ray
def test_deployment_options_are_those_of_ray_serve():
    from ray import serve
    from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig

    theirs = set(inspect.signature(serve.deployment).parameters)
    decided_by_the_service = {
        "_func_or_class",
        "name",
        "version",
        "user_config",
        "request_router_config",
        "placement_group_bundles",
        "placement_group_strategy",
        "placement_group_bundle_label_selector",
        "gang_scheduling_config",
        "deployment_actors",
    }
    assert set(DeploymentConfig.model_fields) == theirs - decided_by_the_service
    deprecated = {"smoothing_factor", "upscale_smoothing_factor", "downscale_smoothing_factor"}
    assert set(AutoscalingConfig.model_fields) == set(ServeAutoscalingConfig.model_fields) - deprecated


@needs_ray
def test_ray_serve_takes_the_deployment_options():
    from ray import serve

    config = ServiceConfig.parse(
        {
            "target_config": {
                "accelerator_type": "L4",
                "placement_group_config": {"bundles": [{"CPU": 1, "GPU": 1}] * 2, "strategy": "STRICT_PACK"},
                "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3}},
            },
            "draft_config": {
                "accelerator_type": "L4",
                "deployment_config": {
                    "num_replicas": 2,
                    "max_replicas_per_node": 1,
                    "ray_actor_options": {"num_gpus": 0.5, "label_selector": {"zone": "a"}},
                },
            },
        }
    )
    target = serve.deployment(**config.target_config.deployment_options())(type("Target", (), {}))
    draft = serve.deployment(**config.draft_config.deployment_options())(type("Draft", (), {}))
    router = serve.deployment(**config.router_config.deployment_options())(type("Router", (), {}))
    assert target._replica_config.placement_group_bundles == [{"CPU": 1.0, "GPU": 1.0}] * 2
    assert draft.num_replicas == 2
    options = draft.ray_actor_options
    assert (options["num_cpus"], options["num_gpus"], options["accelerator_type"]) == (0.9, 0.5, "L4")
    assert options["label_selector"] == {"zone": "a"}
    assert router._deployment_config.graceful_shutdown_timeout_s == 600
    assert config.target_config.deployment_options()["placement_group_bundle_label_selector"] == [
        {"ray.io/accelerator-type": "L4"}
    ]
    assert "num_replicas" not in config.target_config.deployment_options()


def test_a_gpu_is_reserved_where_one_is_asked_for():
    assert "num_gpus" not in ServiceConfig().target_config.deployment_options()["ray_actor_options"]
    config = ServiceConfig.parse({"target_config": {"engine_kwargs": {"device": "cuda"}}})
    assert config.target_config.deployment_options()["ray_actor_options"]["num_gpus"] == 1
    config = config.with_overrides(["target_config.deployment_config.ray_actor_options.num_gpus=0.25"])
    assert config.target_config.deployment_options()["ray_actor_options"] == {"num_cpus": 0.9, "num_gpus": 0.25}


@needs_ray
def test_every_ray_actor_option_is_known_to_ray():
    from ray.serve.schema import RayActorOptionsSchema

    ours = set(RayActorOptions.model_fields)
    assert ours - {"fallback_strategy"} <= set(RayActorOptionsSchema.model_fields)


def ranks(num_ranks, **target):
    """The Serve options of a target of several ranks."""
    kwargs = target.pop("engine_kwargs", {}) | {"tensor_parallel_size": num_ranks}
    return ServiceConfig.parse(
        {"target_config": {"engine_kwargs": kwargs, **target}}
    ).target_config.deployment_options()


def test_every_rank_has_a_bundle_and_the_replica_takes_the_first():
    options = ranks(2)
    assert options["placement_group_bundles"] == [{"CPU": 0.9}] * 2
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert options["ray_actor_options"] == {"num_cpus": 0.9}
    options = ranks(4, accelerator_type="H100")
    assert options["placement_group_bundles"] == [{"CPU": 0.9, "GPU": 1.0}] * 4
    assert options["ray_actor_options"] == {"num_cpus": 0.9, "num_gpus": 1.0}
    assert options["placement_group_bundle_label_selector"] == [{"ray.io/accelerator-type": "H100"}]
    own = {"num_cpus": 2, "resources": {"big": 1}}
    options = ranks(2, deployment_config={"ray_actor_options": own})
    assert options["placement_group_bundles"] == [{"CPU": 2, "big": 1}] * 2
    options = ranks(2, placement_group_config={"bundles": [{"CPU": 1}, {"CPU": 1}], "strategy": "SPREAD"})
    assert options["placement_group_strategy"] == "SPREAD"
    assert "placement_group_bundles" not in ranks(1)


def test_labels_of_a_replica_with_bundles_are_those_of_its_bundles():
    pool = {"deployment_config": {"ray_actor_options": {"label_selector": {"paceline/pool": "target"}}}}
    assert ranks(1, **pool)["ray_actor_options"]["label_selector"] == {"paceline/pool": "target"}
    options = ranks(2, **pool)
    assert "label_selector" not in options["ray_actor_options"]
    assert options["placement_group_bundle_label_selector"] == [{"paceline/pool": "target"}]
    both = {"ray.io/accelerator-type": "H100", "paceline/pool": "target"}
    assert ranks(2, accelerator_type="H100", **pool)["placement_group_bundle_label_selector"] == [both]


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ({"placement_group_config": {"bundles": [{"CPU": 1}]}}, ["placement_group_config.bundles has 1", "is 2"]),
        ({"deployment_config": {"max_replicas_per_node": 1}}, ["max_replicas_per_node is 1", "tensor_parallel_size 2"]),
        ({"deployment_config": {"ray_actor_options": {"num_cpus": 0}}}, ["reserves nothing", "tensor_parallel_size 2"]),
        ({"engine_kwargs": {"rank_timeout_s": 0}}, ["rank_timeout_s is 0"]),
    ],
)
def test_ranks_without_a_place_are_refused(target, parts):
    with pytest.raises(ConfigError) as refused:
        ranks(2, **target)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"deployment_config": {"ray_actor_options": {"num_gpus": 0.5}}}, "ray_actor_options.num_gpus"),
        ({"placement_group_config": {"bundles": [{"GPU": 1}, {"GPU": 0.25}]}}, "placement_group_config.bundles"),
    ],
)
def test_ranks_need_whole_gpus(settings, key):
    target = {"engine_kwargs": {"device": "cuda", "tensor_parallel_size": 2}} | settings
    with pytest.raises(ConfigError, match=rf"{key} gives a rank 0\.\d+ of a GPU while tensor_parallel_size is 2"):
        ServiceConfig.parse({"target_config": target})
    one = target | {"engine_kwargs": {"device": "cuda"}}
    assert ServiceConfig.parse({"target_config": one}).target_config.engine_kwargs.tensor_parallel_size == 1
