"""The ``autoscaling_config`` of each pool: whose policy it is, what is refused, and what Ray Serve is told."""

from __future__ import annotations

import pytest

from paceline.cli import serve
from paceline.cli.main import build_parser
from paceline.config import DraftPolicy, PolicyFunction, ServiceConfig, TargetPolicy
from paceline.errors import ConfigError
from paceline.fleet.autoscaler import Autoscaler


def scaled(pool, **settings):
    return ServiceConfig.parse({f"{pool}_config": {"deployment_config": {"autoscaling_config": settings}}})


def of(config, pool):
    return getattr(config, f"{pool}_config").deployment_config.autoscaling_config


def for_serve(config, pool):
    return getattr(config, f"{pool}_config").deployment_options()["autoscaling_config"]


@pytest.mark.parametrize("pool", ["target", "draft", "router"])
def test_ours_is_what_nothing_else_asks_for(pool):
    config = scaled(pool, min_replicas=1, max_replicas=4, downscale_delay_s=60.0)
    assert of(config, pool).is_ours
    assert for_serve(config, pool) == {
        "min_replicas": 1,
        "max_replicas": 4,
        "metrics_interval_s": 1.0,
        "look_back_period_s": 2.0,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "policy": {"policy_function": f"paceline.fleet.follow:follow_{pool}"},
    }
    assert list(config.scaling()["pools"]) == [pool]
    again = ServiceConfig.parse(config.to_dict())
    assert again == config
    (overview,) = Autoscaler(again.scaling()).overview(0.0)
    assert (overview.name, overview.least, overview.most, overview.wanted) == (pool, 1, 4, None)


def test_a_pool_of_fixed_size_is_not_scaled():
    log = {"level": "INFO", "json": False}
    assert ServiceConfig().scaling() == {"pools": {}, "max_sessions": 16, "log": log}


@pytest.mark.parametrize(
    "settings",
    [
        {"target_ongoing_requests": 3.0, "look_back_period_s": 20.0},
        {"policy": {"policy_function": "my.module:policy", "policy_kwargs": {"a": 1}}},
        {"policy": {"policy_function": "my.module:policy"}, "upscaling_factor": 0.5, "target_ongoing_requests": 2.0},
    ],
)
def test_serves_policy_or_the_users_own_goes_through_as_it_is(settings):
    config = scaled("target", max_replicas=2, **settings)
    assert not of(config, "target").is_ours
    given = for_serve(config, "target")
    policy = given.pop("policy", None)
    assert given == {"max_replicas": 2} | {name: value for name, value in settings.items() if name != "policy"}
    if "policy" in settings:
        assert policy == {"policy_kwargs": {}} | settings["policy"]
        assert isinstance(of(config, "target").policy, PolicyFunction)
    assert config.scaling()["pools"] == {}


def test_each_pool_has_its_own_settings():
    config = scaled("target", max_replicas=2, policy={"ttft_s": 0.5, "occupancy": 0.5})
    assert of(config, "target").policy == TargetPolicy(ttft_s=0.5, occupancy=0.5)
    config = scaled("draft", min_replicas=0, max_replicas=2, policy={"late": 0.0, "drafts_per_target": None})
    assert of(config, "draft").policy == DraftPolicy(late=0.0, drafts_per_target=None)
    ngram = {"kind": "ngram", "deployment_config": {"autoscaling_config": {"min_replicas": 0, "max_replicas": 2}}}
    assert list(ServiceConfig.parse({"draft_config": ngram}).scaling()["pools"]) == ["draft"]
    config = scaled("router", max_replicas=2).with_overrides(
        ["router_config.deployment_config.autoscaling_config.policy.cpu=0.5"]
    )
    assert of(config, "router").policy.cpu == 0.5


def from_flags(*argv):
    return serve.read_config(build_parser("serve").parse_args(["serve", *argv]))


def test_flags_give_a_number_or_bounds_and_win_over_the_file(tmp_path):
    config = from_flags("--targets", "1:3", "--drafts", "0:2", "--routers", "2")
    assert [of(config, pool) and of(config, pool).bounds for pool in ("target", "draft", "router")] == [
        (1, 3), (0, 2), None
    ]  # fmt: skip
    assert config.router_config.deployment_config.num_replicas == 2
    file = tmp_path / "service.yaml"
    file.write_text(
        "target_config: {deployment_config: {autoscaling_config: {max_replicas: 4, upscale_delay_s: 3.0}}}\n"
        "draft_config: {deployment_config: {num_replicas: 2}}\n"
    )
    config = from_flags("--config", str(file), "--targets", "2:5", "--drafts", "1:2")
    assert (of(config, "target").bounds, of(config, "target").upscale_delay_s) == ((2, 5), 3.0)
    assert (of(config, "draft").bounds, config.draft_config.deployment_config.num_replicas) == ((1, 2), None)
    config = from_flags("--config", str(file), "--targets", "2")
    assert (of(config, "target"), config.target_config.deployment_config.num_replicas) == (None, 2)
    with pytest.raises(ConfigError, match="min_replicas is 3: it must be at most max_replicas, which is 1"):
        from_flags("--targets", "3:1")
    with pytest.raises(SystemExit):
        from_flags("--targets", "1:")
