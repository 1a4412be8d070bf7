"""The vertical cascade: smaller drafters guess for a draft model."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from paceline.config.base import Strict
from paceline.config.devices import gpu_number
from paceline.config.engines import Growing
from paceline.config.methods.entry import PoolMethod, Row
from paceline.config.methods.model import ACCEPTANCE, DraftOptions
from paceline.config.methods.ngram import NgramOptions
from paceline.config.methods.suffix import SuffixOptions
from paceline.config.replicas import Drafts
from paceline.errors.refusals import Fault


class CascadeDrafter(Strict):
    """One drafter of a cascade."""

    kind: Literal["model", "ngram", "suffix"] = "model"
    model: str | None = Field(default=None, min_length=1)
    """Directory of the checkpoint of a draft model, or an id that transformers resolves."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The engine_kwargs of a pool of this kind of drafter, without the cascade's own."""

    def full_options(self, cascade: CascadeOptions) -> DraftOptions | NgramOptions | SuffixOptions:
        """Returns the options of this drafter, including the ones that it shares with the cascade."""
        kinds: dict[str, type[DraftOptions | NgramOptions | SuffixOptions]]
        kinds = {"model": DraftOptions, "ngram": NgramOptions, "suffix": SuffixOptions}
        return kinds[self.kind](**self.options, **{key: getattr(cascade, key) for key in Growing.model_fields})

    @model_validator(mode="after")
    def _of_kind(self) -> Self:
        if (self.model is None) == (self.kind == "model"):
            allowed = "needs the directory or id of its checkpoint" if self.model is None else "has none"
            raise Fault(
                "model", f"is {'null' if self.model is None else repr(self.model)}: kind {self.kind!r} {allowed}"
            )
        for key in (*Growing.model_fields, "max_sessions", "tensor_parallel_size", "placement"):
            if key in self.options:
                raise Fault("options", f"has {key}: the drafters of a cascade share the cascade's own, in one process")
        return self


class CascadeOptions(Growing):
    """Options of drafters that draft together in one replica, the largest one first."""

    drafters: list[CascadeDrafter] = Field(min_length=2, max_length=4)
    """Each verifies the guesses of the next one, so all but the last are draft models."""
    lengths: list[int] | None = None
    """Tokens, 1 to 16, that the next drafter guesses for one forward: an entry for each drafter but the last. None: 4
    for each."""

    @property
    def all_lengths(self) -> tuple[int, ...]:
        """``lengths``, or the ones that stand for None."""
        return tuple(self.lengths or [4] * (len(self.drafters) - 1))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        num = len(self.drafters) - 1
        if self.lengths is not None and len(self.lengths) != num:
            raise Fault("lengths", f"has {len(self.lengths)} entries for {num + 1} drafters: {num} are needed")
        if wrong := [length for length in self.lengths or () if not 1 <= length <= 16]:
            raise Fault("lengths", f"holds {wrong[0]}: 1 to 16 are allowed")
        gpus: dict[str, int] = {}
        for i, drafter in enumerate(self.drafters):
            if i < num and drafter.kind != "model":
                raise Fault(
                    f"drafters[{i}].kind", f"is {drafter.kind!r}: only a model verifies what others guess for it"
                )
            try:
                options = drafter.full_options(self)
            except ValidationError as error:
                problem = error.errors()[0]
                key = ".".join(str(part) for part in problem["loc"])
                raise Fault(f"drafters[{i}].options", f"has a wrong {key}: {problem['msg']}") from None
            if isinstance(options, DraftOptions) and options.device != "cpu":
                gpus.setdefault(options.device, i)
        if len(gpus) > 1 and any(gpu_number(device) is not None for device in gpus):
            (one, first), (other, second) = [*gpus.items()][:2]
            raise Fault(
                f"drafters[{second}].options.device",
                f"is {other!r} and that of drafters[{first}] is {one!r}: the drafters of a cascade share one GPU, so "
                "name the same one",
            )
        return self

    @property
    def devices(self) -> tuple[str, ...]:
        """GPUs of its draft models, which share one."""
        return tuple(device for drafter in self.drafters for device in drafter.full_options(self).devices)


class CascadeDraftConfig(Drafts):
    """The pool of drafts: several drafters that draft together in each replica."""

    kind: Literal["cascade"] = "cascade"
    engine_kwargs: CascadeOptions


def _with_model(tree: dict[str, Any], model: str) -> None:
    """Inserts ``model`` as the cascade's first drafter."""
    options = tree["engine_kwargs"]
    options["drafters"] = [{"model": model}, *options["drafters"]]


POOL = PoolMethod(
    config=CascadeDraftConfig,
    build="paceline.draft.build:build_cascade",
    host_bytes=lambda options: 0,
    examine="paceline.drafters.available:of_cascade",
    pool="paceline.preflight.service:pool_of_cascade",
    with_model=_with_model,
    of_draft=True,
    acceptance={
        text: (value, f"{source}; its first drafter is a model") for text, (value, source) in ACCEPTANCE.items()
    },
    rows=(
        Row(
            name="cascade, vertical",
            source="cascade speculative drafting (2312.11462)",
            reads="any causal language model with the target's tokenizer",
            when="a draft model that is slow itself: n-grams guess for it",
            options={"drafters": [{"kind": "ngram"}], "lengths": [4]},
        ),
    ),
)
