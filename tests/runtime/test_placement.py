"""Which GPUs of one machine a target and its draft own without Ray."""

from typing import Any

import pytest
import torch
from tests.support.gpus import machine_of

from paceline.config import CascadeOptions, DraftModel, DraftOptions, LocalConfig, TargetModel
from paceline.draft import build as draft_build
from paceline.errors import ConfigError
from paceline.model.device import occupy
from paceline.model.parallel.devices import rank_device
from paceline.runtime.ranks import process_ranks
from paceline.target import build as target_build


class Reached(Exception):
    """The device is chosen."""


def owned(config: LocalConfig, kind: str) -> list[int | str]:
    """Numbers of the GPUs that the ranks of an engine take, or ``cpu``."""
    setup = config.target_setup() if kind == "target" else config.draft_setup()
    assert setup is not None
    rendezvous, followers = process_ranks(setup)
    options: Any = setup.options
    taken = getattr(setup, "target_gpus", ())
    if rendezvous is None:
        devices = [occupy(options, taken)]
    else:
        devices = [rank_device("a/model", options, rendezvous.of(rank), taken) for rank in range(len(followers) + 1)]
    return ["cpu" if device.type == "cpu" else device.index for device in devices]


def pair(target: dict[str, Any], draft: dict[str, Any]) -> LocalConfig:
    return LocalConfig(target=TargetModel(path="a/target", **target), draft=DraftModel(path="a/draft", **draft))


TP4: dict[str, Any] = {"tensor_parallel_size": 4}
TP2: dict[str, Any] = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("num_gpus", "target", "draft", "targets", "drafts"),
    [
        (8, TP4, {}, [0, 1, 2, 3], [4]),
        (8, TP4 | {"device": "cuda"}, {"device": "cuda"}, [0, 1, 2, 3], [4]),
        (8, {}, {}, [0], [1]),
        (8, {"device": "cuda:3"}, {}, [3], [0]),
        (8, {"device": "cuda:0"}, {}, [0], [1]),
        (8, TP4 | {"device": "cuda:2"}, TP2, [2, 3, 4, 5], [0, 1]),
        (8, TP4 | {"device": "cuda:1"}, TP2, [1, 2, 3, 4], [0, 5]),
        (8, TP4, {"device": "cuda:7"}, [0, 1, 2, 3], [7]),
        (8, TP4, {"device": "cuda:2"}, [0, 1, 2, 3], [2]),
        (8, {"device": "cpu"}, {}, ["cpu"], [0]),
        (8, TP4, {"device": "cpu"}, [0, 1, 2, 3], ["cpu"]),
        (4, TP4, {}, [0, 1, 2, 3], [0]),
        (3, TP2, TP2, [0, 1], [2, 0]),
        (1, {}, {}, [0], [0]),
        (0, {}, {}, ["cpu"], ["cpu"]),
    ],
)
def test_a_draft_takes_the_first_gpu_that_its_target_leaves_free(
    num_gpus: int,
    target: dict[str, Any],
    draft: dict[str, Any],
    targets: list[int | str],
    drafts: list[int | str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where none is free they share."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no GPU of the machine that runs this counts
    machine_of(monkeypatch, num_gpus)
    config = pair(target, draft)
    assert (owned(config, "target"), owned(config, "draft")) == (targets, drafts)


def test_both_builders_load_their_model_on_the_device_that_they_have_made_current(monkeypatch) -> None:
    """And ask it, not the first one, for its dtype and its memory."""
    machine = machine_of(monkeypatch, 8)
    config = pair({"device": "cuda:2"}, {"device": "auto"})

    def reach(options: Any, device: torch.device) -> None:
        assert device == machine.process.current
        raise Reached(device)

    monkeypatch.setattr(target_build, "resolve", reach)
    monkeypatch.setattr(draft_build, "resolve", reach)
    with pytest.raises(Reached, match="cuda:2"):
        target_build._runner(config.target_setup(), None, None)  # type: ignore[arg-type]
    setup = pair({"device": "cuda:0"}, {}).draft_setup()
    assert setup is not None
    with pytest.raises(Reached, match="cuda:1"):
        draft_build._runner(setup, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_gpus", "device", "reason"),
    [
        (8, "cuda:9", "device is 'cuda:9': this process sees 8 GPUs, so 'cuda:0' to 'cuda:7' are allowed"),
        (1, "cuda:1", "device is 'cuda:1': this process sees 1 GPUs, so only 'cuda:0' is allowed"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(num_gpus, device, reason, monkeypatch) -> None:
    machine_of(monkeypatch, num_gpus)
    with pytest.raises(ConfigError, match=f"^{reason}$"):
        occupy(DraftOptions(device=device))


@pytest.mark.parametrize(
    ("devices", "allowed"),
    [
        (("cuda:1", "cuda:1"), True),
        (("auto", "cuda"), True),
        (("cuda:1", "cpu"), True),
        (("cuda:1", "cuda:2"), False),
        (("cuda", "cuda:0"), False),
    ],
)
def test_the_drafters_of_a_cascade_share_one_gpu(devices: tuple[str, str], allowed: bool) -> None:
    drafters = [{"model": f"a/{i}", "options": {"device": device}} for i, device in enumerate(devices)]
    if allowed:
        CascadeOptions.model_validate({"drafters": drafters})
        return
    with pytest.raises(ValueError, match=r"drafters\[1\].options.device is .*: the drafters of a cascade share one"):
        CascadeOptions.model_validate({"drafters": drafters})
