"""``paceline bench virtual``: the pair on a virtual clock, on real weights.

The engines, tree, growth, ranking, calibration, waiting policy and the session's relay are production code; only
time is not. A target step lasts one unit, a draft tree step ``--draft-step`` units, whatever is in them, and messages
take no time. So a figure shows what a method can win and nothing of this machine: tokens after a request's first
outcome, per unit of virtual time and per target step. An engine takes a message between two of its steps.

    overlap   sequential decoding at each K, and best-first growth with 16 and 32 branches in a draft step
    rows      chains and subtrees of draft tokens that cost nothing up to ``--rows``; the draft grows its tree
              until it has nothing more to do, so that every step has the best proposal that there is
    hits      accepted draft tokens, and hits after rejected and accepted ones, by rule: one draft token a round, and
              ``--fan-out`` children below each node of the tree
    hints     hints from an exit after each of ``--boundaries`` layers, which come when these layers have run, against
              none (Mirror speculative decoding)
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.checkpoint.files import Checkpoint
from paceline.cli.table import table
from paceline.config import HintOptions
from paceline.draft.engine import DraftEngine
from paceline.drafters.heads.load import open_head
from paceline.drafters.heads.partial_model import Continued, borrow, layers_from
from paceline.drafters.model import ModelDrafter
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.messages import Hint, Outcome, SpeculationWanted
from paceline.model.loading import LoadedModel, load_pretrained, prepare
from paceline.router.session import Session
from paceline.target.engine import TargetEngine
from paceline.target.hints import Hints
from paceline.target.mount import behind
from paceline.types import Acceptance, Cause, Mode, Round, SamplingParams, SpeculationParams
from paceline_bench.prompts import Prompt, held_out_prompts

_CHAIN = 16
"""Tokens of the longest chain of ``rows``."""
UNIT_S = 0.02
"""Seconds that the engines see pass in one unit: they hold defaults and limits in seconds."""
_EPSILON_S = 1e-9


@dataclass
class Clock:
    """Virtual seconds."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class DraftClock:
    """Clock of the draft engine, which reads it within a step too: after the forward the step's duration has passed."""

    def __init__(self, clock: Clock, step_s: float) -> None:
        self._clock, self._step_s, self._passed_s = clock, step_s, 0.0

    def __call__(self) -> float:
        return self._clock.now_s + self._passed_s

    def begin(self) -> None:
        """A step begins at the time of the common clock."""
        self._passed_s = 0.0

    def timed(self, drafter: Any) -> Any:
        """``drafter``, whose expansions take a step."""
        expand = drafter.expand

        def expanded(leaves: Any) -> Any:
            self._passed_s = self._step_s
            return expand(leaves)

        drafter.expand = expanded
        return drafter


@dataclass
class Mailbox:
    """Messages on their way to one engine, with the time of their arrival."""

    messages: list[tuple[float, Any]] = field(default_factory=list)

    def put(self, at_s: float, messages: Sequence[Any]) -> None:
        self.messages += [(at_s, message) for message in messages]

    def take(self, now_s: float) -> list[Any]:
        arrived = [m for at_s, m in self.messages if at_s <= now_s + _EPSILON_S]
        self.messages = [(at_s, m) for at_s, m in self.messages if at_s > now_s + _EPSILON_S]
        return arrived

    def next_s(self) -> float:
        return min((at_s for at_s, _ in self.messages), default=math.inf)


class TimedRunner:
    """A runner whose forward takes a unit. Everything else is the runner's."""

    def __init__(self, runner: Any, clock: Clock) -> None:
        self._runner, self._clock = runner, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, steps: Any) -> Any:
        logits = self._runner.forward(steps)
        self._clock.now_s += UNIT_S
        return logits

    def forward_with_states(self, steps: Any) -> Any:
        found = self._runner.forward_with_states(steps)
        self._clock.now_s += UNIT_S
        return found


