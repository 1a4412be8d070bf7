"""The speculation tree, and the proposals taken from it: pure data, no tensors, no clocks, no messages.

The draft grows a tree (``draft/growth.py``) and pushes its nodes to the target; each side walks its own copy along the
committed tokens. The draft's copy has everything that the target's has::

    context ... c  ── anchor ──▶ a ─▶ b ─▶ d        proposal: the best path below the anchor, at most K long
                        │        └──▶ e ─▶ f        e: an alternative outcome, f: its continuation
                        └──▶ g ─▶ h

A walk ends at an *anchor node* with an *unresolved suffix*: committed tokens for which no node has arrived yet. A node
that fits the suffix moves the anchor along, however late it is. So a miss needs no special message: the draft publishes
a node for the missing token below its own anchor and grows on from there.

Within an epoch every message must arrive, in order, or the two copies may differ permanently. A tree that is still
``lost`` after nodes of an equal context length have arrived has missed some: its session has to be re-opened. Wrong or
missing nodes cost time, never correctness: the target verifies whatever is proposed.

Each producer has trees of its own. A node's id says which one made it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, IntEnum, auto

from paceline.core.ranking import Ranking
from paceline.messages import Node, SparseDistribution, record
from paceline.types import Cause

MAX_NODES = 4096
"""Limit that protects a tree from a peer that never stops sending; a draft's own budget is far below it."""

_LEAST_PROB = 1e-9
_LEAST_LOG = math.log(_LEAST_PROB)
_PRODUCER_SHIFT = 28


class Producer(IntEnum):
    """The maker of a node, by the top four bits of its 32-bit id: ids of different producers never meet."""

    DRAFT = 0
    """A draft replica."""
    HEAD = 1
    """A drafter inside the target replica."""
    LOOKUP = 2
    """The session's own text (``target/lookup.py``)."""

    @property
    def first_id(self) -> int:
        """The first of its ids; 0 stands for the last token of the opened context, and is no node of the draft's."""
        return (self << _PRODUCER_SHIFT) + 1

    @staticmethod
    def of(node_id: int) -> Producer:
        """The producer of a node. Raises ValueError if there is none of that number."""
        return Producer(node_id >> _PRODUCER_SHIFT)


class TreeNode:
    """A node in place: its neighbors, and the marks that the draft keeps on it."""

    __slots__ = (
        "alive",
        "best",
        "bonus",
        "children",
        "expanded",
        "gaps",
        "log_path",
        "node_id",
        "parent",
        "parent_id",
        "position",
        "prob",
        "q",
        "rank",
        "sampled",
        "token_id",
    )

    def __init__(self, node: Node, parent: TreeNode | None, position: int) -> None:
        self.node_id = node.node_id
        self.token_id = node.token_id
        self.prob = prob = node.prob
        """Probability of its token given its parent, before its calibration at the target."""
        self.sampled = node.sampled
        self.q = node.q
        self.parent = parent
        self.parent_id = -1 if parent is None else parent.node_id
        """Id of its parent, which it keeps when that is gone; -1: it had none."""
        self.position = position
        """Index of the token in the session's context."""
        log_prob = math.log(prob) if prob > _LEAST_PROB else _LEAST_LOG
        self.log_path: float = log_prob if parent is None else parent.log_path + log_prob
        """Sum of log probabilities since the tree was opened: differences are path probabilities."""
        self.rank = 0 if parent is None else len(parent.children)
        """Order among its siblings: they are published best first."""
        self.children: dict[int, TreeNode] = {}
        self.best: TreeNode | None = None
        """The child that a proposal takes."""
        self.alive = True
        self.expanded = False
        """Draft only: its children were requested from the drafter."""
        self.gaps: tuple[float, ...] = ()
        """Draft only: score gaps of its candidates when it was expanded (``drafters/calibration.py``)."""
        self.bonus: tuple[float, ...] = ()
        """Rejection rule: score gaps of the same candidates as guesses of a bonus token."""

    def shift(self, by: float) -> None:
        """Makes the paths to this node, and to all below it, likelier by a factor, whose logarithm is ``by``."""
        below = [self]
        while below:
            node = below.pop()
            node.log_path += by
            below += node.children.values()

    def ranking(self, depth: int, factor: float, branch_tokens: float, most: int) -> Ranking:
        """Ranks the nodes below, see ``Ranking``."""
        return Ranking(self, depth, factor, branch_tokens, most)


