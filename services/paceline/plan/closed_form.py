"""Tokens per second in closed form: one session's mean round, solved for its interdependent times.

- plain:       R = T(B)                                         1 token
- sequential:  R = D + 2 l + T(B (1 + k))                       (1 - a^(k+1)) / (1 - a) tokens (2211.17192, eq. 1)
- overlapped:  R = T(B (1 + mean k)), plus waits               the same, averaged over the available proposals
- co-located:  R = D + T(B (1 + k)), D of B sessions             as sequential: one device does one thing at a time
               R = d + (k - 1) d(w) + T(B (1 + m))               1 + the path probabilities of the m likeliest nodes

T and d are the steps of target and draft, l the link one way, B the sessions of a target. D is the time of a path of k
tokens: k d, or less where a draft makes the path of a session by one call (``System.path``). Where siblings of a
chain's tokens may be verified (``System.ranked``), a co-located draft grows a tree of k depths, each of which expands w
nodes of a session; a step verifies the likeliest nodes that have positive expected gain (``subtree``). Overlapped, the
number of available tokens depends on the steps the draft had time for, which depends on R. So the length of the
proposal is a Markov chain (``tree.prepared``) whose stationary distribution is iterated together with R. Nodes that a
draft grows for an outcome that it has not received arrive two links late, so there are (R - 2 l) / d steps. Where that
is less than one, the session decodes plainly for some rounds, which the tree has to predict. After a miss, a session
with a target and a draft of its own waits for one path.

With requests, T has the rows of the prompt chunks that the tokens emitted meanwhile require, and the keys and values
that it reads. So has d; the draft's own prefill takes its share of the draft's time. Sessions that prefill do not
decode. The model ignores preemption, prefix caches and other interference between replicas of one machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from paceline.plan.outcomes import LEAST_PATH_PROB, Outcomes, Prepared, expected_tokens, prepared
from paceline.plan.times import StepTable
from paceline.target.control.allocation import allocate_draft_tokens
from paceline.target.control.subtree import MAX_TREE_TOKENS
from paceline.target.control.waiting import worth_waiting
from paceline.types import Mode

_ITERATIONS = 60
_SETTLED = 1e-4
_QUEUE_ITERATIONS, _MOST_USE = 12, 0.95
_TREE_ITERATIONS = 4
RANKED, MOST_LEAVES = 3, 4
"""``ranked`` and ``most_leaves`` of a draft that the target's process runs token by token."""
LEAST_PATH = 0.2
"""Path probability below which a path by one call ends, if the target may verify during the call."""
_MOST_LAG = 16
"""Rounds without nodes after which none are expected any more."""


