"""Speculative streaming: the target's last layers predict several tokens at once, on extra rows of low-rank weights.

Bhendawade et al. 2024 (arXiv:2402.11131). With h_b[P] the state of the last computed position P before layer b, and
t[P+1] the anchor, stream j = 0, 1, .. is a row at position P + 1 + j::

    row j at boundary b    h_b[P] + s[j] + D U e(t[P+1])     s: an embedding of the stream, e: the target's own
    layers b .. L - 1      W x + B A x in place of W x, in every linear layer; the row sees the target's keys and values
                           of positions 0 .. P, and of streams 0 .. j
    final norm, LM head    the target's: logits of the token at P + 2 + j

One pass makes all tokens, and keeps nothing of them. Two things differ from the paper:

- Its streams are extra rows of the verification pass, and need no pass of their own. Here they run after that pass and
  read the pages that it has written. So each round reads (L - b) / L of the target's layers and the LM head once more.
  In one pass, streams could change the bits of the text, because the number of rows may decide how each row is rounded.
  Also, no row may see a row of other weights. After the pass they cannot, in any family, compiled or eager.
- Its streams do not know the anchor, which the same pass has yet to decide on. Here the anchor is known, and enters by
  a low-rank map of its embedding.

No checkpoint of the paper's authors is public. The format is ours: config.json with the keys of ``KEYS``; ``streams``
[num_streams, hidden]; ``anchor.down.weight`` (U) and ``anchor.up.weight`` (D); and of every linear layer in the
target's layers b .. L - 1 ``layers.{layer}.{its name}.down.weight`` (A) and ``.up.weight`` (B).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from paceline.drafters.heads.block import Blocks, Blockwise
from paceline.drafters.heads.module import Attend, Unrolled
from paceline.drafters.heads.partial_model import Continued
from paceline.drafters.heads.reading import HeadForm, Reading, matched_tensors, meta_model
from paceline.errors import ConfigError
from paceline.model.states import find_layers

MODEL_TYPE = "stream_head"
KEYS = ("num_target_layers", "boundary", "hidden_size", "vocab_size", "num_streams", "rank")
"""Keys of its config.json in addition to ``model_type``; all are required."""


class LowRank(nn.Module):
    """``up(down(x))``, which is nothing yet."""

    def __init__(self, width: int, rank: int, out: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., out], in the type of its own weights."""
        out: Tensor = self.up(self.down(x.to(next(self.parameters(), x).dtype)))
        return out


