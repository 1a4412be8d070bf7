"""MLP speculators: a small network for each of the next tokens, after the last hidden state and the tokens before."""

from __future__ import annotations

from paceline.config.methods.entry import HeadMethod, Row

HEAD = HeadMethod(
    method="mlp_speculator",
    read="paceline.drafters.heads.formats:read_mlp",
    make="paceline.drafters.training.kinds:make_mlp",
    write="paceline.drafters.training.export:write_mlp",
    published=(
        "mlpspeculator",
        "mlp_speculator",
    ),
    acceptance={"chat": (0.5, "as Medusa")},
    rows=(
        Row(
            name="MLP speculator",
            source="MLP speculators (2404.19124)",
            reads="IBM's, tied or not",
            when="where such heads exist for the target: the Granite and Llama families",
        ),
    ),
)
