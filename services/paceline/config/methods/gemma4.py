"""The drafter that Google publishes for each Gemma 4."""

from __future__ import annotations

from paceline.config.methods.entry import HeadMethod, Row

HEAD = HeadMethod(
    method="gemma4_assistant",
    read="paceline.drafters.heads.gemma4:read_gemma4",
    published=(
        "gemma4_assistant",
        "gemma4_unified_assistant",
    ),
    target_kv=True,
    probed=False,
    acceptance={"chat": (0.72, "Gemma 4 26B-A4B in vLLM, K = 4: 0.84, 0.60, 0.39 and 0.27 accepted at depths 1 to 4")},
    rows=(
        Row(
            name="Gemma 4's drafter",
            source="Gemma 4 (Google 2026), by the reference in transformers",
            reads="`google/gemma-4-*-it-assistant`: `gemma4_assistant`, `gemma4_unified_assistant`",
            when="the first choice for a Gemma 4: small, and without a cache of its own",
        ),
    ),
)
