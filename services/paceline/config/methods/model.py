"""A draft model: a smaller language model, in replicas of its own or in the target's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceline.config.deployments import DraftDeployment
from paceline.config.engines import Growing, ModelOptions
from paceline.config.loading import EMBEDDED_DRAFT, ModelLoadingConfig
from paceline.config.methods.entry import HeadMethod, PoolMethod, Row, Text
from paceline.config.replicas import Drafts, ModelReplicas
from paceline.errors.refusals import Fault
from paceline.types import MAX_DRAFT_TOKENS, Mode


class DraftOptions(Growing, ModelOptions):
    """Options of the engine of a draft model."""

    max_sessions: int | None = Field(default=None, ge=1, le=16384)
    """Sessions that the KV pages are sized for; one draft may serve several targets. None: the target's number."""
    draft_top_m: int = Field(default=256, ge=1, le=65536)
    """Candidates of the distribution that are ranked; the rest of its tail is never proposed. Where the draft shares
    the target's noise and a native pass on the CPU finds them, ``fan_out`` candidates of the whole vocabulary are
    enough."""
    parallel_tokens: int | None = Field(default=None, ge=1, le=MAX_DRAFT_TOKENS)
    """Tokens that a PARD model predicts with one forward. None: 8 if the checkpoint is one (its config.json names a
    ``pard_token``), else 1."""
    vocabulary: Literal["same", "shared"] = "same"
    """``same``: a draft whose tokenizer differs from the target's is refused. ``shared``: such a draft proposes the
    tokens that both have; it is refused if these are too few."""
    placement: Literal["apart", "auto"] = "apart"
    """``apart``: replicas of their own, which draft ahead. ``auto``: each target also loads the model as a head, and
    each load is served in the way measured to be faster: by separate drafts, or without them, by the head where it has
    positive expected gain. In ``paceline.local`` an idle draft's cores share the target's products."""

    @model_validator(mode="after")
    def _has_no_library(self) -> Self:
        if self.attention == "flashinfer":
            raise Fault(
                "attention",
                "is 'flashinfer' in a draft, whose contexts change with every outcome: 'auto', 'sdpa', 'native' or "
                "'triton' is allowed",
            )
        return self

    @model_validator(mode="after")
    def _has_the_tokens_of_a_head(self) -> Self:
        if self.placement == "auto" and self.vocabulary != "same":
            raise Fault(
                "placement",
                f"is 'auto' with vocabulary {self.vocabulary!r}: a draft model in the target has the target's "
                "tokenizer, so one must be 'apart' or the other 'same'",
            )
        return self

    @property
    def devices(self) -> tuple[str, ...]:
        """Returns the device of the draft model, as the only one."""
        return (self.device,)


class ModelDraftConfig(ModelReplicas, Drafts):
    """The pool of drafts: a smaller model with the target's tokenizer."""

    kind: Literal["model"] = "model"
    model_loading_config: ModelLoadingConfig = ModelLoadingConfig(model_id=EMBEDDED_DRAFT)
    engine_kwargs: DraftOptions = DraftOptions()
    deployment_config: DraftDeployment = DraftDeployment()

    @property
    def drafter_name(self) -> str:
        """The model's name."""
        return self.model_loading_config.model_id

    @property
    def _engine(self) -> DraftOptions:
        return self.engine_kwargs


def _with_model(tree: dict[str, Any], model: str) -> None:
    tree["model_loading_config"] = {"model_id": model}


_READS = "any causal language model with the target's tokenizer"
ACCEPTANCE: Mapping[Text, tuple[float, str]] = {
    "chat": (0.65, "2211.17192, table 2: T5-small for T5-XXL, 0.53 to 0.75")
}
_SOURCE = "speculative decoding (2211.17192, 2302.01318)"
POOL = PoolMethod(
    config=ModelDraftConfig,
    build="paceline.draft.build:build_model",
    host_bytes=lambda options: 0,
    examine="paceline.drafters.available:of_draft",
    pool="paceline.preflight.service:pool_of_model",
    with_model=_with_model,
    of_draft=True,
    acceptance=ACCEPTANCE,
    rows=(
        Row(
            name="draft model, overlapped",
            source="speculative speculative decoding (2603.03251)",
            reads=_READS,
            when="general text where a smaller model of the family exists; one draft replica serves several targets",
        ),
        Row(
            name="draft model, sequential",
            source=_SOURCE,
            reads=_READS,
            when="comparisons with other servers: `mode: sequential` in the request",
            mode=Mode.SEQUENTIAL,
        ),
        Row(
            name="draft of another vocabulary",
            source="token-level intersection (2502.05202)",
            reads="any causal language model that shares most tokens of ordinary text with the target",
            when="targets for which no draft was trained",
            options={"vocabulary": "shared"},
        ),
        Row(
            name="PARD",
            source="PARD (2504.18583)",
            reads="a causal language model whose config.json names a `pard_token`",
            when="several tokens for the time of one, where such a draft exists",
            options={"parallel_tokens": 8},
        ),
    ),
)
HEAD = HeadMethod(
    method="draft_model",
    probed=False,
    open="",
    load="paceline.target.mount:load_draft_model",
    memory="paceline.preflight.heads:size_of_draft_model",
    examine="paceline.drafters.available:of_draft",
    of_draft=True,
    acceptance=ACCEPTANCE,
    rows=(
        Row(
            name="draft model, co-located",
            source=_SOURCE,
            reads=_READS,
            when="a draft so small that it needs no device of its own",
        ),
    ),
)
