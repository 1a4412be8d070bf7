"""Self-speculation by early exit: the first layers of the target draft, all of them verify.

Elhoushi et al. 2024 (LayerSkip, arXiv:2404.16710, section 4.3): the state after the first b of L layers goes through
the target's final norm and LM head. Zhang et al. 2023 (Draft & Verify, arXiv:2309.08168) are the same idea with layers
skipped in between. Only the target's own files are read, and nothing is trained. An exit head (``exit_adapter.py``) is
optional: it is a trained adapter between the first layers and the final norm.

For committed tokens these layers would compute the keys and values that the target keeps already. So they are read on
the session's pages, and never written there::

    target's pages, layers 0 .. b - 1      rows 0 .. n - 2      committed, read only
    the session's own rows                 n - 1, n, n + 1 ..   the anchor and the nodes below it, dropped when the
                                                                target has decided

A prompt is therefore never computed twice, and a prefix that is shared on the target is shared here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import draft_candidates
from paceline.drafters.heads.drafter import TOP_M
from paceline.drafters.heads.load import HeadPlan, open_head
from paceline.drafters.heads.module import HeadModule
from paceline.drafters.heads.paged import Branches, Paged, Part
from paceline.drafters.heads.partial_model import Family, borrowed_or_read, require_borrowable, subclass
from paceline.drafters.heads.reading import TargetFacts
from paceline.drafters.protocol import OUT, Candidates, Features, Fed, Leaf, OfSessions
from paceline.errors import ConfigError
from paceline.model.kv_cache import KVCache, LayerSpec
from paceline.model.states import find_layers

ANCHOR = -1
"""Stands for the anchor among the nodes whose keys and values a session keeps: its own id changes."""


@dataclass(slots=True)
class _Session:
    sampler: SamplerState
    num_tokens: int
    """Length of the context; the anchor is its last token."""
    anchor: int
    """Token of the anchor."""
    num_computed: int = 0
    """Rows [0, num_computed) of ``pages`` hold committed tokens."""
    pages: Sequence[int] = ()
    branches: dict[int, Branches] = field(default_factory=dict)
    """Keys and values of the anchor and of expanded nodes, by layer."""

    @property
    def ready(self) -> bool:
        return 0 < self.num_computed == self.num_tokens - 1


class EarlyExit(OfSessions[_Session]):
    """Implements ``paceline.drafters.protocol.Head`` with the first layers of the target."""

    kind = "early_exit"
    features = Features((OUT,), every_position=False)
    """The state itself is not used. Its arrival tells that the target has computed the rows before the anchor, and on
    which pages."""
    layers: tuple[LayerSpec, ...] = ()

    def __init__(self, model: PreTrainedModel, *, vocab_size: int, max_leaves: int = 64) -> None:
        """Makes a drafter of the first layers of the target (``ExitPlan.load``).

        Args:
            model: these layers, on the target's device, with their attention replaced by ``Attend``.
            vocab_size: of the target.
            max_leaves: the most leaves of one ``expand``.
        """
        self.model = model.eval().requires_grad_(False)
        self.max_leaves = max_leaves
        self._top_m = min(TOP_M, vocab_size)
        self._vocab_size = vocab_size
        self.sessions: dict[str, _Session] = {}
        self.cache: KVCache | None = None

    def bind(self, cache: KVCache, first_layer: int) -> None:
        """Reads the target's own layers of ``cache``."""
        self.cache = cache

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        """Opens any session. It is ready once the target has computed its context."""
        self.sessions[session_id] = _Session(sampler, len(token_ids), token_ids[-1])

    def feed(self, fed: Sequence[Fed]) -> None:
        """Notes on which pages the target has computed the context."""
        for each in fed:
            session = self._session(each.session_id)
            session.num_computed, session.pages = each.position + len(each.token_ids), each.pages

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        """Candidates of the leaves by one forward of the first layers; none for a session that is not ready."""
        usable = [index for index, leaf in enumerate(leaves) if self._session(leaf.session_id).ready]
        if not usable:
            return Candidates.of_some(len(leaves), [])
        usable.sort(key=lambda index: leaves[index].session_id)
        chosen = [leaves[index] for index in usable]
        rows = [Row(self.sessions[leaf.session_id].sampler, leaf.path) for leaf in chosen]
        ids, scores = draft_candidates(self._forward(chosen), rows, self._top_m)
        return Candidates.of_some(len(leaves), [(usable, ids.cpu(), scores.cpu())])

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Moves the anchor on; the target computes the committed rows itself, so nothing of them stays."""
        session = self._session(session_id)
        session.num_tokens += len(token_ids)
        session.anchor = token_ids[-1]
        session.branches.clear()

    def check_integrity(self) -> None:
        """Asserts that every row belongs to one node."""
        for session in self.sessions.values():
            for branches in session.branches.values():
                assert len(set(branches.nodes)) == len(branches.nodes), "two rows of one node"
                assert branches.keys is None or len(branches.keys) == len(branches.nodes)

    def _forward(self, leaves: Sequence[Leaf]) -> Tensor:
        """[num_leaves, vocabulary] logits after leaves that are sorted by session; keeps their keys and values."""
        parts: list[Part] = []
        owners: list[tuple[_Session, list[int]]] = []
        token_ids: list[int] = []
        for leaf in leaves:
            session = self.sessions[leaf.session_id]
            if not owners or owners[-1][0] is not session:
                start, num_rows = len(token_ids), session.num_tokens - 1
                parts.append(Part(start, start, [], session.pages, 0, num_rows, branches=session.branches))
                owners.append((session, []))
            part = parts[-1]
            part.stop += 1
            part.positions.append(session.num_tokens - 1 + len(leaf.path))
            part.above.append([ANCHOR, *leaf.path_ids[:-1]] if leaf.path else [])
            owners[-1][1].append(leaf.node_id if leaf.path else ANCHOR)
            token_ids.append(leaf.path[-1] if leaf.path else session.anchor)
        device = self.model.device
        positions = torch.tensor([[position for part in parts for position in part.positions]], device=device)
        with torch.inference_mode():
            logits: Tensor = self.model(
                input_ids=torch.tensor([token_ids], device=device),
                position_ids=positions,
                use_cache=False,
                attend=Paged(self.cache, 0, parts),
            ).logits[0, :, : self._vocab_size]
        for (session, nodes), part in zip(owners, parts, strict=True):
            for layer, (keys, values) in part.made.items():
                session.branches.setdefault(layer, Branches()).append(nodes, part.positions, keys, values)
        return logits


@dataclass(frozen=True)
class ExitPlan:
    """An early exit that fits its target; no weight has been read yet."""

    boundary: int
    """Layers below it draft."""
    adapter: HeadPlan | None
    """The exit head; None: the target's final norm has the state as it is."""
    _target: Checkpoint
    _vocab_size: int
    features = EarlyExit.features
    layers = EarlyExit.layers

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        target: PreTrainedModel | None = None,
        max_leaves: int = 64,
    ) -> EarlyExit:
        """Makes the drafter.

        Args:
            dtype: of the target.
            device: of the target.
            target: the target itself, whose weights are shared; None: the layers are read from its files once more.
            max_leaves: the most leaves of one ``expand``.

        Raises:
            ConfigError: the target's files cannot be read.
        """
        model = borrowed_or_read(partial(layers_below, self.boundary), target, self._target, dtype, device)
        if self.adapter is not None:
            append_exit(model, self.adapter.load_module(dtype, device), self._target.path)
        return EarlyExit(model, vocab_size=self._vocab_size, max_leaves=max_leaves)