class FreeRows:
    """Times of steps in which draft tokens are free up to a number of them."""

    known = True

    def __init__(self, num_rows: int) -> None:
        self._most = num_rows + 1

    def seconds(self, num_tokens: int) -> float:
        """One second, or forever."""
        return 1.0 if num_tokens <= self._most else 1e9

    def floor(self, num_tokens: int) -> float:
        """A convex function below ``seconds``."""
        return 1.0 if num_tokens <= self._most else 1.0 + 1e6 * (num_tokens - self._most)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns nothing."""


class Simulation:
    """One target and one draft; sessions one after another, so that calibration and policy learn."""

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel,
        *,
        draft_step: float,
        max_leaves: int = 16,
        tree_budget: int = 256,
        fan_out: int = 6,
        hints: Hints | None = None,
        hint_after: float = 0.0,
        adaptive: bool = True,
        trees: bool = True,
        free_rows: int | None = None,
    ) -> None:
        """``draft_step``: 0 lets the draft finish its tree before each target step. ``hint_after``: units from the
        beginning of a step to its hints. ``trees``: siblings may be verified. ``free_rows``: draft tokens of a step
        that cost nothing, as the target knows; None: it learns what steps cost."""
        self._draft_step_s = draft_step * UNIT_S
        self._clock = Clock()
        self._events: list[tuple[float, Any]] = []
        self._nodes: list[Any] = []
        self.rounds: list[Round] = []
        """Of the last session."""
        runner: Any = TimedRunner(target.runner(64), self._clock)
        self.target = TargetEngine(
            runner,
            lambda messages: self._events.extend(
                (self._clock.now_s + UNIT_S * hint_after * isinstance(m, Hint), m) for m in messages
            ),
            max_sessions=1,
            max_step_tokens=256,
            max_model_len=target.max_len,
            adaptive=adaptive,
            trees=trees,
            hints=hints,
            clock=self._clock,
        )
        if free_rows is not None:
            self.target.allocation.cost = FreeRows(free_rows)  # type: ignore[assignment]
            self.target.adapt_drafting = lambda done: None  # type: ignore[method-assign]
        drafter = ModelDrafter(draft.runner(64), max_leaves=max_leaves, max_prefill_tokens=256, top_m=256)
        self._draft_clock = DraftClock(self._clock, self._draft_step_s)
        self.draft = DraftEngine(
            self._draft_clock.timed(drafter),
            self._nodes.extend,
            vocab_size=target.vocab_size,
            tree_budget=tree_budget,
            fan_out=fan_out,
            clock=self._draft_clock,
        )

    def run(self, session: Session) -> tuple[list[int], int, float]:
        """(all tokens, tokens of the first outcome, units from the first outcome to the last)."""
        to_target, to_draft = Mailbox(), Mailbox()
        target_s = draft_s = self._clock.now_s  # when each engine acts next; inf: when a message comes
        actions = session.open()
        to_target.put(target_s, actions.to_target)
        to_draft.put(target_s, actions.to_draft)
        tokens: list[int] = []
        self.rounds, first, first_s = [], 0, 0.0
        while True:
            if target_s < draft_s or (target_s == draft_s and self._draft_step_s):
                self._clock.now_s = now_s = target_s
                self.target.receive(to_target.take(now_s))
                worked = self.target.step()
                target_s = self._clock.now_s
                if not worked:
                    wait_s = self.target.wait_s()
                    target_s = math.inf if wait_s is None else now_s + max(wait_s, _EPSILON_S)
                    target_s = max(min(target_s, to_target.next_s()), now_s)
                events, self._events[:] = list(self._events), []
                for at_s, event in events:
                    actions = session.on_target(event)
                    to_draft.put(at_s, actions.to_draft)
                    to_target.put(at_s, actions.to_target)
                    if isinstance(event, SpeculationWanted) and event.wanted and session.wants_draft:  # again
                        actions = session.on_draft_up()
                        to_draft.put(at_s, actions.to_draft)
                        to_target.put(at_s, actions.to_target)
                    draft_s = min(draft_s, max(to_draft.next_s(), now_s))
                    if isinstance(event, Outcome):
                        if not tokens:
                            first, first_s = len(event.token_ids), at_s
                        tokens += event.token_ids
                        self.rounds.append(event.round)
                        if event.finish_reason is not None:
                            self.draft.receive(to_draft.take(math.inf))
                            return tokens, first, (at_s - first_s) / UNIT_S
            else:
                now_s = draft_s
                self._draft_clock.begin()
                self.draft.receive(to_draft.take(now_s))
                before = self.draft.stats.tree_steps
                worked = self.draft.step()
                took_s = self._draft_step_s if self.draft.stats.tree_steps > before else 0.0
                draft_s = now_s + took_s if worked else to_draft.next_s()
                nodes, self._nodes[:] = list(self._nodes), []
                for message in nodes:
                    to_target.put(now_s + took_s, session.on_draft(message).to_target)
                # A target in its step is not disturbed: it takes the message when the step has ended.
                if nodes and target_s > now_s + took_s:
                    target_s = max(self._clock.now_s, now_s + took_s)


@dataclass
class Served:
    """The texts of some prompts, and what they took after the first outcome of each."""

    texts: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    units: float = 0.0
    steps: int = 0
    accepted: list[bool] = field(default_factory=list)
    """Whether each first draft token was accepted."""
    hits: dict[bool, list[bool]] = field(default_factory=lambda: {False: [], True: []})
    """Whether the tree held the outcome of each rejected, and of each accepted one."""

    def count(self, rounds: Sequence[Round]) -> None:
        """Counts the draft tokens of a session, and the hits after them."""
        for before, after in itertools.pairwise(rounds):
            if before.num_drafted:
                self.accepted.append(before.num_accepted > 0)
                if before.num_drafted == 1:
                    self.hits[before.num_accepted > 0].append(after.cause is Cause.HIT)

    @property
    def per_unit(self) -> float:
        """Tokens per unit of virtual time."""
        return self.tokens / self.units

    @property
    def per_step(self) -> float:
        """Tokens per target step."""
        return self.tokens / self.steps


def serve(
    simulation: Simulation,
    prompts: Sequence[Prompt],
    temperature: float,
    max_tokens: int,
    speculation: SpeculationParams,
) -> Served:
    """Serves one prompt after another."""
    served = Served()
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index, ignore_eos=True)
        session = Session(f"s{index}", prompt.token_ids, sampling, speculation, decode=lambda _: "")
        before = simulation.target.stats.rounds
        tokens, first, took = simulation.run(session)
        served.texts.append(tokens)
        served.count(simulation.rounds)
        served.tokens, served.units = served.tokens + len(tokens) - first, served.units + took
        served.steps += simulation.target.stats.rounds - before - 1
    return served


Row = tuple[str, ...]
Serve = Callable[..., Served]
"""``serve`` of the run's prompts: (simulation, temperature, speculation)."""


