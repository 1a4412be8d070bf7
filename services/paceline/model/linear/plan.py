"""The chunks and states that linear layers read and write in a step, as numbers of slots. Owned by the KV cache.

A linear layer attends to the rows of the current *chunk*, and to one state from the beginning of that chunk. Chunks are
CHUNK rows that begin at multiples of CHUNK, so they lie within a page. A state is a function of the tokens before its
boundary. A token's output is a function of that state and of the rows of its chunk. So rejected rows are overwritten,
and a fork needs rows of its own but no state. Prefill, decoding and verification take the same sums.

Rows and states lie in slots. A slot belongs to a chunk of a page: its key is ``page * CHUNKS_OF_PAGE + chunk``.

    key of chunk i -> its rows      from the step that writes the first one, until a state after them is known
                   -> the state after its last row, at a boundary of committed tokens

A session holds the last known state of its context. States at ends of pages are kept for prefix hits while there is
room. Of the states that no session holds, the least recently used one is dropped first.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Protocol, Self

from paceline.checkpoint.linear import CHUNK, Slots
from paceline.errors import EngineError, ResourceExhaustedError
from paceline.types import PAGE_SIZE

CHUNKS_OF_PAGE = PAGE_SIZE // CHUNK
NONE = -1
"""No slot: a state of zeros, rows that nobody reads after the step, or a state that is not stored."""


class Tokens(Protocol):
    """The part of a ``SequenceStep`` that is read here."""

    token_ids: Sequence[int]
    rows: Sequence[int]
    pages: Sequence[int]
    also: Sequence[tuple[int, int]]
    copies: Sequence[tuple[int, int]]
    committed: int


@dataclass(slots=True)
class Chunk:
    """A chunk that a sequence passes through in a step."""

    rows: int
    """Slot of its rows; NONE: they are not kept."""
    first: int
    """Offset of the first row that is computed. Rows before it are read from the slot."""
    count: int
    """Rows that are computed."""
    store: int = NONE
    """Slot for the state after its last row; NONE: it is not stored."""
    also: list[tuple[int, int, int]] = field(default_factory=list)
    """Further places of its rows: (offset, slot, offset there)."""


@dataclass(slots=True)
class SequencePart:
    """The part of one sequence in a step."""

    state: int
    """Slot of the state before its first chunk; NONE: zeros."""
    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return sum([chunk.count for chunk in self.chunks])

    @property
    def slots(self) -> tuple[list[tuple[bool, int]], list[tuple[bool, int]]]:
        """The slots that it reads and that it writes: (True for states, slot) each."""
        reads, writes = [] if self.state == NONE else [(True, self.state)], []
        for chunk in self.chunks:
            if chunk.store != NONE:
                writes.append((True, chunk.store))
            if chunk.rows != NONE:
                if chunk.first:
                    reads.append((False, chunk.rows))
                if chunk.count:
                    writes.append((False, chunk.rows))
            writes += [(False, slot) for _, slot, _ in chunk.also]
        return reads, writes


@dataclass(slots=True)
class LinearStep:
    """The work of linear layers in one step, sequence after sequence: later ones may read the results of
    earlier ones.
    """

    sequences: list[SequencePart]
    copies: list[tuple[int, int]]
    """Slots of rows that are copied before the step, (from, to) each."""

    def groups(self) -> list[range]:
        """Runs of sequences: no run reads or writes a slot that another run writes.

        Runs may be computed at the same time; the sequences of a run are computed one after the other, as a session's
        branches are.
        """
        first_touch: dict[tuple[bool, int], int] = {}
        first_write: dict[tuple[bool, int], int] = {}
        starts: list[int] = []
        for index, part in enumerate(self.sequences):
            reads, writes = part.slots
            written = [first_write.get(slot, index) for slot in reads]
            since = min([*written, *[first_touch.get(slot, index) for slot in writes]], default=index)
            for slot in writes:
                first_write.setdefault(slot, index)
            for slot in (*reads, *writes):
                first_touch.setdefault(slot, index)
            starts.append(index)
            while starts[-1] > since:
                starts.pop()
        return [range(*ends) for ends in pairwise([*starts, len(self.sequences)])]

    @property
    def most_numbers(self) -> int:
        """Numbers that ``encode`` writes at most."""
        chunks = [chunk for part in self.sequences for chunk in part.chunks]
        further = 3 * sum([len(chunk.also) for chunk in chunks]) + 2 * len(self.copies)
        return 3 + 5 * len(self.sequences) + 5 * len(chunks) + further

    def encode(self) -> array[int]:
        """Writes all numbers to one array, which operators and other ranks read. Order: the place in the array, first
        token and number of sequences of each group; sequences; copies.
        """
        groups = self.groups()
        numbers, of_groups = array("q", (len(self.sequences),)), array("q", (len(groups),))
        token, front = 0, 1 + 3 * len(groups)
        firsts = {group.start: len(group) for group in groups}
        for index, part in enumerate(self.sequences):
            if index in firsts:
                of_groups.extend((front + len(numbers), token, firsts[index]))
            token += part.num_tokens
            numbers.extend((part.state, len(part.chunks)))
            for chunk in part.chunks:
                numbers.extend((chunk.rows, chunk.first, chunk.count, chunk.store, len(chunk.also)))
                numbers.extend(chain.from_iterable(chunk.also))
        numbers.append(len(self.copies))
        numbers.extend(chain.from_iterable(self.copies))
        return of_groups + numbers

    @classmethod
    def filled(cls, num_tokens: int, num_states: int) -> Self:
        """A step of ``num_tokens`` tokens that reads any of the states and keeps nothing."""
        starts = range(0, num_tokens, CHUNK)
        return cls(
            [
                SequencePart(start // CHUNK % num_states, [Chunk(NONE, 0, min(CHUNK, num_tokens - start))])
                for start in starts
            ],
            [],
        )

    @classmethod
    def decode(cls, numbers: Iterable[int]) -> Self:
        """Reads the step that ``encode`` has written."""
        left = iter(numbers)
        for _ in range(3 * next(left)):
            next(left)
        sequences = []
        for _ in range(next(left)):
            part = SequencePart(next(left), [])
            for _ in range(next(left)):
                chunk, num_also = Chunk(next(left), next(left), next(left), next(left)), next(left)
                chunk.also = [(next(left), next(left), next(left)) for _ in range(num_also)]
                part.chunks.append(chunk)
            sequences.append(part)
        return cls(sequences, [(next(left), next(left)) for _ in range(next(left))])


def num_numbers(num_tokens: int) -> int:
    """Numbers for which recorded steps of ``num_tokens`` tokens have room: sequences of one token each, in two chunks
    and written to one other place. Only steps with many copies for branches have more."""
    return 64 + 18 * num_tokens


class LinearSlots:
    """Records which chunk owns which slot. Holds no tensor."""

    def __init__(self, slots: Slots) -> None:
        """Records which slot belongs to which chunk. Holds no tensor."""
        self.slots = slots
        self.state_of: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._rows_of: dict[int, int] = {}
        self.free_states = [*reversed(range(slots.states))]
        self.free_rows = [*reversed(range(slots.rows))]
        self._owners: Counter[int] = Counter()  # keys of each state slot
        self.held: Counter[int] = Counter()  # sessions that hold the state of a key
        self._in_step: set[int] = set()  # state slots that the step being planned reads or writes
        self.ended: list[int] = []  # slots of rows that are free after the step
        self._ended_states: list[int] = []  # the same, of states: the step may read them after it has stored others
        self._optional: list[tuple[Chunk, int]] = []  # chunks whose states, of these keys, are stored if slots are left
        self._unconfirmed: list[int] = []  # keys whose states are only there once the step has run
        self._replaced_rows: list[int] = []  # keys whose rows nobody needs once the step has run
        self._replaced_states: list[int] = []  # keys of such states
        self._promised: dict[object, int] = {}

    @property
    def num_used(self) -> int:
        """Slots that hold a state."""
        return self.slots.states - len(self.free_states) - len(self._ended_states)

    @property
    def num_prefixes(self) -> int:
        """States that no session holds: of cached prefixes, and in a step of branches."""
        return len(self.state_of) - len(self.held)

    # Sessions.

    def hold(self, pages: Sequence[int], num_computed: int, held: int) -> int:
        """Moves a session's hold from the key ``held`` to the last known state of its rows [0, num_computed).

        Rows before that state are given up. Returns the key; NONE: the context begins with zeros.
        """
        chunk = num_computed // CHUNK - self.num_behind(pages, num_computed)
        key = _key(pages, chunk - 1) if chunk else NONE
        if key != held:
            while chunk and (passed := _key(pages, chunk - 1)) != held:
                self._drop_rows(passed)
                chunk -= 1
            if key != NONE:
                self.held[key] += 1
            self.let_go(held)
        return key

    def num_behind(self, pages: Sequence[int], num_computed: int) -> int:
        """Number of whole chunks of rows after the last known state of a session. Each of its branches gets a copy of
        them.
        """
        last = chunk = num_computed // CHUNK
        while chunk and _key(pages, chunk - 1) not in self.state_of:
            chunk -= 1
        return last - chunk

    def num_chunks(self, page: int) -> int:
        """Number of a page's chunks that have rows."""
        return sum(key in self._rows_of for key in range(page * CHUNKS_OF_PAGE, (page + 1) * CHUNKS_OF_PAGE))

    def let_go(self, key: int) -> None:
        """Ends a session's hold. A state within a page is given up with its last hold."""
        if self.held[key] > 0:
            self.held[key] -= 1
        if not self.held[key]:
            del self.held[key]
            if key in self.state_of and not _ends_page(key):
                self.drop_state(key)

    def promise(self, owner: object, count: int) -> None:
        """Reserves slots of rows that ``owner`` writes in the coming step. Replaces its earlier reservation.

        Raises:
            ResourceExhaustedError: fewer slots are free.
        """
        self._promised.pop(owner, None)
        free = len(self.free_rows) + len(self.ended) - sum(self._promised.values())
        if count > free:
            raise ResourceExhaustedError(f"{count} chunks of rows of linear layers were asked for, {free} are free")
        self._promised[owner] = count

    def hit(self, pages: Sequence[int]) -> int:
        """The number of ``pages`` up to the last one at whose end a state is known."""
        count = len(pages)
        while count and _key(pages, count * CHUNKS_OF_PAGE - 1) not in self.state_of:
            count -= 1
        if count:
            self.state_of.move_to_end(_key(pages, count * CHUNKS_OF_PAGE - 1))
        return count

    # Pages.

    def at_end(self, page: int) -> int:
        """The slot of the state at the end of a page; NONE: it is not known."""
        return self.state_of.get((page + 1) * CHUNKS_OF_PAGE - 1, NONE)

    def restore(self, page: int) -> int:
        """Returns a slot for the state at the end of a cached prefix's page, which is written there between two steps;
        NONE: sessions hold all states."""
        if not self.free_states:
            self._evict()
        if not self.free_states:
            return NONE
        self._own((page + 1) * CHUNKS_OF_PAGE - 1, slot := self.free_states.pop())
        return slot

    def forget(self, pages: Sequence[int]) -> None:
        """Drops all rows and states of pages that are free."""
        for page in pages:
            for key in range(page * CHUNKS_OF_PAGE, (page + 1) * CHUNKS_OF_PAGE):
                self.drop_state(key)
                self._drop_rows(key)
                del self.held[key]

    def rest(self, page: int) -> None:
        """Drops all of a cached prefix's page except the state at its end."""
        *others, last = range(page * CHUNKS_OF_PAGE, (page + 1) * CHUNKS_OF_PAGE)
        for key in others:
            self.drop_state(key)
            self._drop_rows(key)
        self._drop_rows(last)

    # Steps.

    def plan(self, steps: Sequence[Tokens]) -> LinearStep:
        """Assigns slots to the sequences of a step. Call ``confirm`` once the step has run.

        Raises:
            EngineError: the state before a sequence is no longer there, or no slot is free.
        """
        self.abandon()
        self._in_step.clear()
        self.free_rows += self.ended
        self.free_states += self._ended_states
        self.ended, self._ended_states, self._optional = [], [], []
        copies = [pair for step in steps for pages in step.copies for pair in self.copy_states(*pages)]
        sequences = [self.sequence_part(step) for step in steps]
        for chunk, key in self._optional:
            chunk.store = self.store_state(key, must=False)
        return LinearStep(sequences, copies)

    def confirm(self) -> None:
        """Marks the states that the last planned step has stored as known, and drops what they take the place of. Call
        it once the step has run."""
        for key in self._replaced_rows:
            self._drop_rows(key)
        for key in self._replaced_states:
            self.drop_state(key)
        self._unconfirmed, self._replaced_rows, self._replaced_states = [], [], []

    def abandon(self) -> None:
        """Drops the states that the last planned step would have stored, and the next step's reservations. The planned
        step has failed or has not run."""
        self._promised.clear()
        for key in self._unconfirmed:
            self.drop_state(key)
        self._unconfirmed, self._replaced_rows, self._replaced_states = [], [], []

    def copy_states(self, source: int, target: int) -> Iterator[tuple[int, int]]:
        """Makes a page share the states of another one. Yields (from, to) slots for copies of its rows."""
        for chunk in range(CHUNKS_OF_PAGE):
            ours, theirs = source * CHUNKS_OF_PAGE + chunk, target * CHUNKS_OF_PAGE + chunk
            self.drop_state(theirs)
            if ours in self.state_of:
                self._own(theirs, self.state_of[ours])
            if ours in self._rows_of:
                yield self._rows_of[ours], self._take_rows(theirs)
            else:
                self._drop_rows(theirs)

    def sequence_part(self, step: Tokens) -> SequencePart:
        """Plans the chunks, states and rows of one sequence's tokens in a step."""
        pages, start, num_tokens = step.pages, step.rows[0], len(step.token_ids)
        stop = start + num_tokens
        committed = stop if step.committed < 0 else step.committed
        first, last, boundary = start // CHUNK, (stop - 1) // CHUNK, committed // CHUNK
        base = self.known_base(pages, first, start)
        state = self.use_state(_key(pages, base - 1)) if base else NONE
        for number in range(first, len(pages) * CHUNKS_OF_PAGE):  # what these were computed from is overwritten
            self.drop_state(_key(pages, number))
        last_end = boundary // CHUNKS_OF_PAGE * CHUNKS_OF_PAGE  # of a page of committed tokens
        further: dict[int, list[tuple[int, int]]] = {}
        for index, row in step.also:
            further.setdefault((start + index) // CHUNK, []).append(((start + index) % CHUNK, row))
        chunks = []
        for number in range(base, last + 1):
            key, begin = _key(pages, number), number * CHUNK
            offset = min(max(start - begin, 0), CHUNK)
            chunk = Chunk(NONE, offset, max(0, min(stop - begin, CHUNK) - offset))
            if offset:
                chunk.rows = self._rows_of[key]
            elif number >= boundary:
                chunk.rows = self._take_rows(key)
            if number < boundary and step.committed < 0:  # nobody holds it, and the state at the boundary replaces them
                self._replaced_rows.append(key)
            if start < committed and number + 1 == boundary:  # not of a branch, which keeps the rows
                chunk.store = self.store_state(key, must=True)
            elif start < committed and number + 1 == last_end:
                self._optional.append((chunk, key))
            for at, row in further.get(number, ()):
                self.write_also(chunk, at, row, kept=number >= boundary)
            chunks.append(chunk)
        if step.committed < 0 and 0 < base < boundary and not _ends_page(key := _key(pages, base - 1)):
            self._replaced_states.append(key)  # that at the boundary takes its place
        return SequencePart(state, chunks)

    def known_base(self, pages: Sequence[int], first: int, start: int) -> int:
        """The chunk before which a state is known, and from which on all rows before ``start`` are."""
        known = not start % CHUNK or _key(pages, first) in self._rows_of
        base = first
        while known and base and _key(pages, base - 1) not in self.state_of:
            base -= 1
            known = _key(pages, base) in self._rows_of
        if not known:
            raise EngineError(f"the state of linear layers before row {start} is no longer there")
        return base

    def write_also(self, chunk: Chunk, offset: int, row: int, *, kept: bool) -> None:
        """Plans a second write of a chunk's row, to the flat ``row``. With the chunk's last row the state is shared,
        too.
        """
        key = row // CHUNK
        self.drop_state(key)
        if chunk.store != NONE and offset == CHUNK - 1:
            self._own(key, chunk.store)
            self._unconfirmed.append(key)
        if kept:
            slot = self._rows_of[key] if key in self._rows_of else self._take_rows(key)
            chunk.also.append((offset, slot, row % CHUNK))

    # Slots.

    def use_state(self, key: int) -> int:
        """Returns the slot of a stored state, which this step does not give away."""
        slot = self.state_of[key]
        self.state_of.move_to_end(key)
        self._in_step.add(slot)
        return slot

    def store_state(self, key: int, *, must: bool) -> int:
        """A slot for the state of ``key``; NONE if it need not be stored and all are in use."""
        self.drop_state(key)
        if not self.free_states:
            self._evict()
        if self.free_states:
            self._own(key, self.free_states.pop())
            self._unconfirmed.append(key)
            return self.use_state(key)
        if must:
            raise EngineError(f"all {self.slots.states} states of linear layers are in use")
        return NONE

    def _evict(self) -> None:
        """Drops the least recently used state that no session holds, if there is one."""
        kept = self._in_step | {self.state_of[key] for key in self.held if key in self.state_of}
        if (slot := next((slot for slot in self.state_of.values() if slot not in kept), None)) is not None:
            for key in [key for key, of in self.state_of.items() if of == slot]:
                self.drop_state(key)

    def _own(self, key: int, slot: int) -> None:
        self.state_of[key] = slot
        self._owners[slot] += 1

    def drop_state(self, key: int) -> None:
        slot = self.state_of.pop(key, NONE)
        if slot == NONE:
            return
        self._owners[slot] -= 1
        if not self._owners[slot]:
            del self._owners[slot]
            (self._ended_states if slot in self._in_step else self.free_states).append(slot)

    def _take_rows(self, key: int) -> int:
        if key not in self._rows_of:
            if not self.free_rows:
                raise EngineError(f"all {self.slots.rows} chunks of rows of linear layers are in use")
            self._rows_of[key] = self.free_rows.pop()
        return self._rows_of[key]

    def _drop_rows(self, key: int) -> None:
        """Drops a chunk's rows. Their slot is free from the next step on."""
        if (slot := self._rows_of.pop(key, NONE)) != NONE:
            self.ended.append(slot)

    def check_integrity(self, free: Sequence[int], cached: Sequence[int], held: Sequence[int]) -> None:
        """Asserts that every slot has an owner or is free.

        ``free``, ``cached``: pages that nobody holds. ``held``: the key of the state that each session holds.
        """
        rows = [*self._rows_of.values(), *self.free_rows, *self.ended]
        assert sorted(rows) == [*range(self.slots.rows)], "a slot of rows leaked"
        states = [*{*self.state_of.values()}, *self.free_states, *self._ended_states]
        assert sorted(states) == [*range(self.slots.states)], "a state slot leaked"
        assert Counter(self.state_of.values()) == self._owners, "owners of states differ"
        assert all(key in self.state_of for key in held), "a held state is gone"
        assert Counter(held) == self.held, "holds of states differ from what sessions hold"
        owned = {key // CHUNKS_OF_PAGE for key in (*self._rows_of, *self.state_of)}
        assert not owned & {*free}, "a free page owns slots"
        assert not {*cached} & {key // CHUNKS_OF_PAGE for key in self._rows_of}, "a cached page owns rows"


def _key(pages: Sequence[int], chunk: int) -> int:
    return pages[chunk // CHUNKS_OF_PAGE] * CHUNKS_OF_PAGE + chunk % CHUNKS_OF_PAGE


def _ends_page(key: int) -> bool:
    return key % CHUNKS_OF_PAGE == CHUNKS_OF_PAGE - 1
