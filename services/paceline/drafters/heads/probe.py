"""The probe at start-up: checks that a head predicts the target's tokens, and that no other wiring would do better.

A head may read the wrong layer, or a state before the norm in place of the one after it. The output stays correct then,
but the head's tokens are rarely accepted, and no other check notices. So the target writes some text greedily. The head
predicts each of its tokens, given the true tokens before (``HeadModule.unroll``). It does so with its own settings, and
with settings that are easily confused with them. This costs a few steps of the target and one pass of the head per
setting.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.heads.eagle import Eagle, Eagle3
from paceline.drafters.heads.module import HeadModule
from paceline.drafters.heads.mtp import Mtp
from paceline.errors import ConfigError
from paceline.errors.files import read_text
from paceline.model.features import OUT, Features
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep
from paceline.types import pages_for

TEXTS = (
    "The lighthouse had stood on the rocks for two hundred years, and in all that time nobody had thought to ask",
    'def merge(left, right):\n    """Merge two sorted lists into one."""\n    result = []\n    i = j = 0\n    while',
    "Question: Why does the moon seem to follow a car that drives along a road at night?\nAnswer:",
    "Water boils at a lower temperature on high mountains, because the air there is thinner. This means that",
)
"""Texts that the target goes on from, if no file is named."""
NUM_TOKENS = 64
"""Tokens that the target writes after each text."""
_PROMPT_TOKENS = 32
_DEPTHS = 3
_REFUSED = 1.5
"""Refusal: a head must be right this many times as often as the guess that is always the most frequent token."""
_ENOUGH = 0.5
"""A head that is right at least this often is never refused, however monotonous the text is."""
_BETTER = 1.1
"""A warning names another setting if it is right this many times as often (and see ``_DEVIATIONS``)."""
_DEVIATIONS = 3.0
"""Standard deviations by which another setting must be better, over tokens that only one of both predicts (McNemar)."""
log = logging.getLogger(__name__)


def texts_of(path: str | None) -> tuple[str, ...]:
    """The texts to go on from: paragraphs of a file, the first four; None: our own.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    if path is None:
        return TEXTS
    paragraphs = [part.strip() for part in read_text(path, f"probe_file is {path!r}").split("\n\n") if part.strip()]
    if not paragraphs:
        raise ConfigError(f"probe_file is {path!r}: it holds no text")
    return tuple(paragraphs[: len(TEXTS)])


@dataclass(frozen=True, slots=True)
class Sample:
    """A text that the target has gone on from, and its states."""

    token_ids: list[int]
    num_prompt: int
    """Tokens that the target has not written itself."""
    states: dict[int, Tensor]
    """Boundary -> [len(token_ids) - 1, hidden], of all positions but the last."""