def overlap(args: argparse.Namespace, pair: Pair, served: Serve) -> Iterator[Row]:
    """Rows of ``overlap``."""
    yield "T", "way", "tokens/unit", "tokens/step", "of best sequential"
    for temperature in args.temperatures:
        best = 0.0
        for k in args.sequential_draft_tokens:
            params = SpeculationParams(mode=Mode.SEQUENTIAL, max_draft_tokens=k)
            found = served(Simulation(*pair.models, draft_step=args.draft_step), temperature, params)
            best = max(best, found.per_unit)
            yield f"{temperature:g}", f"sequential K={k}", f"{found.per_unit:.2f}", f"{found.per_step:.2f}", ""
        for leaves in (16, 32):
            simulation = Simulation(*pair.models, draft_step=args.draft_step, max_leaves=leaves)
            found = served(simulation, temperature, SpeculationParams(max_draft_tokens=args.draft_tokens))
            name = f"overlapped K={args.draft_tokens}, {leaves} branches"
            numbers = (f"{found.per_unit:.2f}", f"{found.per_step:.2f}", f"{found.per_unit / best:.2f}")
            yield f"{temperature:g}", name, *numbers


def rows(args: argparse.Namespace, pair: Pair, served: Serve) -> Iterator[Row]:
    """Rows of ``rows``."""
    yield "T", "draft tokens", "chain, tokens/step", "subtree", "more"
    params = SpeculationParams(max_draft_tokens=_CHAIN)
    for temperature in args.temperatures:
        for number in args.rows:
            chain, tree = (
                served(
                    Simulation(*pair.models, draft_step=0.0, trees=on, free_rows=number), temperature, params
                ).per_step
                for on in (False, True)
            )
            yield f"{temperature:g}", str(number), f"{chain:.2f}", f"{tree:.2f}", f"{tree / chain - 1:+.0%}"


