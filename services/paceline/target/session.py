"""State of one session on the target: tokens, KV pages, sampler, speculation tree, and the account of its drafting."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from paceline.core.experiment import Experiment
from paceline.core.native_tree import new_tree
from paceline.core.processors import Grammar, SamplerState
from paceline.core.statistics import DecayingRatio, RateSample
from paceline.core.tree import NO_PROPOSAL, Proposal, TreeNode
from paceline.messages import OpenSession
from paceline.model.attention.flashinfer import num_by_library
from paceline.model.kv_cache import KVCache, flat_rows, page_hash, root_hash
from paceline.model.linear.plan import NONE
from paceline.target.control.allocation import AcceptanceHistory, expected_tokens
from paceline.target.control.compared import NUM_RANKS
from paceline.target.control.subtree import SubtreeOffer
from paceline.target.lookup import Lookup
from paceline.types import PAGE_SIZE, Acceptance, Cause, FinishReason, Mode, pages_for

FAN_OUT = NUM_RANKS
"""Candidates of a head that are ranked at each place; the gap to the second says how certain the first is."""


@dataclass(slots=True)
class Account:
    """Rounds of drafting for a session since it was last judged (``control/session_gate.py``)."""

    available: int = 0
    """Draft tokens that were available, verified or not."""
    scheduled: int = 0
    """Rounds in which draft tokens were verified."""
    unheard: int = 0
    """Rounds before the draft has sent anything."""
    lost: float = 0.0
    """Tokens lost in those."""
    num_sessions: int = 0
    """Highest concurrency since the account was opened."""


@dataclass(frozen=True, slots=True)
class HeadOffer:
    """Proposal of a head of the target for a session's next round."""

    proposal: Proposal
    """Not empty."""
    hits: AcceptanceHistory
    """Acceptance of the head's tokens in this session."""
    depth: int
    """Rejection rule: the intended length of the proposal, which does not depend on the drawn tokens."""
    anchor: TreeNode | None
    """Root of the head's nodes, the proposal's among them; None under the rejection rule."""


