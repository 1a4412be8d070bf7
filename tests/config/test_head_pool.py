"""A head in the draft pool: what its configuration says, hands on and refuses."""

from __future__ import annotations

from typing import Any

from paceline.config import LocalConfig, ServiceConfig
from paceline.preflight.service import check_service

EAGLE3 = {"method": "eagle3", "model": "paceline/embedded-eagle3"}


def parsed(deployment: dict[str, Any] | None = None, /, **options: Any) -> ServiceConfig:
    return ServiceConfig.parse({"draft_config": {"kind": "head", "engine_kwargs": options, **(deployment or {})}})


def test_targets_and_drafts_are_told_of_the_same_head() -> None:
    config = parsed(**EAGLE3)
    setup, draft_setup = config.target_setup(), config.draft_setup()
    assert draft_setup is not None
    assert setup.link is draft_setup.options
    assert setup.link is not None
    assert setup.link.ahead == "auto"
    assert setup.speculates
    assert draft_setup.source is None
    assert draft_setup.runs_model
    assert config.draft_config is not None
    assert config.draft_config.drafter_name == "eagle3 paceline/embedded-eagle3"
    assert ServiceConfig.parse(config.to_dict()) == config
    assert ServiceConfig.parse({}).target_setup().link is None
    local = LocalConfig(target={"path": "x"}, draft=setup.link)
    assert local.target_setup().link == local.draft_setup().options == setup.link  # type: ignore[union-attr]


def test_a_gpu_is_reserved_where_one_is_asked_for() -> None:
    assert parsed(**EAGLE3).draft_config.deployment_options()["ray_actor_options"].get("num_gpus", 0) == 0  # type: ignore[union-attr]
    on_gpu = parsed({"accelerator_type": "L4"}, **EAGLE3).draft_config
    assert on_gpu is not None
    actor = on_gpu.deployment_options()["ray_actor_options"]
    assert (actor["num_gpus"], actor["accelerator_type"]) == (1.0, "L4")


def test_the_check_finds_a_head_that_is_not_here() -> None:
    options = {"cores": False, "ports": False}
    assert [f for f in check_service(parsed(**EAGLE3), **options) if f.key.startswith("draft_config")] == []
    (found,) = [
        f for f in check_service(parsed(method="eagle3", model="/nowhere"), **options) if f.key.startswith("draft")
    ]
    assert found.key == "draft_config.engine_kwargs.model"
    assert found.message == "draft_config.engine_kwargs.model is unfit: model path '/nowhere' does not exist"
