"""PARD checkpoints: causal language models that predict several tokens at once (An et al. 2025, arXiv 2504.18583).

The *pard token* is appended K - 1 times to the last token; the K rows of one forward are the distributions of the K
tokens that follow. ``config.json`` names the token, ``pard_token``, together with ``spd_type: "pard"``.
"""

from __future__ import annotations

from paceline.checkpoint.files import Checkpoint
from paceline.errors import ConfigError

DEFAULT_TOKENS = 8
"""Default number of tokens per forward: the number that the published models were adapted to."""


def parallel_draft(checkpoint: Checkpoint, wanted: int | None) -> tuple[int, int]:
    """Returns (tokens that a draft model predicts at once, placeholder token id); (1, 0) if it predicts one at a time.

    ``wanted``: the configured number; None: 8 of a PARD checkpoint, 1 of any other.

    Raises:
        ConfigError: its configuration is not PARD's, or it has none and ``wanted`` is more than 1.
    """
    token, kind = checkpoint.config.get("pard_token"), checkpoint.config.get("spd_type")
    if kind is not None and kind != "pard":
        raise ConfigError(f"spd_type of {checkpoint.path!r} is {kind!r}: only 'pard' is known")
    if token is None:
        if kind is not None:
            raise ConfigError(f"pard_token of {checkpoint.path!r} is missing with spd_type {kind!r}: it is needed")
        if (wanted or 1) > 1:
            raise ConfigError(
                f"parallel_tokens is {wanted}: the config.json of {checkpoint.path!r} names no pard_token, so that "
                "only 1 is allowed"
            )
        return 1, 0
    if type(token) is not int or not 0 <= token < checkpoint.vocab_size:
        raise ConfigError(
            f"pard_token of {checkpoint.path!r} is {token!r}: a token id in [0, {checkpoint.vocab_size}) is needed"
        )
    return (1, 0) if wanted == 1 else (wanted or DEFAULT_TOKENS, token)
