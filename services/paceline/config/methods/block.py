"""DFlash, DSpark and JetSpec: several layers that predict a block of tokens by one pass."""

from __future__ import annotations

from functools import partial

from paceline.config.methods.entry import HeadMethod, Row

_of_blocks = partial(
    HeadMethod,
    read="paceline.drafters.heads.block_formats:read_block",
    make="paceline.drafters.training.kinds:make_block",
    write="paceline.drafters.training.export:write_block",
    boundaries="many",
    remote=True,
    page_states=None,
)
DFLASH = _of_blocks(
    method="dflash",
    published=("dflash",),
    acceptance={
        "chat": (0.74, "DFlash 2 for Qwen3.8-27B, K = 7: 3 to 4 tokens a step of prose"),
        "code": (0.87, "2606.18394: DFlash for Qwen3-8B, K = 15: 6.9 tokens a step of mathematics, with chains"),
    },
    rows=(
        Row(
            name="DFlash, DFlash 2",
            source="DFlash (2602.06036), DFlash 2 (z-lab 2026)",
            reads="z-lab's, the speculators library's",
            when="general text where such a head exists for the target: several layers, all tokens from one pass",
        ),
    ),
)
DSPARK = _of_blocks(
    method="dspark",
    published=("dspark",),
    acceptance={"chat": (0.87, "DSpark for Kimi-K3, K = 7: 5.2 tokens a step; of texts that are not named")},
    rows=(
        Row(
            name="DSpark",
            source="DSpark (DeepSpec 2026)",
            reads="DeepSpec's, the speculators library's",
            when="as DFlash; a head that says how sure it is, and ends its proposals by that",
        ),
    ),
)
JETSPEC = _of_blocks(
    method="jetspec",
    published=("jetspec",),
    acceptance={"chat": (0.74, "as DFlash"), "code": (0.87, "as DFlash")},
    rows=(
        Row(
            name="JetSpec",
            source="JetSpec (2606.18394)",
            reads="as DFlash",
            when="as DFlash, where many rows are cheap: it is trained for trees",
        ),
    ),
)
