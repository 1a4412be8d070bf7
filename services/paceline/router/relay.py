"""The relay between targets and drafts: sessions by id, and what their engines' messages mean for them.

Sans-IO: no loop, no lock, no clock. Its owner (``Router``, the tests' ``Pump``) decides who sends an
outbox, when, and what "another target" is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.messages import FromDraft, FromTarget, SpeculationWanted, ToDraft, ToTarget
from paceline.router.session import Actions, Session


@dataclass(slots=True)
class Outbox:
    """Consequences of one batch of messages, in the order in which the owner carries them out."""

    to_target: list[ToTarget] = field(default_factory=list)
    to_draft: list[ToDraft] = field(default_factory=list)
    touched: dict[str, Session] = field(default_factory=dict)
    """Sessions that had a message in the batch. Call ``digest`` on them when the messages above have been sent."""
    refused: dict[str, str] = field(default_factory=dict)
    """Sessions whose requests are at fault, with the reason."""
    target_failed: dict[str, str] = field(default_factory=dict)
    """Sessions that cannot go on at their target, with the reason: re-open each on another target or give it up."""
    turned_away: set[str] = field(default_factory=set)
    """Sessions that their target does not take now: re-open each on another target, or later."""
    draft_wanted: list[Session] = field(default_factory=list)
    """Sessions that have no draft and can use one: call ``on_draft_up`` where there is one."""
    wish: SpeculationWanted | None = None
    """Latest preference of the target's controller for a session. Its number of sessions holds for the whole target."""
    num_dropped: int = 0
    """Messages for sessions that are unknown here, or whose target failed earlier in the batch."""


class Relay:
    """The sessions of one owner. Not thread-safe: the owner serializes the calls."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        """Open sessions by id; the owner adds and removes them."""

    def on_target(self, messages: Sequence[FromTarget]) -> Outbox:
        """Relays a batch of a target's messages: outcomes become commits for the drafts."""
        outbox = Outbox()
        sessions, touched, failed = self.sessions, outbox.touched, outbox.target_failed
        actions = Actions(outbox.to_target, outbox.to_draft)  # of all messages; what ends one session is taken out
        drafts_missing = False
        for message in messages:
            session_id = message.session_id
            session = sessions.get(session_id)
            if session is None or session_id in failed or session_id in outbox.turned_away:
                outbox.num_dropped += 1
                continue
            touched[session_id] = session
            session.on_target(message, actions)
            if isinstance(message, SpeculationWanted):
                outbox.wish = message
            if actions.refused is not None:
                outbox.refused[session_id], actions.refused = actions.refused, None
            if actions.target_failed is not None:
                failed[session_id], actions.target_failed = actions.target_failed, None
            if actions.turned_away:
                outbox.turned_away.add(session_id)
                actions.turned_away = False
            if not session.draft_available:
                drafts_missing = True
        if drafts_missing:
            _note_drafts_wanted(outbox)
        return outbox

    def on_draft(self, messages: Sequence[FromDraft]) -> Outbox:
        """Relays a batch of a draft's messages: nodes go to the targets unchanged."""
        outbox = Outbox()
        sessions, touched, actions = self.sessions, outbox.touched, Actions(outbox.to_target)
        drafts_missing = False
        for message in messages:
            session_id = message.session_id
            session = sessions.get(session_id)
            if session is None:
                outbox.num_dropped += 1
                continue
            touched[session_id] = session
            session.on_draft(message, actions)
            if not session.draft_available:
                drafts_missing = True
        if drafts_missing:
            _note_drafts_wanted(outbox)
        return outbox


def _note_drafts_wanted(outbox: Outbox) -> None:
    for session_id, session in outbox.touched.items():
        if (
            not session.draft_available
            and session.wants_draft
            and session_id not in outbox.target_failed
            and session_id not in outbox.refused
            and session_id not in outbox.turned_away
        ):
            outbox.draft_wanted.append(session)
