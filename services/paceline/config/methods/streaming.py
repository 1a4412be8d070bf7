"""Speculative streaming: the target's last layers draft on rows with weights of their own."""

from __future__ import annotations

from paceline.config.methods.entry import HeadMethod, Row

HEAD = HeadMethod(
    method="speculative_streaming",
    read="paceline.drafters.heads.stream_head:read_streams",
    make="paceline.drafters.training.kinds:make_streams",
    write="paceline.drafters.training.export:write_streams",
    target_kv=True,
    target_layers=True,
    probed=False,
    open="paceline.target.mount:open_stream_head",
    load="paceline.target.mount:load_target_layers",
    memory="paceline.preflight.heads:size_of_streams",
    examine="paceline.drafters.available:of_streams",
    acceptance={"chat": (0.5, "as Medusa: all tokens of a round come from one pass")},
    rows=(
        Row(
            name="speculative streaming",
            source="speculative streaming (2402.11131)",
            reads="a head of `paceline train-head speculative_streaming`",
            when="targets of many layers, of which the last few draft with low-rank additions: all "
            "tokens come from one pass",
        ),
    ),
)
