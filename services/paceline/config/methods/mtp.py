"""MTP: the modules for multi-token prediction that some targets come with."""

from __future__ import annotations

from paceline.config.methods.entry import HeadMethod, Row

HEAD = HeadMethod(
    method="mtp",
    read="paceline.drafters.heads.formats:read_mtp",
    make="paceline.drafters.training.kinds:make_mtp",
    write="paceline.drafters.training.export:write_mtp",
    model="optional",
    remote=True,
    page_states=1,
    memory="paceline.preflight.heads:size_of_mtp",
    acceptance={"chat": (0.7, "one module used for 7 tokens: 3.20 tokens a step")},
    rows=(
        Row(
            name="MTP",
            source="DeepSeek-V3 (2412.19437)",
            own_files=True,
            reads="the target's own files: DeepSeek (V4 as well), GLM, Qwen; or a folder of its modules alone",
            when="the first choice where the target comes with such modules",
        ),
    ),
)