class StreamHead(Blockwise):
    """Streams of one target. A session keeps only the state at the boundary and the logits of the pass."""

    conditional = False
    on_target = True

    def __init__(self, linears: Mapping[str, nn.Linear], size: int, num_streams: int, rank: int, num_rows: int) -> None:
        """Makes streams that differ from the last computed position in nothing but their place.

        Args:
            linears: the linear layers that they have additions to (``linears_of``).
            size: width of the target.
            num_streams: streams that it has.
            rank: of the additions, and of the anchor's map.
            num_rows: streams that it computes, at most ``num_streams``.
        """
        super().__init__()
        self.state_size, self.num_streams, self.rank = size, num_streams, rank
        self.max_depth = self.ahead_rows = num_rows
        self.streams = nn.Parameter(torch.zeros(num_streams, size))
        self.anchor = LowRank(size, rank, size)
        self.layers = nn.Module()
        for name, linear in linears.items():
            *path, last = name.split(".")
            holder = self.layers
            for part in path:
                if part not in dict(holder.named_children()):
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.add_module(last, LowRank(linear.in_features, rank, linear.out_features))
        self._target: Continued | None = None
        self._is_streaming = False

    def run_on(self, target: Continued) -> None:
        """Makes the streams run on the target's layers. The caller must not run these layers any more."""
        for name, addition in self.layers.named_modules():
            if isinstance(addition, LowRank):
                layer, _, path = name.partition(".")
                linear = target.layers[int(layer)].get_submodule(path)
                linear.register_forward_hook(partial(self.with_addition, addition))
        self._target = target

    def with_addition(self, addition: nn.Module, linear: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Returns the output of a linear layer. In a pass of streams, adds their low-rank product to it."""
        if not self._is_streaming:
            return output
        made: Tensor = addition(args[0]).to(output.dtype)
        return output + made

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """A stream's state is its logits."""
        return state

    def ahead(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits of all streams: ``[N, ahead_rows, vocabulary]``."""
        assert self._target is not None, "streams run on the target's layers"
        anchor = self.anchor(self._target.embed(token_ids)).to(state.dtype)
        entering = (state + anchor)[:, None] + self.streams[: self.ahead_rows].to(state.dtype)
        self._is_streaming = True
        try:
            logits = self._target(entering.view(*positions.shape, -1), positions, attend)
        finally:
            self._is_streaming = False
        return logits.view(len(token_ids), self.ahead_rows, -1)

    def blocks(self, states: Tensor, token_ids: Tensor, anchors: Tensor, depths: int) -> Iterator[Tensor]:
        """See ``Blockwise``. The keys and values that the target would have are made of the states first."""
        assert self._target is not None, "streams run on the target's layers"
        batch, attend, main = len(states), Blocks(self.ahead_rows, frozenset(), anchors), Unrolled()

        def kept(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
            attend.keep(layer, key, value)
            return main(layer, query, key, value, scaling, window)

        with torch.no_grad():
            positions = torch.arange(states.shape[1], device=states.device).expand(batch, -1)
            self._target(states, positions, kept, every=False)
        rows = (anchors[:, None] + 1 + torch.arange(self.ahead_rows, device=states.device)).flatten()
        tokens, own = token_ids[:, anchors + 1].flatten(), states[:, anchors].flatten(0, 1)
        made = self.ahead(tokens, own, rows.expand(batch, -1), attend)
        made = made.view(batch, len(anchors), self.ahead_rows, -1)
        for depth in range(depths):
            yield made[:, :, depth]


def linears_of(layers: Mapping[int, nn.Module], name: str) -> dict[str, nn.Linear]:
    """The linear layers in some layers of the model ``name``, by the layer's index and the name in it.

    Raises:
        ConfigError: one of these layers has no linear layer.
    """
    found = {}
    for index, layer in layers.items():
        own = {f"{index}.{path}": part for path, part in layer.named_modules() if isinstance(part, nn.Linear)}
        if not own:
            raise ConfigError(f"layer {index} of {name} ({type(layer).__name__}) has no linear layer to add streams to")
        found.update(own)
    return found


def read_streams(reading: Reading) -> HeadForm:
    """A head of streams. Raises ConfigError as ``open_head`` does."""
    reading.require_form(MODEL_TYPE, KEYS)
    what, facts = reading.what, reading.facts
    sizes = {key: reading.integer(key) or 0 for key in KEYS}
    for key, wanted in (
        ("num_target_layers", facts.num_layers),
        ("hidden_size", facts.hidden_size),
        ("vocab_size", facts.vocab_size),
    ):
        reading.require_equal(key, sizes[key], wanted)
    boundary = sizes["boundary"]
    if not 1 <= boundary < facts.num_layers:
        raise ConfigError(
            f"boundary is {boundary} in config.json of {what}: the target {reading.target!r} has {facts.num_layers} "
            f"layers, so 1 to {facts.num_layers - 1} are allowed"
        )
    for key in ("num_streams", "rank"):
        if sizes[key] < 1:
            raise ConfigError(f"{key} is {sizes[key]} in config.json of {what}: at least 1 is needed")
    target = f"the target {reading.target!r}"
    _, layers = find_layers(meta_model(facts.checkpoint), target)
    linears = linears_of(dict(enumerate(layers[boundary:], boundary)), target)
    num_streams = sizes["num_streams"]
    module = StreamHead(
        linears, facts.hidden_size, num_streams, sizes["rank"], min(num_streams, max(1, reading.num_tokens))
    )
    names, experts = matched_tensors(reading, module, str)
    return HeadForm(module, (boundary,), names, experts)
