"""EAGLE, EAGLE-3 and P-EAGLE: one layer that goes on from the target's hidden states."""

from __future__ import annotations

from paceline.config.methods.entry import HeadMethod, Row

EAGLE = HeadMethod(
    method="eagle",
    read="paceline.drafters.heads.formats:read_eagle",
    make="paceline.drafters.training.kinds:make_eagle",
    write="paceline.drafters.training.export:write_eagle",
    published=("eagle",),
    remote=True,
    page_states=1,
    acceptance={"chat": (0.6, "Spec-Bench, Vicuna-7B: 3.57 tokens a step, with trees")},
    rows=(
        Row(
            name="EAGLE",
            source="EAGLE (2401.15077), EAGLE-2 (2406.16858)",
            reads="SafeAILab's",
            when="where no EAGLE-3 exists for the target",
        ),
    ),
)
EAGLE3 = HeadMethod(
    method="eagle3",
    read="paceline.drafters.heads.formats:read_eagle3",
    make="paceline.drafters.training.kinds:make_eagle3",
    write="paceline.drafters.training.export:write_eagle3",
    published=("eagle3",),
    boundaries="many",
    remote=True,
    page_states=3,
    acceptance={"chat": (0.67, "MT-Bench, K = 3: 2.60 (Llama-3.1-8B) and 2.26 (Qwen3-8B) tokens a step")},
    rows=(
        Row(
            name="EAGLE-3",
            source="EAGLE-3 (2503.01840)",
            reads="SafeAILab's, vLLM's, the speculators library's",
            when="general text on dense targets; the format that most published heads have",
        ),
    ),
)
PEAGLE = HeadMethod(
    method="peagle",
    read="paceline.drafters.heads.formats:read_eagle3",
    make="paceline.drafters.training.kinds:make_eagle3",
    write="paceline.drafters.training.export:write_eagle3",
    published=("peagle",),
    boundaries="many",
    remote=True,
    page_states=3,
    acceptance={
        "chat": (0.65, "model card of gpt-oss-120b-p-eagle: MT-Bench, K = 5, 2.68 tokens a step"),
        "code": (0.74, "model card of gpt-oss-120b-p-eagle: HumanEval, K = 5, 3.15 tokens a step"),
    },
    rows=(
        Row(
            name="P-EAGLE",
            source="P-EAGLE (2602.01469)",
            reads="as EAGLE-3, with `mask_hidden`",
            when="as EAGLE-3, at many tokens a round: all of them come from one pass",
        ),
    ),
)
