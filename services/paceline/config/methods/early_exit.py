"""Early exits: the first layers of the target draft for it."""

from __future__ import annotations

from paceline.config.methods.entry import HeadMethod, Row

HEAD = HeadMethod(
    method="early_exit",
    read="paceline.drafters.heads.exit_adapter:read_exit",
    make="paceline.drafters.training.kinds:make_exit",
    write="paceline.drafters.training.export:write_exit",
    model="optional",
    boundaries="one",
    target_kv=True,
    target_layers=True,
    probed=False,
    open="paceline.target.mount:open_exit_head",
    load="paceline.target.mount:load_target_layers",
    memory="paceline.preflight.heads:size_of_exit",
    examine="paceline.drafters.available:of_exit",
    acceptance={"chat": (0.62, "the embedded target, not trained for it, layer 6 of 8: 1.41 of 4 tokens accepted")},
    rows=(
        Row(
            name="early exit",
            source="LayerSkip (2404.16710)",
            reads="",
            when="targets that were trained for it, with layer dropout and an exit loss; no weights of its own",
            options={"boundaries": [6]},
        ),
        Row(
            name="early exit, trained",
            source="Kangaroo (2404.18911)",
            reads="an exit head of `paceline train-head early_exit`",
            when="targets that were not trained to exit early: a small adapter is, and nothing of the target changes",
        ),
    ),
)