def hits(args: argparse.Namespace, pair: Pair, served: Serve) -> Iterator[Row]:
    """Rows of ``hits``."""
    yield "T", "rule", "accepted", "hits after a rejected token", "after an accepted one", "rounds"
    rules = {"coupled": {}, "rejection": {}, "rejection, saguaro 0.25": {"saguaro": 0.25}}
    for temperature in args.temperatures:
        for name, options in rules.items() if temperature else [("greedy", {})]:
            rule = Acceptance.REJECTION if name.startswith("rejection") else Acceptance.COUPLED
            params = SpeculationParams(max_draft_tokens=1, acceptance=rule, **options)
            simulation = Simulation(*pair.models, draft_step=args.draft_step, fan_out=args.fan_out, adaptive=False)
            found = served(simulation, temperature, params)
            shares = (f"{sum(each) / max(len(each), 1):.3f}" for each in (found.accepted, *found.hits.values()))
            yield f"{temperature:g}", name, *shares, str(len(found.accepted))


def hints(args: argparse.Namespace, pair: Pair, served: Serve) -> Iterator[Row]:
    """Rows of ``hints``."""
    yield "T", "hints at", "tokens/unit", "tokens/step", "nodes used"
    for temperature in args.temperatures:
        for boundary in (None, *args.boundaries):
            target = (
                pair.target if boundary is None else prepare(pair.network, compile=False, callback_boundary=boundary)
            )
            own = None if boundary is None else pair.hints(target, boundary, args.head)
            after = (boundary or 0) / target.size.num_layers
            simulation = Simulation(
                target,
                pair.draft,
                draft_step=args.draft_step,
                max_leaves=4,
                hints=own,
                hint_after=after,
                adaptive=False,
            )
            found, stats = served(simulation, temperature, SpeculationParams()), simulation.draft.stats
            used = stats.nodes_used / max(stats.nodes_used + stats.nodes_missed, 1)
            at = "none" if boundary is None else f"{boundary} of {target.size.num_layers}"
            yield f"{temperature:g}", at, f"{found.per_unit:.3f}", f"{found.per_step:.3f}", f"{used:.3f}"


KINDS = {"overlap": overlap, "rows": rows, "hits": hits, "hints": hints}


class Pair:
    """The embedded models, eager in float32, or compiled in bfloat16."""

    def __init__(self, *, compile: bool) -> None:
        dtype = torch.bfloat16 if compile else torch.float32
        self.network, draft = (load_pretrained(Checkpoint.open(str(path)), dtype) for path in (TARGET_DIR, DRAFT_DIR))
        self.target, self.draft = prepare(self.network, compile=compile), prepare(draft, compile=compile)

    @property
    def models(self) -> tuple[LoadedModel, LoadedModel]:
        """Target and draft."""
        return self.target, self.draft

    def hints(self, target: LoadedModel, boundary: int, head: str | None) -> Hints:
        """Hints by the layers below ``boundary``, the final norm and the LM head; ``head``: an exit head of it."""
        network: Any = target.step
        exit_of: Callable[[torch.Tensor], torch.Tensor] = Continued(
            borrow(functools.partial(layers_from, target.size.num_layers), network.model)
        ).logits
        if head is not None:
            plan = open_head("early_exit", head, Checkpoint.open(str(TARGET_DIR)), boundaries=(boundary,))
            exit_of = behind(plan.load_module(torch.float32, torch.device("cpu")), exit_of)
        return Hints(HintOptions(boundary=boundary, model=head), exit_of)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns 1 if a text differs between two ways."""
    torch.set_num_threads(1)
    pair = Pair(compile=args.compile and args.kind != "hints")
    prompts = held_out_prompts(Checkpoint.open(str(TARGET_DIR)).tokenizer, args.prompts)
    texts: dict[float, list[list[int]]] = {}
    different = 0

    def served(simulation: Simulation, temperature: float, speculation: SpeculationParams) -> Served:
        nonlocal different
        found = serve(simulation, prompts, temperature, args.max_tokens, speculation)
        if not temperature or speculation.acceptance is Acceptance.COUPLED:  # no other text is claimed to be the same
            different += found.texts != texts.setdefault(temperature, found.texts)
        return found

    print(f"draft step {args.draft_step:g}, {args.prompts} prompts x {args.max_tokens} tokens")
    print(*table(list(KINDS[args.kind](args, pair, served))), sep="\n")
    if different:
        print(f"{different} ways wrote another text than the first one")
    return int(different > 0)
