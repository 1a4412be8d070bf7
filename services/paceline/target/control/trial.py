"""The rules of all trials: when an account is judged, how long what has lost pauses, and what trials may cost.

A session's draft (``session_gate.py``), a head at a load (``head_gate.py``) and drafting at a load (``load_trials.py``)
are each compared with what the target does without them. One rule decides how long the loser waits for its next trial:
twice as long after each failure in a row, and until the last trial's loss is a small share of the time.
"""

from __future__ import annotations

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 64.0
WORTH = 1.04
"""Speedup over plain decoding from which drafting for many sessions is worth its uncertainty."""
TRIAL_SHARE = 0.01
"""Share of the time that the trials of one kind may lose."""
TRIAL_LIMIT_S = 3.0
"""Time for a draft to send its first tokens in a trial."""
_LONGEST_REPAY_S = 256.0
WINDOW, LONG_WINDOW = 32, 64
"""Rounds after which a session's account is judged, and steps of a head's, which sums many sessions."""
_TRIAL_WINDOW, _SHORT_WINDOW = 16, 8
"""The same of an account on trial; and of one that loses much."""
_COSTLY = -4.0
"""Net tokens of an account that loses much."""


def is_due(rounds: int, net: float, *, on_trial: bool, window: int = WINDOW) -> bool:
    """True if an account is judged now. ``net``: tokens gained, less the tokens lost, in its ``rounds``."""
    return rounds >= (_TRIAL_WINDOW if on_trial else window) or (rounds >= _SHORT_WINDOW and net < _COSTLY)


def pause_s(num_failures: int, loss_s: float = 0.0, first_s: float = FIRST_PAUSE_S) -> float:
    """Seconds until the next trial.

    Args:
        num_failures: failures in a row; ``first_s`` doubles with each after the first one, up to 64 s.
        loss_s: seconds that the last trial has lost. Its pause repays them.
        first_s: pause after the first failure.
    """
    doubled_s = min(LONGEST_PAUSE_S, first_s * 2.0 ** max(0, num_failures - 1))
    return max(doubled_s, min(_LONGEST_REPAY_S, loss_s / TRIAL_SHARE))
