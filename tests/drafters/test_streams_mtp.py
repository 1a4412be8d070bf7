"""The MTP module of DeepSeek V4, which takes and recycles all residual streams: what it says is what the published one
says, and no text changes.

The oracle takes transformers' layer, computes every row anew, and knows nothing of pages.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.drafters.asked import Answer, check_head, difference, lengths_of
from tests.drafters.test_hybrid_mtp import TOKENS, requests_of, rms, run_module
from tests.model.families import checkpoint
from tests.support.compressed import (
    compressed_config,
    mtp_block,
    mtp_weights,
    published_config,
    published_parts,
    write_published,
)
from tests.support.models import letters_tokenizer
from tests.support.mutants import Mutant, mutant
from tests.support.pump import plain_reference
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.cli.drafting import choose
from paceline.drafters.heads.load import mtp_layers, open_head
from paceline.drafters.heads.mtp import StreamsModule
from paceline.drafters.heads.paged import Paged
from paceline.errors import ConfigError
from paceline.model.features import STREAMS, Features
from paceline.model.loading import LoadedModel, load_pretrained, prepare
from paceline.model.states import StateTaps

FEATURES = Features(tuple(STREAMS - stream for stream in range(4)), every_position=True)


def made() -> tuple[Any, Any]:
    """A target, and a block of its module. Both depend on the last token for the most part."""
    config = compressed_config(16, 16)  # of few index heads, scores are equal, of which transformers chooses others
    target, block = checkpoint(config), mtp_block(config)
    with torch.no_grad():
        for name, weight in (*target.named_parameters(), *block.named_parameters()):
            if any(part in name for part in ("o_b_proj", "down_proj")):
                weight *= 0.06
        target.get_input_embeddings().weight.normal_(generator=torch.Generator().manual_seed(3))
        block.model.norm.load_state_dict(target.model.norm.state_dict())
    return target, block


@functools.cache
def published() -> tuple[Any, Any, dict[str, Tensor]]:
    """Both, and the weights of the module."""
    target, block = made()
    return target, block, mtp_weights(block)


@functools.cache
def loaded() -> LoadedModel:
    return prepare(made()[0], compile=False, features=FEATURES)


def written(folder: Path) -> Checkpoint:
    """The target with its module, in one set of files."""
    target, _, weights = published()
    target.save_pretrained(folder)
    file, parts = folder / "model.safetensors", {}
    for name, tensor in weights.items():
        parts |= {part: rows.clone() for part, rows in published_parts(name, tensor).items()}
    save_file(load_file(file) | parts, file, metadata={"format": "pt"})
    letters_tokenizer().save_pretrained(folder)
    return Checkpoint.open(str(folder))


def streams_of(target: Any, tokens: Sequence[int]) -> Tensor:
    """[tokens, streams, hidden] after the last layer of transformers' model."""
    seen: list[Tensor] = []
    hook = target.model.hc_head.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    target(torch.tensor([[*tokens]]))
    hook.remove()
    return seen[0]


def oracle(tokens: Sequence[int], path: Sequence[int]) -> Tensor:
    """Logits behind a text, whose last token the target has not computed, and behind each token of a path below it."""
    target, block, w = published()
    eps, window, rows = block.config.rms_norm_eps, block.config.sliding_window, []
    text = [*tokens, *path]
    with torch.no_grad():
        streams = streams_of(target, tokens[:-1])
        for _ in range(len(path) + 1):
            count = len(streams)
            embedded = target.get_input_embeddings()(torch.tensor(text[1 : count + 1]))
            e = rms("nemotron_h", embedded, w["mtp.0.enorm.weight"], eps) @ w["mtp.0.e_proj.weight"].T
            h = rms("nemotron_h", streams, w["mtp.0.hnorm.weight"], eps) @ w["mtp.0.h_proj.weight"].T
            x, positions = (e[:, None] + h)[None], torch.arange(count)[None]
            far = torch.ones(count, count).tril().triu(1 - window) == 0
            x = block.model.layers[0](
                x,
                attention_mask=torch.zeros(count, count).masked_fill(far, -torch.inf)[None, None],
                position_embeddings={"main": block.model.rotary_emb(x, positions, layer_type="main")},
                position_ids=positions,
            )
            rows.append(target.lm_head(block.model.norm(block.model.hc_head(x[:, -1:])))[0, 0])
            streams = torch.cat([streams, x[0, -1:]])
    return torch.stack(rows)


def said_by(answer: Answer) -> Tensor:
    return oracle(answer.tokens, answer.path)[-1]


def test_it_says_what_the_published_module_says_and_no_text_changes(tmp_path: Path) -> None:
    """Prompts in chunks, shared prefixes, preemption, all depths, rejections."""
    requests, run = requests_of(1.0, 14), run_module(written(tmp_path), loaded(), pages=5)
    lengths = lengths_of(run[0])
    assert "1 MTP module" in choose(str(tmp_path)).line
    check_head(run, requests, plain_reference(loaded(), requests), said_by, TOKENS, num=24, arrivals=1.0)
    assert sum(lengths) > 1.3 * len(lengths)


