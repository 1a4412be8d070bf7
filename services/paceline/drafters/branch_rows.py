"""Rows of a session at a draft model with linear layers: each token lies at the row of its position.

A linear layer reads the rows of a path one after the other, after the state that is known before them
(``model/linear/plan.py``), so rows of a tree cannot lie anywhere, as ``RowSession``'s do. They lie on *branches*, as
as in a target's subtrees (``target/branches.py``), but they last from step to step:

    rows      .. 63 │ 64 .. 70  71   72
    trunk    page 4 │ page 9: context, a, b
    branch   page 4 │ page 7: copy of 9 up to 70, then c, which is a sibling of a

A leaf goes on in the branch of its parent if nothing that lives comes after the parent there, else it begins a branch.
To commit a branch is to take its page table. Only states of committed tokens are stored. The session and all its
branches continue from the same state, each with its own rows since then.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.checkpoint.linear import CHUNK
from paceline.drafters.rows import RowSession
from paceline.errors import ResourceExhaustedError
from paceline.messages import record
from paceline.model.kv_cache import KVCache
from paceline.model.linear.plan import NONE
from paceline.model.step_plan import SequenceStep
from paceline.types import PAGE_SIZE, pages_for


@dataclass(slots=True, eq=False)
class Branch:
    """A page table: the session's up to page ``first``, and ``pages`` after it. The trunk's is the session's."""

    first: int = 0
    pages: array[int] = field(default_factory=lambda: array("q"))
    stop: int = 0
    """Rows [0, stop) hold tokens that live."""
    held: int = NONE
    """The state of linear layers that it goes on from (``KVCache.hold``)."""


@record
class Path:
    """The tokens of one leaf's path that are computed in a forward: pending ones, nodes without rows, its tail."""

    branch: Branch
    is_new: bool
    """The branch begins in this forward."""
    step: SequenceStep
    num_pending: int
    node_ids: tuple[int, ...]
    """Nodes of the tokens after pending ones. Their rows are kept up to the first with a negative id."""


@record
class BranchPart:
    """One session's part in a forward."""

    session: BranchSession
    cache: KVCache
    paths: Sequence[Path]
    steps: Sequence[SequenceStep]
    """Steps of the paths, after one that stores the state of the session's last whole chunk, if it is due."""
    placed: Sequence[int]
    """Indices of the leaves that have a path; for the others there was no room."""

    def keep(self) -> None:
        """After the forward: pending tokens are cached, nodes have their rows, all other rows are free again."""
        session, cache = self.session, self.cache
        for path in self.paths:
            if path.branch is session.trunk:
                session.num_cached += path.num_pending
            for row, node_id in enumerate(path.node_ids, path.step.rows[0] + path.num_pending):
                if node_id < 0:
                    break
                session.places.setdefault(node_id, (path.branch, row))
        session.prune(cache, [path.branch for path in self.paths if path.is_new])
        session.hold(cache)

    def drop(self) -> None:
        """After an error: the session is as it was."""
        self.session.prune(self.cache, [path.branch for path in self.paths if path.is_new])


