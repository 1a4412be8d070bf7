"""The outcomes that a draft expects, ranked with a target's hint: the two rankings multiplied.

A hint holds the tokens that an early exit of the target finds likely after the nodes of the step in progress
(``target/hints.py``). It is ranked like the draft's own candidates, by the noise that the target's rule draws with.
An outcome with probability q by the draft's calibration and e by the hint counts with q^(1 - w) e^w. A token that one
of them lacks counts there as its last token. Only the order in which nodes are expanded changes, and tokens that the
draft did not have may become nodes. No published probability changes. Under the rejection rule the proposed token and
everything about it stay the same, too.
"""

from __future__ import annotations

import math

import torch

from paceline.core.processors import Row
from paceline.core.sampling import best_coupled, best_recovered
from paceline.core.tree import TreeNode
from paceline.draft.session import LEAST_PROB, DraftSession
from paceline.drafters.calibration import ranked
from paceline.drafters.ranking import Rule
from paceline.errors import InvalidRequestError
from paceline.messages import HINT_BYTES, Hint

Hinted = dict[int, dict[int, float]]
"""Probabilities of tokens, by the node that they follow."""


def read_hint(session: DraftSession, hint: Hint) -> Hinted:
    """The part of a hint about nodes that the session's tree has.

    Raises:
        InvalidRequestError: it holds no tokens, a token outside the vocabulary, or no probabilities.
    """
    num_nodes = len(hint.node_ids)
    if not num_nodes or not hint.packed or len(hint.packed) % (HINT_BYTES * num_nodes) or not 0 < hint.weight <= 1:
        raise InvalidRequestError(f"a hint of weight {hint.weight} has {len(hint.packed)} bytes for {num_nodes} nodes")
    half = len(hint.packed) // 2
    ids = torch.frombuffer(bytearray(hint.packed[:half]), dtype=torch.int32).view(num_nodes, -1).long()
    log_p = torch.frombuffer(bytearray(hint.packed[half:]), dtype=torch.float32).view(num_nodes, -1)
    if not 0 <= int(ids.min()) <= int(ids.max()) < session.sampler.vocab_size or not bool((log_p <= 0).all()):
        raise InvalidRequestError("a hint holds token ids or log probabilities out of range")
    tree = session.tree
    places = [tree.get(node_id) if node_id else tree.anchor for node_id in hint.node_ids]
    known = [i for i, node in enumerate(places) if node is not None]
    if not known:
        return {}
    nodes = [node for node in places if node is not None]
    rows = [Row(session.sampler, session.leaf(node).path) for node in nodes]
    best = best_recovered if session.rule is Rule.REJECTION else best_coupled
    listed = zip(nodes, *best(ids[known], log_p[known], rows, ids.shape[1]), strict=True)
    return {node.node_id: _probabilities(tokens, scores) for node, tokens, scores in listed}


def follow(session: DraftSession, parent: TreeNode, *, least_prob: float, most: int) -> list[TreeNode]:
    """Moves the nodes below an expanded node to where the draft and the hint for it expect them together.

    Returns:
        New nodes, at most ``most``, of the hint's tokens that are not less likely than ``least_prob``.
    """
    new: list[TreeNode] = []
    for token_id, prob in expected(session, parent).items():
        child = parent.children.get(token_id)
        if child is not None:
            child.shift(parent.log_path + math.log(prob) - child.log_path)
        elif prob >= least_prob and len(new) < most:
            for node in session.publish(parent, (token_id,), (prob,), sampled=session.rule is not Rule.REJECTION):
                node.rank = session.growth.fan_out + len(new)  # none of the draft's own, by which it is calibrated
                new.append(node)
    return new


def expected(session: DraftSession, parent: TreeNode) -> dict[int, float]:
    """Returns the probabilities of the tokens after a node, by the draft and the hint together, the likeliest first.

    Their sum is that of the draft's own tokens. {}: no probability of the draft's may change.
    """
    weight, fixed = session.hint_weight, None
    if session.rule is Rule.REJECTION and parent is not session.end:
        fixed = parent.best
    outcomes = session.outcomes(parent).items()
    own = {t: max(prob, LEAST_PROB) for t, prob in outcomes if fixed is None or t != fixed.token_id}
    told = {
        t: max(prob, LEAST_PROB)
        for t, prob in session.hinted[parent.node_id].items()
        if fixed is None or t != fixed.token_id
    }
    if not (own and told):
        return {}
    last, last_told = min(own.values()), min(told.values())
    mixed = {t: own.get(t, last) ** (1 - weight) * told.get(t, last_told) ** weight for t in own | told}
    scale = sum(own.values()) / sum(mixed.values())
    return {t: scale * mixed[t] for t in sorted(mixed, key=mixed.__getitem__, reverse=True)}


def _probabilities(token_ids: list[int], scores: list[float]) -> dict[int, float]:
    """Probabilities of tokens by their scores, best first; omits tokens without a score."""
    num = sum(score > float("-inf") for score in scores)
    return dict(zip(token_ids[:num], ranked(scores[:num]).priors, strict=True))