def test_unrolled_it_says_the_same(tmp_path: Path) -> None:
    """As the probe at start-up asks it."""
    tokens = [*requests_of(0.0)["s3"].prompt[:24]]
    head = open_head("mtp", None, written(tmp_path)).load(torch.float32, torch.device("cpu"))
    with torch.no_grad():
        states = streams_of(published()[0], tokens[:20]).flatten(1)[None]
        said = torch.stack([each[0, -1] for each in head.module.unroll(states, torch.tensor([tokens]), 3)])
    torch.testing.assert_close(said, oracle(tokens[:21], tokens[21:23]), atol=1e-4, rtol=1e-4)


@mutant(StateTaps, "catch")
def _the_first_stream_alone(catch: Any, self: StateTaps, boundary: int, state: Tensor) -> None:
    """The head gets the first stream in the place of each."""
    whole = state._base if state._base is not None and state._base.dim() == 4 else None
    catch(self, boundary, state if whole is None else whole[:, :, 0])


@mutant(StreamsModule, "forward")
def _one_projection(forward: Any, self: StreamsModule, embedded: Tensor, state: Tensor, *rest: Any) -> Tensor:
    """States are projected as embeddings are."""
    own, self.h_proj = self.h_proj, self.e_proj
    found: Tensor = forward(self, embedded, state, *rest)
    self.h_proj = own
    return found


@mutant(StreamsModule, "collapse")
def _mean_of_streams(collapse: Any, self: StreamsModule, state: Tensor) -> Tensor:
    """The LM head reads the mean of the streams."""
    found: Tensor = self.norm(state.view(*state.shape[:-1], 4, -1).mean(-2))
    return found


@mutant(Paged, "with_sinks")
def _without_sinks(with_sinks: Any, self: Paged, sinks: Tensor) -> Paged:
    return self


@mutant(Paged, "__call__")
def _without_a_window(attend: Any, self: Paged, *given: Any, **options: Any) -> Tensor:
    found: Tensor = attend(self, *given[:-1], None, **options)
    return found


@pytest.mark.parametrize(
    "change", [_the_first_stream_alone, _one_projection, _mean_of_streams, _without_sinks, _without_a_window]
)
def test_mistakes_are_noticed(change: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    pump, _, asked = run_module(written(tmp_path), loaded())
    pump.run({"s1": requests_of(1.0, 8)["s1"]})
    assert difference(asked, said_by, 8) > 1e-3


def test_a_published_module_is_dequantized(tmp_path: Path) -> None:
    """Each of its weights is what its format means; the target is loaded without it."""
    means = write_published(tmp_path, published_config(), mtp=True)
    found = Checkpoint.open(str(tmp_path))
    assert mtp_layers(found) == 1
    plan = open_head("mtp", None, found)
    state = plan.load(torch.float32, torch.device("cpu")).module.state_dict()
    expected = {
        "modules_by_depth.0." + (name if re_own(name) else f"block.{name}"): mean
        for key, mean in means.items()
        if (name := key.removeprefix("mtp.0.")) != key
    }
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[name].float(), rtol=1e-6, atol=0)
    assert load_pretrained(found, torch.float32).state_dict().keys() == {n for n in means if not n.startswith("mtp.")}


def re_own(name: str) -> bool:
    """True for a weight of the module that is not its layer's."""
    return name.split(".")[0] in ("enorm", "hnorm", "norm", "e_proj", "h_proj", "hc_head")


def test_a_module_of_another_kind_is_refused(tmp_path: Path) -> None:
    """DSpark's blocks have the same names, and none of the projections."""
    write_published(tmp_path, published_config(), mtp=True)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    more = weights | {"mtp.0.markov_head.markov_w1.weight": torch.zeros(2, 2)}
    save_file(more, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"holds 'mtp\.0\.markov_head\.markov_w1\.weight', which its format does not"):
        open_head("mtp", None, Checkpoint.open(str(tmp_path)))
    save_file({name: tensor for name, tensor in weights.items() if "e_proj" not in name}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="has no MTP layers"):
        open_head("mtp", None, Checkpoint.open(str(tmp_path)))
    assert "MTP" not in choose(str(tmp_path)).line


def test_other_boundaries_have_no_one_state() -> None:
    """Heads that read states between layers are refused, and streams of models that have one."""
    with pytest.raises(ConfigError, match=r"instead of one hidden state of \(1, "):
        prepare(made()[0], compile=False, features=Features((1,), every_position=True))
    with pytest.raises(ConfigError, match="-6 is outside of"):
        prepare(made()[0], compile=False, features=Features((STREAMS - 4,), every_position=True))