@dataclass(slots=True)
class BranchSession(RowSession):
    """One session of a draft model with linear layers. A row is the position of its token; ``pages`` are the trunk's.

    Invariant: rows [0, num_cached) of the trunk, and so of each branch, hold committed tokens.
    """

    begun: bool = False
    trunk: Branch = field(default_factory=Branch)
    branches: list[Branch] = field(default_factory=list)
    """All but the trunk. Pages that several of them share, and the trunk does not, are held once."""
    places: dict[int, tuple[Branch, int]] = field(default_factory=dict)
    """Branch and row of each node that is computed."""

    @property
    def ready(self) -> bool:
        """True once the prompt is computed."""
        return self.begun and self.num_cached >= self.num_prefill

    def begin(self, cache: KVCache) -> None:
        """Shares the pages that others have computed of the same prefix, and holds a state from now on."""
        self.begun = True
        pages, self.hashes = cache.match_prefix(self.tokens, self.root)
        self.pages = array("q", pages)
        self.num_cached = self.trunk.stop = len(pages) * PAGE_SIZE
        self.hold(cache)

    def end(self, cache: KVCache) -> None:
        """Releases all states and pages."""
        for branch in (self.trunk, *self.branches):
            cache.let_go(branch.held)
        cache.release(self.held_pages)

    @property
    def held_pages(self) -> list[int]:
        """All pages, each once."""
        return [*dict.fromkeys([*self.pages, *(page for branch in self.branches for page in branch.pages)])]

    @property
    def held_states(self) -> list[int]:
        """The states that it holds, one for each branch, most of them the same."""
        return [branch.held for branch in (self.trunk, *self.branches) if branch.held != NONE]

    def table(self, branch: Branch) -> array[int]:
        """The page table of a branch."""
        return self.pages if branch is self.trunk else self.pages[: branch.first] + branch.pages

    def chunk(self, cache: KVCache, stop: int) -> SequenceStep:
        """The part of a session whose prompt is computed up to ``stop``: it has no logits.

        Raises:
            ResourceExhaustedError: there is no room for the rows.
        """
        self.reserve(cache, self.trunk, stop)
        cache.promise(id(self), 1)
        span = range(self.num_cached, stop)
        return SequenceStep(self.tokens[self.num_cached : stop], span, span, self.pages, num_logits=0)

    def take_chunk(self, cache: KVCache, stop: int) -> None:
        """After the forward: the prompt is computed up to ``stop``."""
        self.num_cached = self.trunk.stop = stop
        self.hold(cache)

    def part(self, cache: KVCache, leaves: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]) -> BranchPart:
        """Returns the session's part of a forward, with logits of each leaf and its tail.

        Args:
            cache: the model's.
            leaves: of each the nodes of its path, their tokens, and the tokens of its tail.

        Raises:
            ResourceExhaustedError: no leaf has room.
        """
        paths: list[Path] = []
        placed: list[int] = []
        try:
            for index, leaf in enumerate(leaves):
                try:
                    paths.append(self._path(cache, (id(self), index), *leaf))
                except ResourceExhaustedError as error:
                    full = error
                else:
                    placed.append(index)
            if not paths:
                raise full
        except BaseException:
            BranchPart(self, cache, paths, (), placed).drop()
            raise
        steps = [path.step for path in paths]
        return BranchPart(self, cache, paths, [*self._fold(cache, paths), *steps], placed)

    def follow(self, cache: KVCache, pairs: Iterable[tuple[int, int]], kept: Sequence[int]) -> None:
        """Extends the context by tokens, each with its node; commits rows of nodes, and drops rows of nodes that are
        not ``kept``."""
        ready, end = self.ready, self.trunk
        for token_id, node_id in pairs:
            # Only a row directly after the cached tokens extends them; after a gap the token is pending.
            if ready and self.num_cached == len(self.tokens) and (place := self.places.pop(node_id, None)) is not None:
                end, _ = place
                self.num_cached += 1
            self.tokens.append(token_id)
        below = {*kept} if self.num_cached == len(self.tokens) else ()
        self.places = {node_id: place for node_id, place in self.places.items() if node_id in below}
        if end is not self.trunk:
            self.make_trunk(end)
        self.prune(cache)

    def prune(self, cache: KVCache, new: Sequence[Branch] = ()) -> None:
        """Adds branches, and gives up those without a node that lives, with the pages that no other one shares."""
        every, live = [*self.branches, *new], {branch for branch, _ in self.places.values()}
        self.branches = [branch for branch in every if branch in live]
        dead = [branch for branch in every if branch not in live]
        for branch in dead:
            cache.let_go(branch.held)
        shared = {page for branch in self.branches for page in branch.pages}
        cache.release([page for page in {page: None for branch in dead for page in branch.pages} if page not in shared])
        for branch in (self.trunk, *self.branches):
            branch.stop = self.num_cached
        for branch, row in self.places.values():
            branch.stop = max(branch.stop, row + 1)

    def hold(self, cache: KVCache) -> None:
        """Goes on from the last state that is known; shares pages that became full."""
        for branch in (self.trunk, *self.branches):
            branch.held = cache.hold(self.table(branch), self.num_cached, branch.held)
        self.publish(cache)

    def check_integrity(self) -> None:
        """Asserts that each row of a node has one use, and each branch a node."""
        assert len(self.places) == len({(id(branch), row) for branch, row in self.places.values()}), "nodes share a row"
        assert {*self.branches} | {self.trunk} >= {branch for branch, _ in self.places.values()}, "a branch is lost"
        assert not {*self.pages} & {page for branch in self.branches for page in branch.pages}, "a page has two uses"
        assert not self.trunk.pages
        for branch in (self.trunk, *self.branches):
            rows = [row for of, row in self.places.values() if of is branch]
            assert rows or branch is self.trunk, "a branch has no node"
            assert all(self.num_cached <= row < branch.stop for row in rows)
            assert pages_for(branch.stop) <= len(self.table(branch)), "a row has no page"
        assert self.num_cached <= len(self.tokens)

    def _path(
        self, cache: KVCache, owner: object, node_ids: Sequence[int], token_ids: Sequence[int], tail: Sequence[int]
    ) -> Path:
        """Missing rows of a leaf's path: in the branch of its last node with a row, or in a new one."""
        pending, branch, known = self.tokens[self.num_cached :], self.trunk, 0
        for node_id in () if pending else node_ids[:-1]:
            if (place := self.places.get(node_id)) is None:
                break
            branch, known = place[0], known + 1
        inputs = [*pending, *token_ids[known:], *tail]
        rows = range(self.num_cached + known, self.num_cached + known + len(inputs))
        committed, is_new = self.num_cached, branch.stop > rows.start
        copies: Sequence[tuple[int, int]] = ()
        if is_new:
            branch, copies = self.fork(cache, owner, branch, rows)
        else:
            committed = len(self.tokens) if branch is self.trunk else committed
            cache.promise(owner, _num_chunks(max(rows.start, committed), rows.stop))
            self.reserve(cache, branch, rows.stop)
        branch.stop = rows.stop
        step = SequenceStep(inputs, rows, rows, self.table(branch), 1 + len(tail), copies=copies, committed=committed)
        return Path(branch, is_new, step, len(pending), tuple(node_ids[known:]))

    def fork(
        self, cache: KVCache, owner: object, branch: Branch, rows: range
    ) -> tuple[Branch, Sequence[tuple[int, int]]]:
        """A branch that leaves another one before ``rows``, and the page that it gets a copy of."""
        table, page = self.table(branch), rows.start // PAGE_SIZE
        is_inside = rows.start % PAGE_SIZE > 0
        copied = cache.num_chunks(table[page]) if is_inside else 0
        cache.promise(owner, copied + _num_chunks(rows.start, rows.stop))
        own = array("q", cache.allocate(pages_for(rows.stop) - page))
        first = page if branch is self.trunk else branch.first
        return Branch(first, table[first:page] + own), ((table[page], own[0]),) if is_inside else ()

    def reserve(self, cache: KVCache, branch: Branch, stop: int) -> None:
        """Gives a branch the pages of its rows before ``stop``. Raises NoMemoryError."""
        pages = self.pages if branch is self.trunk else branch.pages
        if (missing := pages_for(stop) - branch.first - len(pages)) > 0:
            pages.extend(cache.allocate(missing))

    def _fold(self, cache: KVCache, paths: Sequence[Path]) -> Sequence[SequenceStep]:
        """Computes the last row of the last whole chunk again if the state after it is not known. The state is stored
        for the trunk, and for all branches whose copy of the page has that row."""
        if self.num_cached < len(self.tokens) or not cache.num_behind(self.pages, self.num_cached):
            return ()
        stop = self.num_cached // CHUNK * CHUNK
        page, offset = divmod(stop - 1, PAGE_SIZE)
        branches = [*self.branches, *(path.branch for path in paths if path.is_new)]
        copies = {branch.pages[page - branch.first] for branch in branches if branch.first <= page}
        also = [(0, copy * PAGE_SIZE + offset) for copy in copies]
        rows = range(stop - 1, stop)
        return (SequenceStep([self.tokens[stop - 1]], rows, rows, self.pages, 0, also=also, committed=stop),)

    def make_trunk(self, branch: Branch) -> None:
        """Makes a branch the trunk. The old trunk is a branch, from the page on in which they leave each other."""
        old, first = self.trunk, branch.first
        old.first, old.pages, self.pages = first, self.pages[first:], self.table(branch)
        self.branches = [old, *(other for other in self.branches if other is not branch)]
        branch.first, branch.pages, self.trunk = 0, array("q"), branch
        for other in self.branches:
            while other.pages and [other.pages[0]] == self.pages[other.first : other.first + 1].tolist():
                other.first, other.pages = other.first + 1, other.pages[1:]


def _num_chunks(start: int, stop: int) -> int:
    """Chunks with rows of [start, stop)."""
    return (stop - 1) // CHUNK - start // CHUNK + 1
