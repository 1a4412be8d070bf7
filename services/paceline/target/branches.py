"""The branches of a subtree as sequences of their own: private copies of the pages in which they leave each other.

    rows          .. 63 │ 64 .. 70  71   72   73 ..       position of a token = its row, in every branch
    branch 0      page 4│ page 9: context, a, b, c
    branch 1      page 4│ page 7: copy of 9 up to 70, a (computed in branch 0, written here too), d

Every token then lies where plain decoding has it, and attention takes the same operations in the same order: the same
bits, on every kernel. A mask over rows next to each other would give the same sums in another order. To accept a branch
is to take its page table; its tokens' keys and values are never moved.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.checkpoint.linear import CHUNK
from paceline.core.tree import Proposal
from paceline.model.kv_cache import flat_rows
from paceline.model.step_plan import SequenceStep
from paceline.types import PAGE_SIZE, pages_for

_REMEMBERED = 256
"""Proposals whose branches are remembered."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens [first, stop) of a proposal, each the child of the one before; the first leaves an earlier branch."""

    first: int
    stop: int
    parent: int
    """The branch that it leaves; -1: none, it is the first one."""
    depth: int
    """Tokens of the proposal before its first one."""

    def page(self, context_len: int) -> int:
        """Index of its first private page."""
        return (context_len + self.depth) // PAGE_SIZE

    def num_chunks(self, context_len: int) -> int:
        """Chunks of rows of linear layers that it needs on its private pages."""
        first = max(self.page(context_len) * PAGE_SIZE, context_len) // CHUNK
        return (context_len + self.depth + self.stop - self.first - 1) // CHUNK - first + 1

    def num_pages(self, context_len: int, spare: int = 0) -> int:
        """Private pages that the branch needs, with ``spare`` rows after its last token."""
        return pages_for(context_len + self.depth + self.stop - self.first + spare) - self.page(context_len)


def branches_of(proposal: Proposal) -> Sequence[Branch]:
    """The branches in the order of their tokens; at least one, which may be empty."""
    return _branches(proposal.parents, len(proposal))


@functools.lru_cache(_REMEMBERED)
def _branches(parents: tuple[int, ...], num_tokens: int) -> tuple[Branch, ...]:
    """``branches_of`` a proposal, cached: a step asks for them several times."""
    starts = [i for i in range(1, num_tokens) if parents and parents[i] != i - 1]
    bounds = [0, *starts, num_tokens]
    branches: list[Branch] = []
    owner: list[int] = []  # the branch of each token,
    depths: list[int] = []  # and the tokens of its path, itself included
    for number, (first, stop) in enumerate(pairwise(bounds)):
        at = parents[first] if number else -1
        parent = -1 if number == 0 else 0 if at < 0 else owner[at]
        depth = 0 if at < 0 else depths[at]
        branches.append(Branch(first, stop, parent, depth))
        owner += [number] * (stop - first)
        depths += range(depth + 1, depth + 1 + stop - first)
    return tuple(branches)


def page_tables(
    pages: Sequence[int], private: Sequence[Sequence[int]], branches: Sequence[Branch], context_len: int
) -> list[list[int]]:
    """Page table of each branch; ``private``: the private pages of all but the first, whose table is ``pages``."""
    tables = [[*pages]]
    for branch, own in zip(branches[1:], private, strict=True):
        tables.append([*tables[branch.parent][: branch.page(context_len)], *own])
    return tables


def sequence_steps(
    context: Sequence[int],
    start: int,
    proposal: Proposal,
    tables: Sequence[Sequence[int]],
) -> list[SequenceStep]:
    """One step for each branch; the first one has the context tokens too.

    Args:
        context: the tokens at rows [start, start + len(context)), which end the context.
        tables: page table of each branch.

    Returns:
        Steps with logits after the context and after each token of the proposal, in this order.
    """
    stop = start + len(context)
    branches = branches_of(proposal)
    steps = []
    for branch, pages in zip(branches, tables, strict=True):
        rows = range(stop + branch.depth, stop + branch.depth + branch.stop - branch.first)
        token_ids = [*proposal.token_ids[branch.first : branch.stop]]
        if branch.parent < 0:
            rows, token_ids = range(start, rows.stop), [*context, *token_ids]
        num_logits = branch.stop - branch.first + (branch.parent < 0)
        steps.append(SequenceStep(token_ids, rows, rows, pages, num_logits, committed=stop))
    owner = [(number, i) for number, b in enumerate(branches) for i in range(b.stop - b.first)]
    also: list[list[tuple[int, int]]] = [[] for _ in steps]
    for branch, step, pages in zip(branches[1:], steps[1:], tables[1:], strict=True):
        page = branch.page(stop)
        first = page * PAGE_SIZE  # rows [first, stop + depth) of the private page are not the branch's own tokens
        for row in range(max(first, start), stop):
            also[0].append((row - start, flat_rows(pages, row, row + 1)[0]))
        for row, index in enumerate(proposal.path(proposal.parent(branch.first)), stop):
            if row >= first:
                number, i = owner[index]
                also[number].append((i + (len(context) if number == 0 else 0), flat_rows(pages, row, row + 1)[0]))
        if start >= first:  # row ``start`` is not the target's yet, but a head's that keeps rows on the pages
            step.copies = ((tables[0][page], pages[page]),)
    for step, pairs in zip(steps, also, strict=True):
        step.also = pairs
    return steps


def riding_tables(
    pages: Sequence[int], private: Sequence[Sequence[int]], branches: Sequence[Branch], context_len: int
) -> list[list[int]]:
    """Page tables (see ``page_tables``) of branches that all have private pages, the first one too."""
    first = [*pages[: branches[0].page(context_len)], *private[0]]
    return page_tables(first, private[1:], branches, context_len)


def riding_steps(
    own: SequenceStep, start: int, stop: int, guesses: Proposal, tables: Sequence[Sequence[int]]
) -> list[SequenceStep]:
    """Steps of guesses in addition to a session's own step; they write only to their private pages.

    Args:
        own: the session's step with the context tokens at rows [start, stop); also writes these to private pages.
        start: the first row that ``own`` computes.
        stop: length of the context.
        guesses: the tree of guesses.
        tables: page table of each of its branches (``riding_tables``).

    Returns:
        One step for each branch, with the logits after its last token.
    """
    steps = sequence_steps((), stop, guesses, tables)
    also = [*own.also]
    for branch, step, pages in zip(branches_of(guesses), steps, tables, strict=True):
        page = branch.page(stop)
        first = page * PAGE_SIZE
        also += [(row - start, flat_rows(pages, row, row + 1)[0]) for row in range(max(first, start), stop)]
        step.copies = ((own.pages[page], pages[page]),) if first < start else ()
        step.num_logits = 1
    own.also = also
    return steps


def accepted_table(proposal: Proposal, path: Sequence[int], tables: Sequence[Sequence[int]]) -> Sequence[int]:
    """Returns the session's pages from now on: of the branch in which the accepted ``path`` ends."""
    end = path[-1] if path else 0
    return next(table for branch, table in zip(branches_of(proposal), tables, strict=True) if end < branch.stop)