@dataclass(frozen=True, slots=True)
class System:
    """The times and limits of one replica of each kind, and of the link between them."""

    target: StepTable
    """Seconds of a target step by the tokens of all its sessions."""
    draft: StepTable
    """Seconds of a tree step by its nodes, all sessions together."""
    outcomes: Outcomes
    path: StepTable | None = None
    """Seconds in which a draft drafts the path of one session by one call, by its tokens, where it does: on a CPU, not
    under the rejection rule. None: each token takes a step."""
    link_s: float = 0.0
    """One way between target and draft."""
    gap_s: float = 0.0
    """Between two steps of a target."""
    fan_out: int = 6
    tree_budget: int = 256
    """Nodes that the draft keeps per session. Each that is expanded brings ``fan_out`` new ones."""
    min_path_prob: float = LEAST_PATH_PROB
    """Lowest path probability of a node that a draft expands."""
    draft_width: int = 64
    """Nodes of a tree step, at most."""
    adaptive: bool = True
    """The target verifies the tokens with positive expected gain (``target/control/allocation.py``), not all."""
    max_step_tokens: int = 256
    """Tokens of a target step, prompt chunks and proposals together; also of a step of a draft's prefill."""
    target_kv_s: float = 0.0
    """Seconds that a token of context adds to each target step that reads its keys and values."""
    draft_kv_s: float = 0.0
    """Seconds that a token of context adds to each tree step that reads its keys and values."""
    sharing: float = 1.0
    """Slowdown of steps while both kinds compute at once (overlapped): they share cores, memory and power."""
    colocated: bool = False
    """Lock step on one device: the target's own drafts, and verifies, in turn. There are no other drafts."""
    ranked: int = 1
    """Candidates of a co-located draft that may be verified at each position: the likeliest and its siblings. Always
    one under the rejection rule."""
    trees: bool = False
    """Overlapped sessions are simulated with whole trees (``trees.py``), as the service has them: any node may be
    expanded, and but under the rejection rule verified. False, and in closed form: the chains below the outcomes."""
    branch_s: float = 0.0
    """Seconds that a branch of siblings adds to a step beyond its rows, with ``trees``."""
    lookup_share: float = 0.0
    """Share of a session's rounds, with ``trees``, in which the target has K tokens from the session's own text
    (``target/lookup.py``). It verifies these if it expects more of them than of the draft's tokens."""
    lookup_acceptance: float = 0.0
    """Probability that a looked-up token is accepted, given its ancestors."""
    most_leaves: int = 1
    """Nodes of a session that a depth of a co-located draft expands, at most."""

    def while_both_compute(self) -> System:
        """This system with the step times that ``sharing`` makes of its own."""
        if self.sharing == 1.0:
            return self
        target, draft = self.target.times(self.sharing), self.draft.times(self.sharing)
        path = None if self.path is None else self.path.times(self.sharing)
        kv_s = (self.target_kv_s * self.sharing, self.draft_kv_s * self.sharing)
        return replace(
            self, target=target, draft=draft, path=path, target_kv_s=kv_s[0], draft_kv_s=kv_s[1], sharing=1.0
        )

    def prefill_s(self, prompt_tokens: float) -> float:
        """Seconds in which a draft prefills a prompt."""
        chunks = math.ceil(prompt_tokens / self.max_step_tokens)
        return chunks * self.draft.seconds(prompt_tokens / chunks) if chunks else 0.0

    def prepared(self, in_flight: int, k: int, steps: int, nodes: int) -> Prepared:
        """``outcomes.prepared`` by a draft of this system."""
        return prepared(self.outcomes, in_flight, k, self.fan_out, steps, nodes, self.min_path_prob)

    def most_expanded(self, k: int) -> int:
        """Maximum nodes expanded below a proposal; the proposal's own nodes and siblings use up the budget, too."""
        return max(1, self.tree_budget // self.fan_out - k)


@dataclass(frozen=True, slots=True)
class Requests:
    """Load that sessions offer. Lengths are in tokens and means; they are gamma-distributed."""

    output_tokens: int
    prompt_tokens: int = 0
    spread: float = 0.0
    """Standard deviation of a length over its mean."""
    per_s: float | None = None
    """Poisson arrivals. None: when a request ends, the next one begins in its place."""

    @property
    def context_tokens(self) -> float:
        """Mean context over time of a session that decodes: long requests are there for longer."""
        return self.prompt_tokens + self.output_tokens * (1.0 + self.spread**2) / 2


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions at once, spread evenly over the replicas."""

    sessions: int
    targets: int
    drafts: int = 0
    requests: Requests | None = None
    """None: sessions without prompt, context or end."""

    @property
    def batch(self) -> float:
        """Sessions of a target."""
        return self.sessions / self.targets

    @property
    def context_tokens(self) -> float:
        """Mean length of a session's context in tokens."""
        return self.requests.context_tokens if self.requests is not None else 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over all sessions; times in seconds."""

    mode: Mode
    k: int
    """Longest proposal."""
    tokens_per_s: float
    """Tokens per second of all sessions."""
    tokens_per_round: float
    round_s: float
    slow_round_s: float
    """A round that everything happens in that happens in 1 % of them: an estimate of the 99th percentile."""
    hit_rate: float | None
    """Rounds whose outcome the tree held when the step ended. None without a tree."""
    target_use: float
    draft_use: float
    """Share of the time in which a replica computes."""
    ttft_s: float = 0.0
    """Time from a request's arrival to its first tokens, without queueing for a place; with ``requests`` only."""

    @property
    def itl_s(self) -> float:
        """Mean seconds per token of a session."""
        return self.round_s / self.tokens_per_round


def predict(system: System, load: Load, mode: Mode, k: int) -> Prediction:
    """The mode at this load with proposals of at most k tokens."""
    if mode is Mode.PLAIN or k == 0:
        return plain(system, load)
    if mode is Mode.OVERLAPPED:
        return overlapped(system, load, k)
    return (colocated if system.colocated else sequential)(system, load, k)


def best_k(system: System, load: Load, mode: Mode, most: int = 16) -> Prediction:
    """The K of 1 to ``most`` with the most tokens per second; the least K within 0.1 % of it."""
    predictions = [predict(system, load, mode, k) for k in range(1, most + 1)]
    best = max(p.tokens_per_s for p in predictions)
    return next(p for p in predictions if p.tokens_per_s >= 0.999 * best)


@lru_cache(maxsize=4096)
def lookahead(system: System, batch: int, k: int) -> int:
    """Draft tokens per session that the target's controller verifies at this concurrency if all sessions have k."""
    if not system.adaptive:
        return k
    counts = allocate_draft_tokens(
        [[system.outcomes.acceptance] * k] * batch,
        system.target,
        num_sessions=batch,
        num_context=batch,
        limit=max(0, min(batch * k, system.max_step_tokens - batch)),
        overhead_s=system.gap_s,
    )
    return round(sum(counts) / batch)


@dataclass(frozen=True, slots=True)
class Subtree:
    """The draft tokens of each session in a step that drafts and verifies in turn; means over the sessions."""

    rows: float
    """Draft tokens that are verified."""
    reached: tuple[float, ...]
    """Probability that 1, 2, .. of them are accepted in a row."""
    leaves: int = 1
    """Nodes of a session that the draft expands in each depth but the first."""

    @property
    def tokens(self) -> float:
        """Expected tokens of a step, next token included."""
        return 1.0 + math.fsum(self.reached)


@lru_cache(maxsize=4096)
def subtree(system: System, batch: int, k: int) -> Subtree:
    """The proposal of a co-located draft of ``k`` depths at this concurrency: a chain, or the tree of likeliest nodes
    that the engine's own rule selects."""
    outcomes = system.outcomes
    chain = Subtree(k, tuple(outcomes.acceptance**depth for depth in range(1, k + 1)))
    if system.ranked == 1 or not system.adaptive or outcomes.bonus_power is not None:
        return chain
    found = [_likeliest(system, batch, k, leaves) for leaves in range(1, system.most_leaves + 1)]

    def tokens_per_s(each: Subtree) -> float:
        verify_s = system.target.seconds(batch * (1 + each.rows))
        return each.tokens / (drafting_s(system, batch, k, each.leaves) + verify_s + system.gap_s)

    return max(chain, *found, key=tokens_per_s)


def _likeliest(system: System, batch: int, k: int, leaves: int) -> Subtree:
    """Subtree of the nodes with positive expected gain, if each depth expands ``leaves`` nodes."""
    nodes = system.outcomes.likeliest(k, system.ranked, leaves)[:MAX_TREE_TOKENS]
    paths = [path for path, _ in nodes]
    each = [path / before for path, before in zip(paths, [1.0, *paths], strict=False)]  # whose products are the paths
    counts = allocate_draft_tokens(
        [each] * batch,
        system.target,
        num_sessions=batch,
        num_context=batch,
        limit=max(0, system.max_step_tokens - batch),
        overhead_s=system.gap_s + drafting_s(system, batch, k, leaves),
    )
    reached = [0.0] * k
    for count in counts:
        for path, depth in nodes[:count]:
            reached[depth - 1] += path / batch
    return Subtree(sum(counts) / batch, tuple(reached), leaves)


def drafting_s(system: System, sessions: float, k: int, leaves: int) -> float:
    """Seconds in which a co-located draft makes trees of ``k`` depths; after the first, a depth expands ``leaves``
    nodes of each session. With one leaf, paths are made by calls if that is faster."""
    steps_s = draft_step_s(system, sessions) + (k - 1) * draft_step_s(system, sessions * leaves)
    if system.path is None or leaves > 1:
        return steps_s
    return min(steps_s, sessions * system.path.seconds(k))


@dataclass(frozen=True, slots=True)
class _Batch:
    """The sessions of a target, while its steps also take prompts."""

    decoding: float
    prefill_rows: float
    """Seconds of a target step."""
    prefill_rounds: float
    """Seconds of a request until its first token."""

    @classmethod
    def of(cls, system: System, load: Load, tokens: float, rows: float) -> Self:
        """Batch whose rounds emit ``tokens`` and verify ``rows`` per session.

        A prompt of P tokens takes P / (tokens of a step that verification leaves) rounds, at least one. It waits for
        earlier prompts as in an M/D/1 queue. In a round each decoding session needs P / (rounds of a request) rows, for
        which there may be no room.
        """
        requests = load.requests
        if requests is None or not requests.prompt_tokens:
            return cls(load.batch, 0.0, 1.0)
        rounds = requests.output_tokens / tokens
        decoding, use, room, rounds_of_prompt = load.batch, 0.0, 1.0, 1.0
        for _ in range(_QUEUE_ITERATIONS):
            room = max(1.0, system.max_step_tokens - decoding * rows)
            use = 0.5 * (use + min(_MOST_USE, decoding / rounds * requests.prompt_tokens / room))
            chunks = max(1.0, requests.prompt_tokens / room)
            rounds_of_prompt = chunks * (1.0 + use / (2.0 * (1.0 - use)))
            decoding = 0.5 * (decoding + load.batch * rounds / (rounds + rounds_of_prompt))
        wanted = decoding / rounds * requests.prompt_tokens
        decoding *= min(1.0, room / wanted)
        return cls(decoding, min(wanted, room), (load.batch - decoding) * rounds / decoding)

    def ttft_s(self, round_s: float) -> float:
        """A request waits for the end of the step under way first."""
        return (0.5 + self.prefill_rounds) * round_s


def _slow_rows(system: System, load: Load, rows: float) -> float:
    """Seconds of a step with these rows of each session; where there are prompts, with all that it may take of one."""
    rows *= load.batch
    if load.requests is None or not load.requests.prompt_tokens:
        return rows
    return max(rows, min(system.max_step_tokens, rows + load.requests.prompt_tokens))


def plain(system: System, load: Load) -> Prediction:
    """No drafts."""
    batch = _Batch.of(system, load, 1.0, 1.0)
    kv_s = system.target_kv_s * load.context_tokens * batch.decoding
    step_s = system.target.seconds(batch.decoding + batch.prefill_rows) + kv_s
    slow_s = system.target.seconds(_slow_rows(system, load, 1.0)) + kv_s + system.gap_s
    round_s = step_s + system.gap_s
    rate, use = load.targets * batch.decoding / round_s, step_s / round_s
    return Prediction(Mode.PLAIN, 0, rate, 1.0, round_s, slow_s, None, use, 0.0, batch.ttft_s(round_s))


def colocated(system: System, load: Load, k: int) -> Prediction:
    """Draft and verify in turn, all sessions at once, on the target's own device."""
    batch = _Batch(load.batch, 0.0, 1.0)
    for _ in range(_TREE_ITERATIONS):  # the fewer sessions decode, the more rows each has
        tree = subtree(system, max(1, round(batch.decoding)), k)
        tokens, rows = tree.tokens, 1.0 + tree.rows
        batch = _Batch.of(system, load, tokens, rows)
    context = load.context_tokens * batch.decoding
    verify_s = system.target_kv_s * context
    draft_s = drafting_s(system, batch.decoding, k, tree.leaves) + k * system.draft_kv_s * context
    if load.requests is not None:  # the draft's share of the prompts that the tokens of a round call for
        started = batch.decoding * tokens / load.requests.output_tokens
        draft_s += started * system.prefill_s(load.requests.prompt_tokens)
    slow_s = verify_s + system.target.seconds(_slow_rows(system, load, rows)) + draft_s + system.gap_s
    verify_s += system.target.seconds(batch.decoding * rows + batch.prefill_rows)
    round_s = draft_s + verify_s + system.gap_s
    rate, use = load.targets * batch.decoding * tokens / round_s, 1.0 - system.gap_s / round_s
    return Prediction(Mode.SEQUENTIAL, k, rate, tokens, round_s, slow_s, None, use, 0.0, batch.ttft_s(round_s))


def draft_step_s(system: System, nodes: float) -> float:
    """Seconds of the draft steps over ``nodes``: several consecutive steps if they exceed the width."""
    return system.draft.seconds(min(nodes, system.draft_width)) * max(1.0, nodes / system.draft_width)


def sequential(system: System, load: Load, k: int) -> Prediction:
    """Draft and verify in turn. While some sessions draft, their target steps over the others."""
    tokens = expected_tokens(system.outcomes.acceptance, k)
    mix = _Batch.of(system, load, tokens, 1.0 + k)
    per_draft = mix.decoding * load.targets / max(load.drafts, 1)
    batch, drafting = mix.decoding, per_draft
    round_s, step_s, draft_s = 1.0, 0.0, 0.0
    for _ in range(_ITERATIONS):
        mix = _Batch.of(system, load, tokens, (1.0 + k) * batch / mix.decoding)
        prompts = mix.prefill_rows * min(1.0, batch / mix.decoding)
        step_s = system.target.seconds(batch * (1 + k) + prompts) + system.target_kv_s * load.context_tokens * batch
        width = min(max(drafting, 1.0), system.draft_width)
        tree_s = system.draft.seconds(width) + system.draft_kv_s * load.context_tokens * width
        tree_s *= max(drafting / system.draft_width, 1.0)
        tree_s /= 1.0 - _prefill_use(system, load, per_draft * tokens / round_s)
        shared = min(1.0, max(drafting - 1.0, 0.0))  # the step of the others that is under way has to end first
        draft_s = steps_s = (k + 0.5 * shared) * tree_s
        if system.path is not None:  # of a session that drafts alone
            path_s = system.path.seconds(k) + k * system.draft_kv_s * load.context_tokens
            path_s /= 1.0 - _prefill_use(system, load, per_draft * tokens / round_s)
            draft_s = shared * steps_s + (1.0 - shared) * path_s
        others = min(1.0, (mix.decoding - 1) * step_s / (batch * round_s)) if mix.decoding > 1 else 0.0
        now_s = draft_s + 2 * system.link_s + others * step_s / 2 + step_s + system.gap_s
        if mix.decoding > 1:  # in two groups, of which one drafts while the other one is verified
            now_s = max(now_s, min(2.0, mix.decoding) * (step_s + system.gap_s))
        round_s = 0.5 * (round_s + now_s)
        batch = max(min(1.0, mix.decoding), min(mix.decoding, mix.decoding * (step_s + system.gap_s) / round_s))
        drafting = min(per_draft, per_draft * steps_s / (round_s - draft_s + steps_s))  # if all of it were steps
    target_use = min(1.0, mix.decoding / batch * step_s / round_s)
    draft_use = min(1.0, per_draft * draft_s / round_s)
    slow_s = round_s + (step_s / 2 if mix.decoding > 1 else 0.0)
    slow_s += system.target.seconds(_slow_rows(system, load, 1.0 + k)) - system.target.seconds(load.batch * (1 + k))
    rate = load.targets * mix.decoding * tokens / round_s
    ttft_s = mix.ttft_s(step_s + system.gap_s)
    return Prediction(Mode.SEQUENTIAL, k, rate, tokens, round_s, slow_s, None, target_use, draft_use, ttft_s)


def _prefill_use(system: System, load: Load, tokens_per_s: float) -> float:
    """Share of a draft's time that prompts take when its sessions yield ``tokens_per_s``; at most 0.95."""
    if load.requests is None:
        return 0.0
    return min(0.95, tokens_per_s / load.requests.output_tokens * system.prefill_s(load.requests.prompt_tokens))


def overlapped(system: System, load: Load, k: int) -> Prediction:
    """The draft grows trees while the target verifies."""
    system = system.while_both_compute()
    a = system.outcomes.acceptance
    most = lookahead(system, max(1, round(load.batch)), k)
    if most == 0 or load.drafts == 0:
        return plain(system, load)
    alone = load.batch <= 1
    calls = alone and system.path is not None and load.sessions <= load.drafts
    lengths = [0.0] * most + [1.0]  # probability of a proposal, by its length
    full = system.prepared(most, k, k, system.most_expanded(k))
    step_s = round_s = system.target.seconds(load.batch)
    wait_s, hit, least, tokens, share, period_s = 0.0, 0.9, 0, 1.0, 1.0, 0.0
    missed, missed_s = 0, 0.0
    batch = _Batch.of(system, load, tokens, 1.0 + most)
    for _ in range(_ITERATIONS):
        mean = sum(i * p for i, p in enumerate(lengths))
        tokens = sum(p * expected_tokens(a, i) for i, p in enumerate(lengths))
        batch = _Batch.of(system, load, tokens, 1.0 + mean)
        per_draft = batch.decoding * load.targets / load.drafts
        step_s = system.target.seconds(batch.decoding * (1 + mean) + batch.prefill_rows)
        step_s += system.target_kv_s * load.context_tokens * batch.decoding
        round_s = 0.5 * (round_s + step_s + system.gap_s + wait_s)
        share, period_s = _draft_share(system, load, per_draft, full.num_outcomes)
        period_s /= 1.0 - _prefill_use(system, load, per_draft * tokens / round_s)
        if alone:
            least = worth_length(system, period_s, tokens / round_s, most)
            missed, missed_s = awaited(system, period_s, tokens / round_s, most, k if calls else 0)
        after, waits, hits = [0.0] * (most + 1), 0.0, 0.0
        for in_flight, weight in enumerate(lengths):
            # A wait delays the outcome that follows; what the draft grows meanwhile serves it as well, but for a path.
            reach = _reach(system, in_flight, k, share, period_s, round_s - wait_s if calls else round_s)
            hits += weight * (1.0 - reach[0])
            waits += weight * reach[0] * missed_s
            after[missed] += weight * reach[0]
            for length, probability in enumerate(reach[1:], 1):
                cut = min(length, most)
                if cut < least:
                    waits += weight * probability * (0.5 + least - cut) * period_s
                after[max(cut, least)] += weight * probability
        change = max(abs(x - y) for x, y in zip(lengths, after, strict=True)) + abs(waits - wait_s) / round_s
        change += abs(step_s + system.gap_s + wait_s - round_s) / round_s
        lengths = [(x + y) / 2 for x, y in zip(lengths, after, strict=True)]
        hit, wait_s = 0.5 * (hit + hits), 0.5 * (wait_s + waits)
        if change < _SETTLED:
            break
    tokens = sum(p * expected_tokens(a, i) for i, p in enumerate(lengths))
    rate = load.targets * batch.decoding * tokens / round_s
    slow_s = system.target.seconds(_slow_rows(system, load, 1.0 + most)) + system.gap_s
    slow_s += system.target_kv_s * load.context_tokens * batch.decoding
    if missed and hit < 0.99:
        slow_s += missed_s
    use = min(1.0, step_s / round_s)
    wanted = max(k, min(full.num_candidates, system.most_expanded(k)) / share)  # steps until all likely nodes exist
    draft_use = min(1.0, wanted * period_s / round_s)
    return Prediction(Mode.OVERLAPPED, k, rate, tokens, round_s, slow_s, hit, use, draft_use, batch.ttft_s(round_s))


def worth_length(system: System, period_s: float, tokens_per_s: float, most: int) -> int:
    """Draft tokens that a session which has its target to itself waits for; 0: it steps as it is.

    ``tokens_per_s`` is that session's own rate; ``period_s`` the time until one more token is drafted.
    """
    a, row_s = system.outcomes.acceptance, system.target.seconds(2) - system.target.seconds(1)
    first_s = 1.5 * period_s + 2 * system.link_s + row_s
    if not worth_waiting(a, first_s, tokens_per_s):
        return 0
    length = 1
    while length < most and worth_waiting(a ** (length + 1), period_s + row_s, tokens_per_s):
        length += 1
    return length


def awaited(system: System, period_s: float, tokens_per_s: float, most: int, k: int) -> tuple[int, float]:
    """(draft tokens, seconds) that a session which has its target to itself waits for after a miss; (0, 0): none.

    ``k``: tokens of the path that its draft drafts by one call; 0: it does not. The others as in ``worth_length``.
    """
    a = system.outcomes.acceptance
    if system.path is None or k == 0:
        length = worth_length(system, period_s, tokens_per_s, most)
        return length, (0.5 + length) * period_s + 2 * system.link_s if length else 0.0
    length = path_tokens(system, k)
    wait_s = 0.5 * period_s + system.path.seconds(length) + 2 * system.link_s
    length = min(length, most)
    row_s = system.target.seconds(1 + length) - system.target.seconds(1)
    pays = worth_waiting(expected_tokens(a, length) - 1.0, wait_s + row_s, tokens_per_s)
    return (length, wait_s) if pays else (0, 0.0)


def path_tokens(system: System, k: int) -> int:
    """Returns the tokens of a path of at most ``k`` that a draft makes by one call, if the target may verify
    during it.
    """
    a = system.outcomes.acceptance
    return next((length for length in range(1, k) if a**length < LEAST_PATH), k)


def _draft_share(system: System, load: Load, per_draft: float, num_outcomes: int) -> tuple[float, float]:
    """(nodes of one session in each of its tree steps, seconds from one of these to the next)."""
    sessions = max(per_draft, 1.0)
    kv_s = system.draft_kv_s * load.context_tokens * sessions  # however many steps they are spread over
    if sessions > system.draft_width:
        return 1.0, draft_step_s(system, sessions) + kv_s
    share = float(max(1, min(int(system.draft_width / sessions), num_outcomes)))
    return share, system.draft.seconds(sessions * share) + kv_s


def _reach(system: System, in_flight: int, k: int, share: float, period_s: float, round_s: float) -> list[float]:
    """Distribution of the next proposal's length: index 0 is a miss."""
    steps, hazard = (round_s - 2 * system.link_s) / period_s, 1.0
    if in_flight == 0:
        # The step in progress when the draft learns of the miss is wasted. Until nodes arrive the session decodes
        # plainly, and the tree has to contain these tokens, too.
        rounds, ahead = 1.0, steps - 1.0
        for lag in range(1, _MOST_LAG):
            ahead = (lag * round_s - 2 * system.link_s) / period_s - 1.0
            if ahead >= 1.0:
                break
            rounds += 1.0 - max(ahead, 0.0)
        whole = system.prepared(0, k, k, system.most_expanded(k))
        hazard = (1.0 - whole.distribution[0]) ** (rounds - 1.0) / rounds
        steps = max(ahead, 0.0)
    low = math.floor(max(steps, 0.0))
    mixed = [0.0] * (k + 1)
    for number, weight in ((low, low + 1 - steps), (low + 1, steps - low)):
        if weight > 0.0 and number > 0:
            nodes = min(round(number * share), system.most_expanded(k))
            tree = system.prepared(in_flight, k, min(number, k), nodes)
            for length, probability in enumerate(tree.distribution):
                mixed[length] += weight * hazard * probability if length else 0.0
    mixed[0] = max(0.0, 1.0 - math.fsum(mixed[1:]))
    return mixed
