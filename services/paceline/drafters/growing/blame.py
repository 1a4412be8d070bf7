"""Errors of a drafter end the sessions at fault, and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import TypeVar

from paceline.drafters.protocol import FATAL, DrafterSessionError

Item = TypeVar("Item")
Result = TypeVar("Result")
OnFailure = Callable[[Exception, Sequence[str]], None]
"""Ends some sessions for an error."""


def call_for_each(
    call: Callable[[list[Item]], Result],
    items: list[Item],
    *,
    on_failure: OnFailure,
    session_of: Callable[[Item], str] = attrgetter("session_id"),
    alone: bool = True,
) -> list[tuple[list[Item], Result]]:
    """Calls ``call(items)``, and after an error again without the session that the error names.

    Args:
        call: an error leaves every session as it was before.
        on_failure: ends the sessions at fault.
        session_of: the id of an item's session.
        alone: an error without a name is looked for in calls for one session each; False: all sessions end.

    Returns:
        the items and the result of each call that succeeded.

    Raises:
        FATAL: the device or a rank is lost, for which no session is at fault.
    """
    try:
        return [(items, call(items))]
    except FATAL:
        raise
    except Exception as error:
        sessions = dict.fromkeys(map(session_of, items))
        if isinstance(error, DrafterSessionError) and error.session_id in sessions:
            sessions = {error.session_id: None}
        if alone and len(sessions) > 1:
            again = [[item for item in items if session_of(item) == session] for session in sessions]
        else:
            on_failure(error, [*sessions])
            again = [[item for item in items if session_of(item) not in sessions]]
    parts = (
        call_for_each(call, part, on_failure=on_failure, session_of=session_of, alone=alone) for part in again if part
    )
    return [*chain.from_iterable(parts)]
