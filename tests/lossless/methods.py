"""The table of docs/methods.md: which drafting method works where, and the page that says so.

Each row is of an entry in ``paceline.config.methods``; a cell is a run of ``tests/lossless/test_methods.py``, which
holds what it claims. A method that reads a checkpoint, or does not get on with a column, has a ``Row`` here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from paceline.config import ServiceConfig
from paceline.drafters.catalogue import METHODS, Method, Place
from paceline.errors import ConfigError


class Column(StrEnum):
    """A part of the service that every method has to get on with."""

    COUPLED = "coupled rule"
    REJECTION = "rejection rule"
    TREE = "trees"
    RANKS = "tensor parallel"
    PREFIX = "prefix cache"
    PROCESSORS = "processors"
    GRAMMAR = "structured output"


@dataclass(frozen=True)
class Row:
    """How a method is run by the tests, and what it does not do."""

    model: str | None
    """A checkpoint of the package, ``made:NAME`` for one that is made of the embedded draft, or ``synthetic:NAME`` for
    random weights in a published format (``tests/drafters/head_files.py``); None: it reads none."""
    limits: Mapping[Column, str] = field(default_factory=dict)
    """Columns in which its sessions have none of its tokens, or chains of them alone, and why."""
    least: float = 0.0
    """Share of its tokens that is accepted at least in the column of the coupled rule: about half of what was measured;
    0: hardly more than by chance."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the target for its runs."""
    refused: Mapping[Column, Mapping[str, Any]] = field(default_factory=dict)
    """Columns that are refused -> the option of the target with which its configuration is."""

    @property
    def trained(self) -> bool:
        """True if its tokens are better than chance at the target of the run."""
        return not (self.model or "").startswith("synthetic:")

    @property
    def temperatures(self) -> tuple[float, float]:
        """Those of its runs. Of random weights the second one leaves nearly uniform distributions: the noise, which is
        the target's too, all but decides what is drawn, so that some of it is accepted."""
        return (0.0, 1.0) if self.trained else (0.0, 10.0)


_DRAFT = Row("paceline/embedded-draft", least=0.2)
ROWS: dict[str, Row] = {
    "draft model, overlapped": _DRAFT,
    "draft model, sequential": Row(
        "paceline/embedded-draft", {Column.TREE: "chains: sequential sessions stay comparable"}, 0.2
    ),
    "draft of another vocabulary": Row("made:other_vocabulary", least=0.25),
    "PARD": Row("made:pard", least=0.04),
    "cascade, vertical": _DRAFT,
    "n-grams": Row(None, least=0.2),
    "suffixes": Row(None, least=0.2),
    "plugin": Row(None, least=0.1),
    "prompt lookup": Row(
        None,
        {
            Column.REJECTION: "at temperature 0 alone: otherwise it depends on what was drawn whether there is a match",
            Column.TREE: "chains: a match has one continuation",
        },
        0.2,
        {"adaptive": True},
    ),
    "Medusa": Row("paceline/embedded-medusa", least=0.04),
    "MLP speculator": Row("synthetic:mlp_tied", least=0.15),
    "MTP": Row("paceline/embedded-mtp", least=0.15),
    "EAGLE": Row("synthetic:eagle_bias", least=0.1),
    "EAGLE-3": Row("paceline/embedded-eagle3", least=0.08),
    "P-EAGLE": Row("synthetic:peagle"),
    "DFlash, DFlash 2": Row("synthetic:dflash2"),
    "DSpark": Row("synthetic:dspark", least=0.08),
    "JetSpec": Row("synthetic:jetspec", least=0.08),
    "early exit": Row(None, least=0.13, refused={Column.RANKS: {"tensor_parallel_size": 2}}),
    "early exit, trained": Row("made:exit", least=0.13, refused={Column.RANKS: {"tensor_parallel_size": 2}}),
    "speculative streaming": Row("synthetic:streams", least=0.15, refused={Column.RANKS: {"tensor_parallel_size": 2}}),
    "Gemma 4's drafter": Row("synthetic:gemma4_clusters", refused={Column.RANKS: {"tensor_parallel_size": 2}}),
    "lookahead": Row(None, least=0.12),
    "suffixes, in the target": Row(None, least=0.11),
    "draft model, co-located": _DRAFT,
}
ROWS |= {method.name: ROWS[method.name.removesuffix(", in the pool")] for method in METHODS if method.kind == "head"}
"""By the names of the catalogue."""


def row_of(method: Method) -> Row:
    """How a method is run. Raises KeyError for one that reads a checkpoint, and of which there is none here."""
    return ROWS[method.name] if method.needs_model else ROWS.get(method.name, Row(None))


CASES = [(method.name, column) for method in METHODS for column in Column]

