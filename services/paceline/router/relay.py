"""Messages to a draft, put together: one message per step and session instead of two."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.router.session import ToDraft
from paceline.types import Commit


def append_commits(to_draft: list[ToDraft], new: Sequence[ToDraft]) -> None:
    """Appends, merging "what is in flight now" into the commit just before it.

    Only the last message is looked at per session: sessions of one batch come one after the other.
    """
    for message in new:
        last = to_draft[-1] if to_draft else None
        if (
            isinstance(message, Commit)
            and isinstance(last, Commit)
            and not message.token_ids
            and (last.session_id, last.epoch) == (message.session_id, message.epoch)
        ):
            to_draft[-1] = Commit(last.session_id, last.epoch, last.context_len, last.token_ids, message.in_flight)
        else:
            to_draft.append(message)