@record
class Proposal:
    """The draft tokens of one session that the target verifies in one step; may be empty.

    A chain, or a subtree in which every branch is complete before the next one begins::

        0 ─▶ 1 ─▶ 2        parents (-1, 0, 1, 0, -1): branches 0 1 2, 3 (after 0) and 4 (after the context)
        │    └──▶ 3
        └──▶ 4
    """

    token_ids: tuple[int, ...] = ()
    qs: tuple[SparseDistribution | None, ...] = ()
    """Rejection rule: the distribution each token was drawn from, given those before it."""
    probs: tuple[float, ...] = ()
    """Probability of each token given those before it, before its calibration at the target."""
    node_ids: tuple[int, ...] = ()
    """The nodes, one per token; () if the tokens do not come from a tree."""
    parents: tuple[int, ...] = ()
    """Index of each token's parent, -1 for the context; (): a chain. Siblings differ in their tokens."""
    producer: Producer = Producer.DRAFT
    """The maker of all tokens."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """True if no two tokens follow the same one."""
        return not self.parents

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """Ids of the nodes if the draft made them, the only ones that it knows."""
        return self.node_ids if self.producer is Producer.DRAFT else ()

    def first(self, num_tokens: int) -> Proposal:
        """The proposal cut after its first ``num_tokens`` tokens."""
        if len(self.token_ids) <= num_tokens:
            return self
        n = max(0, num_tokens)
        parents = self.parents[:n]
        if all(parent == i - 1 for i, parent in enumerate(parents)):
            parents = ()
        return Proposal(self.token_ids[:n], self.qs[:n], self.probs[:n], self.node_ids[:n], parents, self.producer)

    def parent(self, index: int) -> int:
        """Index of the token that a token follows; -1: it follows the context."""
        return self.parents[index] if self.parents else index - 1

    def path(self, index: int) -> tuple[int, ...]:
        """Indices of the tokens from the context to ``index``, which comes last; () for -1."""
        if not self.parents:
            return tuple(range(index + 1))
        path = []
        while index >= 0:
            path.append(index)
            index = self.parents[index]
        return tuple(reversed(path))

    def suffixes(self) -> list[tuple[int, ...]]:
        """The uncommitted tokens before each row of a verification: none, and then up to each token."""
        if not self.parents:
            return [self.token_ids[:i] for i in range(len(self.token_ids) + 1)]
        rows: list[tuple[int, ...]] = [()]
        for token_id, parent in zip(self.token_ids, self.parents, strict=True):
            rows.append((*rows[parent + 1], token_id))
        return rows

    def after(self, index: int, token_id: int) -> int | None:
        """Index of ``token_id`` after token ``index`` (-1: the context); None: it is not proposed there."""
        for child in (index + 1,) if not self.parents else range(index + 1, len(self.token_ids)):
            if child < len(self.token_ids) and self.token_ids[child] == token_id and self.parent(child) == index:
                return child
        return None

    def follow(self, own: Sequence[int]) -> list[int]:
        """The accepted path: indices of the tokens that equal the target's own ones.

        Args:
            own: the target's token at each row, ``own[0]`` after the context and ``own[i + 1]`` after token i.
        """
        if not self.parents:
            return list(range(num_equal(self.token_ids, own)))
        path: list[int] = []
        at = -1
        for index, token_id in enumerate(self.token_ids):  # a child comes after its parent, and siblings differ
            if self.parent(index) == at and token_id == own[at + 1]:
                path.append(index)
                at = index
        return path

    def along(self, token_ids: Sequence[int]) -> list[int]:
        """Indices of the tokens on the path that begins ``token_ids``, as far as it is proposed."""
        if not self.parents:
            return list(range(num_equal(self.token_ids, token_ids)))
        path: list[int] = []
        at = -1
        for index, token_id in enumerate(self.token_ids):
            if len(path) < len(token_ids) and self.parent(index) == at and token_id == token_ids[len(path)]:
                path.append(index)
                at = index
        return path


NO_PROPOSAL = Proposal()
"""Nothing to verify: the one that is taken wherever there are no tokens."""


def num_equal(token_ids: Sequence[int], others: Sequence[int]) -> int:
    """Number of tokens at the beginning that two sequences have in common."""
    num = 0
    for token_id, other in zip(token_ids, others, strict=False):
        if token_id != other:
            break
        num += 1
    return num


class Refusal(Enum):
    """Reason why a tree has not taken a node."""

    STALE = auto()
    """The node's parent was pruned, or it contradicts committed tokens: normal after a miss."""
    INVALID = auto()
    """The peer should not have sent it: id, token, probability or q out of range, or a duplicate."""
    DROPPED = auto()
    """The tree had no room for it."""