class TargetSession:
    """Tokens, KV pages, sampler and speculation tree of one session. Invariants, as half-open intervals of rows::

    [0, num_computed)              KV is valid and belongs to committed tokens
    [num_computed, num_tokens)     committed, KV to be computed; never empty while the session lives
    [num_tokens, num_tokens + k)   the proposal of the running step, its first branch; overwritten later where rejected
    """

    __slots__ = (  # an instance dict of this size is slow to read
        "_outcome",
        "_vocab_size",
        "acceptance",
        "account",
        "attachment",
        "cache_salt",
        "cached_tokens",
        "cause",
        "draft_available",
        "draft_epoch",
        "draft_heard",
        "draft_silent",
        "drafting",
        "epoch",
        "generation",
        "hashes",
        "head_offer",
        "held_state",
        "hits",
        "idle_context_len",
        "k",
        "last_nodes_at",
        "lookup",
        "max_tokens",
        "mode",
        "nodes_context_len",
        "num_attached",
        "num_by_library",
        "num_computed",
        "num_prompt_tokens",
        "num_scored",
        "on_trial",
        "outcome_at",
        "pages",
        "paused",
        "picks",
        "private_pages",
        "rejection",
        "resumed_at",
        "root",
        "sampler",
        "samples_ahead",
        "scored_end",
        "scored_top",
        "session_id",
        "stop_ids",
        "suspected_until",
        "tokens",
        "tree",
        "verified_draft",
        "waiting_since",
    )

    def __init__(
        self,
        message: OpenSession,
        *,
        vocab_size: int,
        max_len: int,
        device: str,
        now: float,
        coupled: AcceptanceHistory | None = None,
        rejection: AcceptanceHistory | None = None,
        lookups: Sequence[DecayingRatio] | None = None,
        grammar: Grammar | None = None,
        generation: int = 0,
        block_len: int = 0,
    ) -> None:
        """Opens a session.

        Args:
            max_len: bound of the context in tokens.
            coupled, rejection: the engine's acceptance history under each rule.
            lookups: the engine's shares of right prompt lookups (``lookup.py``); None: no such proposals.
            grammar: the grammar of its structured output, after the output so far; None: none.
            generation: number of the runner that computes all of its tokens (``runners.py``).
            block_len: tokens of the prompt's blocks that a kernel library attends to (``Backend.block_len``).

        Raises:
            InvalidRequestError: the prompt or an option names a token outside the vocabulary.
        """
        sampling, speculation = message.sampling, message.speculation
        self.session_id = message.session_id
        self.epoch = message.epoch
        self.suspected_until = now + message.suspected_s
        """Other targets were lost under it if this is in the future: until then no second such session is taken."""
        self.tokens = list(message.token_ids)
        self.num_prompt_tokens = message.num_prompt_tokens
        self.num_by_library = num_by_library(message.num_prompt_tokens, block_len)
        """First tokens, to which a kernel library attends whenever they are computed."""
        self.max_tokens = min(message.num_prompt_tokens + sampling.max_tokens, max_len)
        """Context length at which the session ends."""
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(message.eos_token_ids)
        )
        self.mode = speculation.mode
        self.acceptance = speculation.acceptance
        self.scored_top = sampling.prompt_logprobs
        """Likeliest tokens that are reported for each token of the prompt; None: it has no log probabilities."""
        self.scored_end = 0 if self.scored_top is None else message.num_prompt_tokens - 1
        """Rows [0, scored_end) tell the log probability of the prompt's next token."""
        self.num_scored = 0
        """Rows [0, num_scored) have told it."""
        self.k = 0 if speculation.mode is Mode.PLAIN else speculation.max_draft_tokens
        self.sampler = SamplerState(
            sampling,
            message.seed,
            message.token_ids[: message.num_prompt_tokens],
            message.token_ids[message.num_prompt_tokens :],
            eos_token_ids=message.eos_token_ids,
            vocab_size=vocab_size,
            device=device,
            grammar=grammar,
            num_ranked=FAN_OUT if speculation.acceptance is Acceptance.COUPLED else 0,
        )
        self.rejection = speculation.acceptance is Acceptance.REJECTION and sampling.temperature > 0
        self.lookup: Lookup | None = None
        """Proposals from the session's own text, where it may have any."""
        if lookups is not None and speculation.mode is Mode.OVERLAPPED and self.k > 0 and not self.rejection:
            self.lookup = Lookup(self.tokens, lookups)
        self.picks = self.sampler.only_scales and not self.rejection and not self.sampler.wants_rows
        """True if its tokens can be drawn from parts of the vocabulary, without whole rows of logits."""
        self.samples_ahead = not (self.rejection or self.sampler.reads_tokens or self.sampler.wants_rows)
        """True if its next token but one can be sampled before the host knows the next one (``flight.py``)."""
        self._vocab_size = vocab_size
        self.draft_epoch = message.epoch
        self.tree = new_tree(vocab_size, len(self.tokens), rejection=self.rejection)
        self.pages: array[int] = array("q")
        self.private_pages: list[int] = []
        """Pages of the further branches of the running step (``branches.py``); none between steps."""
        self.num_computed = 0
        self.held_state = NONE
        """The state of linear layers that the session goes on from (``KVCache.hold``)."""
        self.cached_tokens = 0
        self.attachment = 0
        """Times that it was given pages from nothing: once, and again after each preemption."""
        self.num_attached = 0
        """Tokens whose pages it shared when it was last given pages."""
        self.cache_salt = message.cache_salt
        self.generation = generation
        self.root = root_hash(self.cache_salt, generation)
        self.hashes: list[bytes] = []
        # The state of the draft, as far as the target knows it.
        self.draft_available = self.k > 0
        self.draft_silent = False
        """A wait for the draft ended without a proposal, and it has sent none since."""
        self.verified_draft = False
        """The last round verified tokens of the draft."""
        self.idle_context_len = -1
        """Length of the context for which the draft has announced to send nothing more."""
        self.nodes_context_len = -1
        """Length of the context at the draft when it sent its last nodes."""
        self.head_offer: HeadOffer | None = None
        """Proposal of a head of the target for the next round (``heads/``)."""
        self._outcome: tuple[int, ...] = ()
        """Committed tokens that the tree has not been walked along yet."""
        self.cause = Cause.START
        """The reason for the coming round's proposal, or for having none."""
        self.outcome_at = now
        """Time of the last outcome, seconds."""
        self.last_nodes_at = now
        self.waiting_since: float | None = None
        """Time at which the session began to wait for its draft in this round."""
        # The gain of drafting, and the state of its pauses.
        self.hits = AcceptanceHistory((rejection if self.rejection else coupled) or AcceptanceHistory())
        """Acceptance of the draft's tokens."""
        self.account = Account()
        self.drafting = Experiment()
        """Tokens gained by drafting in each round of the account."""
        self.paused = False
        """Drafting has no gain now: plain rounds until it is resumed."""
        self.draft_heard = False
        """Nodes have arrived since the draft was opened."""
        self.on_trial = False
        """Drafting was resumed and has not paid yet."""
        self.resumed_at = now

    @property
    def num_tokens(self) -> int:
        """Length of the context."""
        return len(self.tokens)

    @property
    def decoding(self) -> bool:
        """True if only the last token's KV is missing."""
        return self.num_computed == len(self.tokens) - 1

    @property
    def idle(self) -> bool:
        """True if the draft has announced to send nothing more before the next outcome."""
        return self.idle_context_len == len(self.tokens)

    @property
    def scores_prompt(self) -> bool:
        """True if log probabilities of the prompt are still to be computed."""
        return self.num_scored < self.scored_end

    def next_chunk(self, budget: int, scored_budget: int) -> tuple[int, bool]:
        """Returns (end of the next prefill chunk, True if log probabilities of all its rows are requested).

        Args:
            budget: tokens that the step may still compute.
            scored_budget: maximum rows of these with log probabilities.
        """
        start = self.num_computed
        if not self.scores_prompt:
            return min(self.num_tokens, start + budget), False
        if start < self.num_scored:  # computed again, after a preemption
            return min(self.num_scored, start + budget), False
        return min(self.scored_end, start + min(budget, scored_budget)), True

    def awaits_mask(self) -> bool:
        """True while its structured output computes what may come next; until then the session cannot verify."""
        grammar = self.sampler.grammar
        return grammar is not None and not grammar.ready()

    def max_draft(self) -> int:
        """Length of the longest useful proposal: the round yields one token more than it accepts."""
        left = self.max_tokens - len(self.tokens) - 1
        return self.k if self.k <= left else max(0, left)

    def commit_outcome(self, token_ids: tuple[int, ...], now: float) -> None:
        """Extends the context by the tokens that the target decided."""
        self.suspected_until = now
        self.tokens.extend(token_ids)
        self.sampler.append(token_ids)
        self._outcome = token_ids
        self.outcome_at = now

    def follow_outcome(self) -> None:
        """Walks the tree along the last outcome, with the nodes that arrived while its step ran; sets ``cause``."""
        if self._outcome:
            self.cause = self.tree.follow(self._outcome)
            self._outcome = ()

    @property
    def tree_is_current(self) -> bool:
        """True if the tree has been walked to the end of the context."""
        return not self._outcome

    def proposal(self, limit: int) -> Proposal:
        """Proposes at most ``limit`` tokens to verify now: the draft's, else a head's; or prompt lookup's where these
        are expected to bring more."""
        limit = min(self.max_draft(), limit)
        if limit <= 0:
            return NO_PROPOSAL
        proposal, hits = NO_PROPOSAL if self.paused else self.tree.proposal(limit), self.hits
        if not proposal.token_ids and (headed := self.head_offer) is not None:
            proposal, hits = headed.proposal.first(limit), headed.hits
        if self.lookup is None or not (looked_up := self.lookup.proposal(limit)).token_ids:
            return proposal
        if not proposal.token_ids:
            return looked_up
        scale = hits.correction()
        expected = expected_tokens([min(1.0, scale * prob) for prob in proposal.probs])
        return proposal if expected >= expected_tokens(looked_up.probs) else looked_up

    def drafted(self, limit: int) -> Proposal:
        """Proposes at most ``limit`` tokens of the draft."""
        if self.paused:
            return NO_PROPOSAL
        most = self.max_draft()
        k = limit if limit < most else most
        return self.tree.proposal(k) if k > 0 else NO_PROPOSAL

    def looked_up(self, limit: int) -> Proposal:
        """Proposes at most ``limit`` tokens of the prompt-lookup continuation, which has no nodes."""
        return NO_PROPOSAL if self.lookup is None else self.lookup.proposal(min(self.max_draft(), limit))

    def subtree(self) -> SubtreeOffer:
        """The nodes that may be proposed now: the draft's, else a head's."""
        most = self.max_draft()
        headed = self.head_offer
        if headed is not None and headed.anchor is not None and not len(self.drafted(1)):
            return SubtreeOffer(headed.anchor, most, headed.hits.correction())
        return SubtreeOffer(self.tree.anchor, most, self.hits.correction())

    def num_ahead(self) -> int:
        """Length of the best path below the anchor, up to K."""
        return len(self.tree.proposal(self.k).token_ids)

    def pause_drafting(self) -> None:
        """Makes rounds plain until drafting is resumed."""
        self.paused, self.on_trial, self.draft_available = True, False, False

    def resume_drafting(self, now: float, *, forget: bool) -> None:
        """Allows a draft again, which ``follow_draft`` begins. ``forget``: drop the record of earlier drafts."""
        self.paused, self.on_trial, self.draft_heard = False, True, False
        self.account, self.drafting.sample, self.resumed_at = Account(), RateSample(), now
        if forget:
            self.hits.forget()

    def follow_draft(self, draft_epoch: int, context_len: int) -> None:
        """Starts a new tree for a draft that was opened with the first ``context_len`` tokens."""
        self.draft_epoch = draft_epoch
        self.tree = new_tree(self._vocab_size, context_len, rejection=self.rejection)
        self.tree.walk(self.tokens[context_len:])
        if self._outcome or self.cause is not Cause.START:
            self.cause = Cause.LATE  # whatever the old tree was: of this one nothing was there at the last outcome
        self._outcome = ()
        self.idle_context_len = self.nodes_context_len = -1
        self.draft_heard = False

    def reserve(self, cache: KVCache, num_rows: int) -> None:
        """Holds pages for rows [0, num_rows).

        Raises:
            ResourceExhaustedError: too few pages are free; nothing is changed.
        """
        missing = pages_for(num_rows) - len(self.pages)
        if missing > 0:
            self.pages.extend(cache.allocate(missing))

    def fork(self, cache: KVCache, counts: Sequence[int]) -> list[list[int]]:
        """Allocates private pages for further branches; ``counts``: the number for each.

        Raises:
            ResourceExhaustedError: too few pages are free; nothing is changed.
        """
        taken = cache.allocate(sum(counts))
        self.private_pages += taken
        rest = iter(taken)
        return [[*islice(rest, count)] for count in counts]

    def join(self, cache: KVCache, pages: Sequence[int]) -> None:
        """Goes on with the page table of one branch, and gives the pages of the others back."""
        kept = set(pages)
        cache.release([page for page in (*self.pages, *self.private_pages) if page not in kept])
        self.pages, self.private_pages = array("q", pages), []

    def attach_prefix(self, cache: KVCache) -> None:
        """Shares the pages that other sessions have computed of the same prefix."""
        assert not self.pages
        assert self.num_computed == 0
        # Rows that are still to be scored must be computed, and so must the last one in any case.
        shareable = self.tokens[: self.num_scored + 1] if self.scores_prompt else self.tokens
        pages, self.hashes = cache.match_prefix(shareable, self.root, self.num_by_library)
        self.pages = array("q", pages)
        self.num_computed = self.num_attached = len(self.pages) * PAGE_SIZE
        self.held_state = cache.hold(self.pages, self.num_computed, self.held_state)
        self.attachment += 1

    def give_way(self, cache: KVCache) -> None:
        """Releases all pages for other sessions; copies of states of linear layers stay, so that what is left of the
        pages can be hit."""
        cache.copy_states(self.pages, self.hashes)
        self.release(cache)

    def release(self, cache: KVCache) -> None:
        """Releases all pages; the context stays and can be recomputed."""
        cache.let_go(self.held_state)
        cache.release([*self.pages, *self.private_pages])
        self.held_state = NONE
        self.pages, self.private_pages, self.hashes, self.num_computed = array("q"), [], [], 0

    def commit_rows(self, cache: KVCache, num_computed: int) -> None:
        """Declares the KV of rows [0, num_computed) valid and committed; shares pages that became full."""
        self.num_computed = num_computed
        self.hold_state(cache, num_computed)
        while (len(self.hashes) + 1) * PAGE_SIZE <= num_computed:
            index = len(self.hashes)
            previous, span = (
                self.hashes[-1] if self.hashes else self.root,
                slice(index * PAGE_SIZE, (index + 1) * PAGE_SIZE),
            )
            digest = page_hash(previous, self.tokens[span], by_library=span.start < self.num_by_library)
            self.hashes.append(digest)
            cache.publish(self.pages[index], digest)

    def hold_state(self, cache: KVCache, num_computed: int) -> None:
        """Holds the last state of linear layers of rows [0, num_computed), which are the context's."""
        self.held_state = cache.hold(self.pages, num_computed, self.held_state)

    def cut(self, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """The number of verified tokens to emit, and the reason if the session ends with them."""
        room = self.max_tokens - len(self.tokens)
        if not self.stop_ids.isdisjoint(token_ids):
            for i, token_id in enumerate(token_ids[:room]):
                if token_id in self.stop_ids:
                    return i + 1, FinishReason.STOP
        num_tokens = len(token_ids)
        return (num_tokens, None) if num_tokens < room else (room, FinishReason.LENGTH)

    def check_integrity(self, *, in_flight: bool = False) -> None:
        """Asserts the invariants above. ``in_flight``: a step is computing tokens of the session."""
        assert 0 <= self.num_computed < len(self.tokens), "computed rows must be committed tokens, but not all"
        assert pages_for(self.num_computed) <= len(self.pages), "a computed row has no page"
        assert len(set(self.pages)) == len(self.pages), "a session holds a page twice"
        assert in_flight or not self.private_pages, "branches end with their step"
        assert len(flat_rows(self.pages, 0, self.num_computed)) == self.num_computed
        assert self.sampler.num_tokens == len(self.tokens), "the sampler follows the context"
        assert self.tree.context_len + len(self._outcome) == len(self.tokens), "the tree follows the context"
        self.tree.check_integrity()
