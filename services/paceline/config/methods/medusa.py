"""Medusa: heads that each predict one of the next tokens from the last hidden state."""

from __future__ import annotations

from paceline.config.methods.entry import HeadMethod, Row

HEAD = HeadMethod(
    method="medusa",
    read="paceline.drafters.heads.formats:read_medusa",
    make="paceline.drafters.training.kinds:make_medusa",
    write="paceline.drafters.training.export:write_medusa",
    published=("medusa",),
    acceptance={"chat": (0.5, "Spec-Bench, Vicuna-7B: 2.31 tokens a step, with trees")},
    rows=(
        Row(
            name="Medusa",
            source="Medusa (2401.10774)",
            reads="FasterDecoding, Medusa 2 without LM heads, vLLM's blocks",
            when="where such heads exist for the target; the cheapest ones to train",
        ),
    ),
)
