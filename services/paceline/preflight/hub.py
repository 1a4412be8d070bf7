"""Tells if a checkpoint that is not on this machine could be fetched."""

from __future__ import annotations

_PATIENCE_S = 5.0


def why_not_fetched() -> str | None:
    """The reason for which nothing can be fetched from the hub now; None if it answers."""
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception as error:  # of whatever library it speaks HTTP with
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"{constants.ENDPOINT} does not answer ({reason})"
    return None