@record
class Added:
    """Counts of the nodes of one message by what became of them."""

    added: int = 0
    """Nodes that the tree has now."""
    stale: int = 0
    """Nodes refused as ``Refusal.STALE``."""
    invalid: int = 0
    """Nodes refused as ``Refusal.INVALID``."""
    dropped: int = 0
    """Nodes refused as ``Refusal.DROPPED``."""


@record
class Walk:
    """Result of walking a tree along committed tokens."""

    node_ids: tuple[int, ...]
    """The nodes walked through, one for each of the first tokens."""
    unresolved: tuple[int, ...]
    """The remaining tokens, for which there is no node."""
    cause: Cause
    """HIT: there is a proposal below. TOKEN: the first unresolved token was not among its parent's children.
    K: its parent had no children. LATE: the tree was lost before, or the outcome has nothing below it."""


class SpeculationTree:
    """One session's tree on either side. Node 0 is the last token of the context it was opened with.

    ``context_len`` is the length of that context. ``rejection`` is the rejection rule at temperature > 0. Every sampled
    node needs a q with positive probability for it, and a parent has at most one sampled child. ``producer`` makes all
    nodes.
    """

    __slots__ = (
        "_anchor",
        "_best_limit",
        "_best_path",
        "_nodes",
        "_producer",
        "_suffix",
        "_vocab_size",
        "max_nodes",
        "next_id",
        "rejection",
    )

    def __init__(
        self,
        vocab_size: int,
        context_len: int,
        *,
        rejection: bool = False,
        max_nodes: int = MAX_NODES,
        producer: Producer = Producer.DRAFT,
    ) -> None:
        self._vocab_size = vocab_size
        self.rejection = rejection
        self.max_nodes = max_nodes
        self._producer = producer
        self.next_id = producer.first_id
        """Id of the next node that it grows."""
        self._anchor = TreeNode(Node(0, -1, 0, 1.0, sampled=False), None, context_len - 1)
        self._nodes = {0: self._anchor}
        self._suffix: deque[int] = deque()
        self._best_path, self._best_limit = NO_PROPOSAL, -1  # the proposal of that many tokens; -1: nodes have changed

    def __len__(self) -> int:
        """Nodes below the anchor."""
        return len(self._nodes) - 1

    @property
    def anchor(self) -> TreeNode:
        """The deepest committed node."""
        return self._anchor

    @property
    def suffix(self) -> tuple[int, ...]:
        """Committed tokens beyond the anchor."""
        return tuple(self._suffix)

    @property
    def lost(self) -> bool:
        """True if nodes of committed tokens are missing."""
        return bool(self._suffix)

    @property
    def context_len(self) -> int:
        """Number of committed tokens."""
        return self._anchor.position + 1 + len(self._suffix)

    def get(self, node_id: int) -> TreeNode | None:
        """The node if it is the anchor or below it, else None."""
        return self._nodes.get(node_id)

    def nodes(self) -> Iterator[TreeNode]:
        """The anchor and everything below, parents before children."""
        return iter(self._nodes.values())

    def add(self, nodes: Iterable[Node]) -> Added:
        """Attaches the valid nodes (parents first) and counts the rejected ones. Never raises."""
        added = stale = invalid = dropped = 0
        for node in nodes:
            result = self.attach(node)
            if isinstance(result, TreeNode):
                added += 1
            elif result is Refusal.STALE:
                stale += 1
            elif result is Refusal.INVALID:
                invalid += 1
            else:
                dropped += 1
        return Added(added, stale, invalid, dropped)

    def attach(self, node: Node) -> TreeNode | Refusal:
        """Attaches one node and returns it in its place, or the reason why not. Never raises."""
        token_id = node.token_id
        parent = self._nodes.get(node.parent_id)
        if parent is None or (self._suffix and token_id != self._suffix[0]):
            return Refusal.STALE
        if not self.is_valid(node, parent):
            return Refusal.INVALID
        if len(self._nodes) > self.max_nodes:
            return Refusal.DROPPED
        self._best_limit = -1
        child = TreeNode(node, parent, parent.position + 1)
        self._nodes[node.node_id] = parent.children[token_id] = child
        if node.sampled and (parent.best is None or node.prob > parent.best.prob):
            parent.best = child
        if self._suffix:
            self._suffix.popleft()
            self._move(child)
        return child

    def grow(
        self,
        parent: TreeNode,
        token_ids: Sequence[int],
        probs: Sequence[float],
        sampled: bool = True,
        q: SparseDistribution | None = None,
    ) -> list[TreeNode]:
        """Attaches new nodes below one of the tree, with its next ids; returns the ids of those taken.

        ``sampled``: of all of them; with a ``q``, only the first one was drawn from it.
        """
        first, parent_id = self.next_id, parent.node_id
        self.next_id += len(token_ids)
        nodes = [
            Node(first + i, parent_id, token_id, prob, sampled and (q is None or i == 0), q if i == 0 else None)
            for i, (token_id, prob) in enumerate(zip(token_ids, probs, strict=True))
        ]
        return [placed for node in nodes if not isinstance(placed := self.attach(node), Refusal)]

    def walk(self, token_ids: Sequence[int]) -> Walk:
        """Follows committed tokens and prunes all nodes that are not below the new anchor. Amortized O(1) per node."""
        self._best_limit = -1
        if self._suffix:  # nothing can be below the anchor
            self._suffix.extend(token_ids)
            return Walk((), tuple(token_ids), Cause.LATE)
        cause = None
        node_ids = []
        for token_id in token_ids:
            child = None if self._suffix else self._anchor.children.get(token_id)
            if child is not None:
                node_ids.append(child.node_id)
                self._move(child)
                continue
            if cause is None:
                cause = Cause.TOKEN if self._anchor.children else Cause.K
                self._drop_below(self._anchor.children.values())
                self._anchor.children, self._anchor.best = {}, None
            self._suffix.append(token_id)
        if cause is None:
            cause = Cause.HIT if self._anchor.best else Cause.LATE
        return Walk(tuple(node_ids), tuple(token_ids[len(node_ids) :]), cause)

    def follow(self, token_ids: Sequence[int]) -> Cause:
        """``walk`` for its cause alone."""
        return self.walk(token_ids).cause

    def proposal(self, k: int) -> Proposal:
        """The best path below the anchor, at most k long; empty if the tree is lost.

        Coupled rule: the most probable child of each node. Rejection rule: the sampled child.
        """
        if k > self._best_limit:
            self._best_path, self._best_limit = self._proposal(k), k
        best = self._best_path
        return best if len(best.token_ids) <= k else best.first(k)

    def _proposal(self, k: int) -> Proposal:
        path: list[TreeNode] = []
        node = self._anchor.best
        while node is not None and len(path) < k:
            path.append(node)
            node = node.best
        if not path:
            return NO_PROPOSAL
        return Proposal(
            token_ids=tuple([n.token_id for n in path]),
            qs=tuple([n.q for n in path]),
            probs=tuple([n.prob for n in path]),
            node_ids=tuple([n.node_id for n in path]),
            producer=self._producer,
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between calls; O(nodes)."""
        check_integrity(self)

    def is_valid(self, node: Node, parent: TreeNode) -> bool:
        """True if a node can be added below ``parent``: new id, values in range, no sibling with its token."""
        node_id = node.node_id
        if node_id >> _PRODUCER_SHIFT != self._producer or node_id in self._nodes or node.parent_id >= node_id:
            return False
        if not (0 <= node.token_id < self._vocab_size and 0.0 <= node.prob <= 1.0):  # False for NaN
            return False
        if node.token_id in parent.children:
            return False
        return self._can_have_been_drawn(node, parent)

    def _can_have_been_drawn(self, node: Node, parent: TreeNode) -> bool:
        """Rejection rule: a sampled node is the only one below its parent, and has a q that can yield it."""
        if not (self.rejection and node.sampled):
            return True
        from paceline.core.sparse import drawable  # engines have numpy; the planner is up without it

        return parent.best is None and node.q is not None and drawable(node.q, node.token_id, self._vocab_size)

    def _forget(self, node: TreeNode) -> None:
        del self._nodes[node.node_id]
        node.alive = False

    def _move(self, child: TreeNode) -> None:
        old = self._anchor
        self._forget(old)
        if len(old.children) > 1:
            self._drop_below(c for c in old.children.values() if c is not child)
        child.parent = None
        self._anchor = child

    def _drop_below(self, nodes: Iterable[TreeNode]) -> None:
        stack = list(nodes)
        while stack:
            node = stack.pop()
            node.parent = None
            self._forget(node)
            stack.extend(node.children.values())


def check_integrity(tree: SpeculationTree) -> None:
    """Asserts what must hold of a tree, native or not, between calls; O(nodes)."""
    anchor = tree.anchor
    assert tree.get(anchor.node_id) is anchor
    assert anchor.parent is None
    assert len(tree) <= tree.max_nodes
    assert not tree.lost or not anchor.children, "a lost tree has nothing below its anchor"
    reached, stack = 0, [anchor]
    while stack:
        node = stack.pop()
        reached += 1
        assert node.alive
        assert tree.get(node.node_id) is node
        children = node.children
        sampled = [c for c in children.values() if c.sampled]
        assert node.best is (max(sampled, key=lambda c: c.prob) if sampled else None)
        assert not tree.rejection or len(sampled) <= 1
        for token_id, child in children.items():
            assert child.parent is node
            assert child.token_id == token_id
            assert child.position == node.position + 1
            stack.append(child)
    assert reached == len(tree) + 1 == len([*tree.nodes()]), "a node is not reachable from the anchor"


GREW, OFFERS, FIRST, LOST = 1, 2, 4, 8
"""Effects of a message on a tree (``add_each``): it has more nodes; it has a proposal; it had none before; it is
lost."""


def add_each(trees: Sequence[SpeculationTree], nodes: Sequence[Iterable[Node]]) -> tuple[Added, bytes]:
    """Attaches the nodes of several messages in order, each to its tree (``SpeculationTree.add``).

    Returns:
        The counts of all, and for each message a sum of ``GREW``, ``OFFERS``, ``FIRST`` and ``LOST``.
    """
    counts, effects = [0, 0, 0, 0], bytearray()
    for tree, message in zip(trees, nodes, strict=True):
        offered = tree.anchor.best is not None
        one = tree.add(message)
        counts = [a + b for a, b in zip(counts, (one.added, one.stale, one.invalid, one.dropped), strict=True)]
        effect = GREW if one.added else 0
        if tree.anchor.best is not None:
            effect += OFFERS if offered else OFFERS + FIRST
        effects.append(effect + LOST if tree.lost else effect)
    return Added(*counts), bytes(effects)