def write(runner: ModelRunner, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> list[Sample]:
    """Makes the target continue ``prompts`` greedily, all in the same steps.

    Args:
        runner: with features of every position, whose boundaries become the samples' own.
        prompts: tokens of each prompt; none is empty.
        num_tokens: tokens written after each prompt.
    """
    assert runner.features is not None
    assert runner.features.every_position
    texts = [list(prompt) for prompt in prompts]
    pages = [runner.cache.allocate(pages_for(len(text) + num_tokens)) for text in texts]
    states: list[list[Tensor]] = [[] for _ in texts]
    starts = [0] * len(texts)
    try:
        for _ in range(num_tokens):
            steps = []
            for text, start, own in zip(texts, starts, pages, strict=True):
                span = range(start, len(text))
                steps.append(SequenceStep(text[start:], span, span, own, num_logits=1))
            logits, found = runner.forward_with_states(steps)
            parts = torch.split(found, [len(step.token_ids) for step in steps])
            for i, (token, part) in enumerate(zip(logits.argmax(-1).tolist(), parts, strict=True)):
                starts[i] = len(texts[i])
                texts[i].append(token)
                states[i].append(part)
    finally:
        for own in pages:
            runner.cache.release(own)
    boundaries, samples = runner.features.boundaries, []
    for text, prompt, rows in zip(texts, prompts, states, strict=True):
        chunks = torch.cat(rows).chunk(len(boundaries), dim=-1)
        samples.append(Sample(text, len(prompt), dict(zip(boundaries, chunks, strict=True))))
    return samples


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to wire a head."""

    boundaries: tuple[int, ...]
    advice: str
    """Change that leads to it; "" for the head's own setting."""
    applied: Callable[[HeadModule], AbstractContextManager[object]] = contextlib.nullcontext
    """Changes a module while it is entered."""

    def __str__(self) -> str:
        return f"boundaries {self.boundaries}"


def boundaries_to_try(own: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    """Returns ``own`` and the boundaries that are easily confused with it.

    They are: neighboring layers, the default of EAGLE-3, and the state before the final norm for the one after it.
    """
    found = [own]
    for shift in (-1, 1):
        if all(0 <= b + shift <= num_layers for b in own if b != OUT):
            found.append(tuple(b if b == OUT else b + shift for b in own))
    found.append(tuple({OUT: num_layers, num_layers: OUT}.get(b, b) for b in own))
    usual = (2, num_layers // 2, num_layers - 3)
    if len(own) == len(usual) and all(0 <= b <= num_layers for b in usual):
        found.append(usual)
    return list(dict.fromkeys(found))


def settings_of(head: HeadDrafter, num_layers: int) -> list[Setting]:
    """Returns the head's own setting, then settings that are easily confused with it.

    They are: other boundaries, other norms of the head, and the other order of concatenated inputs.
    """
    (own, *others), module = boundaries_to_try(head.features.boundaries, num_layers), head.module
    found = [Setting(own, "")]
    for boundaries in others:
        key = "set" if isinstance(module, Eagle3 | BlockHead) and OUT not in boundaries else "let it read"
        found.append(Setting(boundaries, f"{key} boundaries {'to ' if key == 'set' else ''}{list(boundaries)}"))
    if isinstance(module, Eagle3):
        for flag in ("norm_before_residual", "norm_output"):
            value = not getattr(module.form, flag)
            advice = f"set {flag} to {str(value).lower()} in its config.json"
            found.append(Setting(own, advice, partial(_form, flag, value)))
    if isinstance(module, BlockHead):
        row = module.form.first_row
        advice = f"set sample_from_anchor to {str(row == 1).lower()} in its config.json"
        found.append(Setting(own, advice, partial(_form, "first_row", 1 - row)))
    if isinstance(module, Eagle | Eagle3) or (isinstance(module, Mtp) and module.num_streams == 1):
        found.append(
            Setting(own, "its weights are for the hidden state before the embedding: swap their halves", _swapped)
        )
    return found


@contextlib.contextmanager
def _form(name: str, value: int, module: Any) -> Iterator[None]:
    """A head of another form."""
    form = module.form
    module.form = replace(form, **{name: value})
    try:
        yield
    finally:
        module.form = form


@contextlib.contextmanager
def _swapped(module: HeadModule) -> Iterator[None]:
    """Passes [state; embedding] where the module expects [embedding; state]."""
    hooks = [layer.register_forward_pre_hook(_swap_halves) for layer in _concatenated(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _swap_halves(layer: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].roll(inputs[0].shape[-1] // 2, -1),)


def _concatenated(module: HeadModule) -> list[Any]:
    """The linear layers of a head that take the embedding and the state side by side."""
    if isinstance(module, Mtp):
        return [part.eh_proj for part in module.modules_by_depth]
    if isinstance(module, Eagle):
        return [module.fc]
    assert isinstance(module, Eagle3)
    attention = module.layers[0].self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


@dataclass(frozen=True, slots=True)
class Score:
    """Predictions of a head with one setting."""

    setting: Setting
    hits: Tensor
    """bool [tokens, depths]: it predicts the token, given those before, from its own states at depths beyond 0."""

    @property
    def top1(self) -> list[float]:
        """Share of the tokens that it predicts, by depth."""
        return [float(share) for share in self.hits.double().mean(0)]

    def beats(self, other: Score) -> bool:
        """True if it is better by so much that chance is no explanation."""
        gained, lost = int((self.hits & ~other.hits).sum()), int((other.hits & ~self.hits).sum())
        certain = gained - lost > _DEVIATIONS * (gained + lost) ** 0.5
        return certain and int(self.hits.sum()) > _BETTER * int(other.hits.sum())


def score(head: HeadDrafter, setting: Setting, samples: Sequence[Sample]) -> Score:
    """Asks the head for the tokens that the target has written."""
    module, hits = head.module, []
    depths = min(_DEPTHS, module.max_depth or _DEPTHS)
    with torch.no_grad(), setting.applied(module):
        for sample in samples:
            # Row P at depth d predicts the token at P + 2 + d, which must be one of the target's own.
            num_rows, first = len(sample.token_ids) - depths - 1, max(0, sample.num_prompt - 2)
            states = torch.cat([sample.states[b] for b in setting.boundaries], dim=-1)[:num_rows]
            tokens = torch.tensor([sample.token_ids], device=states.device)
            rows = []
            for depth, logits in enumerate(module.unroll(states[None], tokens, depths)):
                likeliest = logits[0].argmax(-1)
                if module.target_ids is not None:
                    likeliest = module.target_ids[likeliest]
                rows.append(likeliest == tokens[0, 2 + depth : 2 + depth + num_rows])
            hits.append(torch.stack(rows, dim=-1)[first:])
    return Score(setting, torch.cat(hits).cpu())


def chance(samples: Sequence[Sample]) -> float:
    """Share of tokens that a guess of always the same token would get right."""
    written = [token for sample in samples for token in sample.token_ids[sample.num_prompt :]]
    return Counter(written).most_common(1)[0][1] / len(written)


def judge(name: str, scores: Sequence[Score], by_chance: float) -> str | None:
    """Logs how often a head is right; ``scores[0]`` is the score of its own setting.

    Returns:
        A warning that names a better setting; None if there is none.

    Raises:
        ConfigError: it predicts almost nothing.
    """
    own = scores[0]
    best = max(scores, key=lambda each: int(each.hits.sum()))
    top1 = ", ".join(f"{share:.2f}" for share in own.top1)
    said = (
        f"head {name} predicts {top1} of the target's tokens (by depth) with {own.setting}, where the most frequent "
        f"token alone is {by_chance:.2f} of them"
    )
    better = None
    if best.beats(own):
        better = f"{', '.join(f'{share:.2f}' for share in best.top1)} if wired otherwise: {best.setting.advice}"
    if own.top1[0] < min(_REFUSED * by_chance, _ENOUGH):
        reason = better or "no other setting is better: it is no head of this target, or set probe to false"
        raise ConfigError(f"{said}; {reason}")
    if better is None:
        log.info("%s", said)
        return None
    log.warning("%s; %s", said, better)
    return f"{said}; {better}"


class HeadProbe:
    """Examines the heads of one target: called at steps of the target (``load_model``), then asked about each head."""

    def __init__(
        self,
        heads: Iterable[tuple[tuple[int, ...], str | None]],
        num_layers: int,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """Chooses the prompts that the target continues.

        Args:
            heads: for each head the boundaries that it reads, and the file of its texts (``texts_of``); at least one
                head.
            num_layers: of the target.
            encode: turns a text into tokens of the target.

        Raises:
            ConfigError: a file cannot be read or is empty.
        """
        heads = list(heads)
        self._num_layers = num_layers
        self.prompts = {
            file: [list(encode(text)[:_PROMPT_TOKENS]) or [0] for text in texts_of(file)]
            for file in dict.fromkeys(file for _, file in heads)
        }
        wanted = {b for own, _ in heads for tried in boundaries_to_try(own, num_layers) for b in tried}
        self.features = Features(tuple(sorted(wanted)), every_position=True)
        self.num_pages = max(
            sum(pages_for(len(prompt) + NUM_TOKENS) for prompt in prompts) for prompts in self.prompts.values()
        )
        self.samples: dict[str | None, list[Sample]] = {}

    def __call__(self, runner: ModelRunner) -> None:
        """Makes the target continue the prompts."""
        self.samples = {file: write(runner, prompts) for file, prompts in self.prompts.items()}

    def examine(self, name: str, head: HeadDrafter, file: str | None = None) -> str | None:
        """Asks a head to predict the text that the target has written.

        Returns:
            A warning that names a better setting, which is also logged; None if there is none.

        Raises:
            ConfigError: the head predicts almost nothing. The message names a better setting if there is one.
        """
        samples = self.samples[file]
        scores = [score(head, setting, samples) for setting in settings_of(head, self._num_layers)]
        return judge(name, scores, chance(samples))