def open_exit(target: Checkpoint, boundary: int | None, source: str | None = None) -> ExitPlan:
    """Checks that the first layers of a target can draft, without reading a weight.

    Args:
        target: the target.
        boundary: the layers below it draft; None: the boundary that the exit head was trained at.
        source: directory or id of an exit head; None: the target's final norm and LM head alone.

    Raises:
        ConfigError: the boundary is outside of the target, or the exit head has another one or cannot be read. Or the
            target is quantized, or its attention has parts that heads lack.
    """
    facts, adapter = TargetFacts.of(target), None
    if source is not None:
        adapter = open_head("early_exit", source, target, boundaries=None if boundary is None else (boundary,))
        (boundary,) = adapter.features.boundaries
    assert boundary is not None, "an exit without a head has a boundary"
    if not 1 <= boundary < facts.num_layers:
        raise ConfigError(
            f"boundaries is [{boundary}] of method 'early_exit': the target {target.path!r} has {facts.num_layers} "
            f"layers, so 1 to {facts.num_layers - 1} are allowed"
        )
    require_borrowable("method is 'early_exit'", target, partial(layers_below, boundary), range(boundary))
    return ExitPlan(boundary, adapter, target, facts.vocab_size)


def truncated(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """A copy of a target's configuration with its first layers only."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := getattr(text, name, None), list):
            setattr(text, name, kinds[:num_layers])
    text.num_hidden_layers = num_layers
    return config


def layers_below(boundary: int, family: Family) -> Family:
    """A ``Part`` of the first layers of a target."""

    def init(self: Any, config: PretrainedConfig) -> None:
        family.__init__(self, truncated(config, boundary))

    return subclass(family, init)


def append_exit(model: PreTrainedModel, adapter: HeadModule, name: str) -> None:
    """Appends an exit head to the last layer of a model."""
    _, layers = find_layers(model, name)
    adapter = adapter.eval().requires_grad_(False)

    def adapted(module: nn.Module, args: Any, output: Any) -> Any:
        return adapter(output) if isinstance(output, Tensor) else (adapter(output[0]), *output[1:])

    layers[-1].register_forward_hook(adapted)