_WORKS = "✓"
_HEADER = """# Drafting methods

Written by `python -m tests.test_docs` from `config/methods` and `tests/lossless/methods.py`.
[Drafters](drafters.md) describes how they work; [`paceline advise`](plan.md#which-method) chooses among them.

✓ is a run of `tests/lossless/test_methods.py` with that method alone: the text equals that of plain decoding, token
by token, and tokens of the method were verified and some accepted. A method with random
weights runs at temperature 10 in place of 1, so that some of its tokens are accepted. A number refers to a sentence
below the table. Under the rejection rule, texts are compared at temperature 0: above it, outputs are equal in
distribution only ([lossless](lossless.md)).

Mirror speculative decoding has no row: its [hints](drafters.md#hints-while-the-target-runs) change the order in which
an overlapped draft expands nodes. The embedded pair gains nothing from them.
"""
_COLUMNS = """
| column | what is run |
|---|---|
| draft pool, target | the method there; a number is the refusal of its configuration in the other place |
| coupled rule | temperatures 0 and 1, chains |
| rejection rule | temperatures 0 and 1 |
| trees | subtrees of random size in every step, siblings included |
| tensor parallel | a target of two ranks |
| prefix cache | prompts whose beginning is cached by earlier ones |
| processors | logit bias, bad words, minimum length, all penalties, top-k, top-p, min-p together |
| structured output | a regular expression, at temperatures 0 and 1; outputs that have ended have its form |
"""


_MEASURED = """
## Measured

`benchmarks/specs/methods.yaml` runs the embedded target with its draft, with its own heads and the ones it trains,
and with methods without weights: eager, in float32, one request at a time. All methods,
plain decoding and transformers' own methods take turns, prompt by prompt. Heads and draft are small and were trained
for minutes ([model card](../services/paceline/embedded/README.md)): the figures show that each method works, not its
speedup on other models. The draft of another vocabulary (3,000 of 4,096 tokens) and the PARD draft (adapted for 400
steps) are made from the embedded draft; the plugin is the [example](own-drafters.md) of its page. Standard errors are
over prompts. Tokens of a step do not depend on the machine, except with overlapped drafting; tokens per second do.

What transformers 5.23 cannot do here stands below a table: across vocabularies it samples only with a draft that has
tokens which the target lacks, and its MTP wants modules in the target's own files, of a family that has them.

```
{results}
```
"""
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "methods.txt"


def refusal(tree: Mapping[str, Any]) -> str:
    """The sentence that refuses a configuration. Raises AssertionError if it is taken."""
    try:
        ServiceConfig.parse(tree)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{tree} is taken")


def elsewhere(method: Method) -> dict[str, Any]:
    """The configuration that asks for the method's kind in the other place."""
    kind, target = method.kind or "lookup", {"model_loading_config": {"model_id": "my-model"}}
    if method.place is Place.TARGET and method.kind:
        return {"target_config": target, "draft_config": {"kind": "head", "engine_kwargs": {"method": kind}}}
    if method.place is Place.TARGET:
        return {"target_config": target, "draft_config": {"kind": kind}}
    options = method.options if kind == "model" else {}
    heads = [{"method": "draft_model" if kind == "model" else kind, "model": "/models/other", **options}]
    return {"target_config": {**target, "engine_kwargs": {"heads": heads}}, "draft_config": None}


def with_options(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """The method's configuration with some options of its target."""
    tree = method.configuration("my-model", "/models/other" if method.needs_model else None)
    tree["target_config"].setdefault("engine_kwargs", {}).update(options)
    return tree


def other_entry(method: Method) -> Method | None:
    """The entry that has the same drafter in the other place."""
    if method.kind == "head":
        return next(other for other in METHODS if other.kind == method.options["method"])
    if (
        remote := next((m for m in METHODS if m.kind == "head" and m.options["method"] == method.kind), None)
    ) is not None:
        return remote
    same = {"model": "draft_model", "draft_model": "model", "suffix": "suffix"}.get(method.kind)
    if same is None or (method.kind == "model" and method.options):
        return None
    return next(other for other in METHODS if other.kind == same and other.place is not method.place)


def snippet(method: Method) -> str:
    """The YAML that chooses the method."""
    kind = str(method.options.get("method", method.kind))
    model = f"/models/my-model-{kind.replace('_', '-')}" if method.needs_model else None
    tree = method.configuration("/models/my-model", model)
    text: str = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110)
    return text


def methods_page() -> str:
    """docs/methods.md: the table, its sentences, and each method with its configuration."""
    notes: dict[str, int] = {}

    def note(sentence: str) -> str:
        return str(notes.setdefault(sentence, len(notes) + 1))

    titles = ["method", *(place.value for place in Place), *(column.value for column in Column)]
    lines = [_HEADER, f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for method in METHODS:
        row, cells = row_of(method), []
        for place in Place:
            there = place is method.place
            cells.append(_WORKS if there or other_entry(method) else note(refusal(elsewhere(method))))
        refused = {column: note(refusal(with_options(method, row.refused[column]))) for column in row.refused}
        limits = {column: note(sentence) for column, sentence in row.limits.items()}
        cells += [refused.get(column) or limits.get(column) or _WORKS for column in Column]
        lines.append(f"| {method.name} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {sentence}" for sentence, number in notes.items()), _COLUMNS.rstrip()]
    lines += [_MEASURED.format(results=RESULTS.read_text(encoding="utf-8").rstrip())]
    for method in METHODS:
        reads = method.reads or "nothing"
        lines += [f"## {method.name}", "", f"For {method.when}.", ""]
        lines += [f"Source: {method.source}. Reads: {reads}.", "", "```yaml", snippet(method).rstrip(), "```", ""]
    return "\n".join(lines).rstrip() + "\n"
