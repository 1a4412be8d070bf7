"""The acceptance of a drafter's tokens by running it: some prompts through the engines of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.config import CascadeOptions, DraftModel, DraftOptions, LocalConfig, ServiceConfig, TargetModel
from paceline.local import LocalPipeline
from paceline.types import Mode, SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from paceline.drafters.available import AvailableMethod

_NUM_TOKENS = 48
_DRAFT_TOKENS = 4


def acceptance_of(target: str, each: AvailableMethod, prompts: Sequence[str], temperature: float) -> tuple[float, str]:
    """Returns (acceptance, how it was measured) of an available method.

    Acceptance is of a token given its ancestors: accepted tokens over decided ones. Decided are the accepted tokens and
    the first rejected one of each proposal. Lookahead's n-grams are asked for in every round, so a round without a
    proposal counts as a rejected first token.

    Raises:
        ConfigError: it cannot be loaded.
    """
    accepted = cut = 0
    with LocalPipeline(_local(ServiceConfig.parse(each.method.configuration(target, each.model)))) as pipeline:
        mode = Mode.OVERLAPPED if each.method.place == "target" else Mode.SEQUENTIAL  # a draft is waited for
        for seed, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=temperature, max_tokens=_NUM_TOKENS, seed=seed, ignore_eos=True)
            speculation = SpeculationParams(mode=mode, max_draft_tokens=_DRAFT_TOKENS)
            generation = pipeline.generate(prompt, sampling, speculation)
            for chunk in generation:
                if (done := chunk.round) is None:
                    continue
                if not done.num_drafted:
                    cut += each.riding_rows > 0
                else:
                    accepted, cut = accepted + done.num_accepted, cut + (done.num_accepted < done.num_drafted)
    what = f"measured, {len(prompts)} x {_NUM_TOKENS} tokens at temperature {temperature:g}"
    if not accepted + cut:
        return 0.0, f"{what}: it proposed nothing"
    return min(accepted / (accepted + cut), 0.99), what


def _local(config: ServiceConfig) -> LocalConfig:
    """The configuration for this process: every token asked for, nothing compiled for so few."""
    setup, draft_setup = config.target_setup(), config.draft_setup()
    target_options = setup.options.model_dump(exclude_unset=True)
    target = TargetModel(**{**target_options, "path": setup.source, "adaptive": False, "compile": False})
    if draft_setup is None:
        return LocalConfig(target=target, worker="thread")
    if isinstance(draft_setup.options, DraftOptions):
        draft = DraftModel(path=draft_setup.model[0], compile=False)
        return LocalConfig(target=target, draft=draft, worker="thread")
    options = draft_setup.options
    if isinstance(options, CascadeOptions):
        drafters = [
            each.model_copy(update={"options": {**each.options, "compile": False}}) if each.kind == "model" else each
            for each in options.drafters
        ]
        options = options.model_copy(update={"drafters": drafters})
    return LocalConfig(target=target, draft=options, worker="thread")
