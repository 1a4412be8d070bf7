"""Published heads: every format loads, computes what a plain oracle computes, and is refused when it does not fit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.drafters.head_files import DRAFT, FILES, LAYERS, SIZE, VOCAB, HeadFile, made, write_target
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from paceline.checkpoint.files import Checkpoint
from paceline.core.processors import SamplerState
from paceline.drafters.heads import paged
from paceline.drafters.heads.eagle import Eagle, Eagle3
from paceline.drafters.heads.load import mtp_layers, open_head
from paceline.drafters.heads.mtp import Mtp
from paceline.drafters.protocol import Fed, Leaf
from paceline.errors import ConfigError
from paceline.model.kv_cache import KVCache
from paceline.model.loading import prepare
from paceline.model.step_plan import SequenceStep
from paceline.types import SamplingParams

DEPTHS, LENGTH = 3, 13
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """A written target of each family, and the tables that heads share with it."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("llama", "qwen3")}
    return {kind: (folder, write_target(folder, kind)) for kind, folder in folders.items()}


class Loaded:
    """A written checkpoint of a head, loaded for its target."""

    def __init__(self, file: HeadFile, folder: Path, targets: dict) -> None:
        self.file, self.folder = file, file.write(folder)
        target, self.tables = targets[file.target]
        source = None if file.method == "mtp" else str(folder)
        checkpoint = Checkpoint.open(str(folder if file.method == "mtp" else target))
        self.plan = open_head(file.method, source, checkpoint, num_tokens=DEPTHS)
        self.head = self.plan.load(torch.float32, CPU, num_candidates=VOCAB)
        self.width = SIZE * len(self.plan.features.boundaries)
        generator = torch.Generator().manual_seed(3)
        self.states = torch.randn(LENGTH - 1, self.width, generator=generator)
        self.tokens = torch.randint(VOCAB, (LENGTH + DEPTHS - 1,), generator=generator).tolist()

    def oracle(self) -> Tensor:
        """[depths, draft vocabulary], by the plain lines over the tensors as they were written."""
        tables = self.tables
        if self.file.method == "mtp":
            tables = {
                "embed": self.file.tensors["model.embed_tokens.weight"],
                "lm_head": self.file.tensors["lm_head.weight"],
            }
        return self.file.oracle(self.file.tensors, self.file.config, tables, self.states, self.tokens)

    def logits(self) -> Tensor:
        """[depths, draft vocabulary] of the loaded module."""
        with torch.no_grad():
            rows = self.head.module.unroll(self.states[None], torch.tensor([self.tokens]), DEPTHS)
            return torch.stack([logits[0, -1] for logits in rows])

    def served(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Candidates of the anchor and of the nodes below it through sessions and pages, fed in chunks."""
        head, pages = self.head, [2, 0]
        head.bind(KVCache(head.layers, 3, dtype, CPU), 0)
        sampler = SamplerState(SamplingParams(temperature=1.0), 1, self.tokens[:LENGTH], vocab_size=VOCAB)
        head.open("s", self.tokens[:LENGTH], sampler)
        start, random_ = 0, random.Random(2)
        while start < LENGTH - 1:
            stop = min(LENGTH - 1, start + random_.randint(1, 5))
            head.feed([Fed("s", start, tuple(self.tokens[start + 1 : stop + 1]), self.states[start:stop], pages)])
            start = stop
        drafted = self.tokens[LENGTH:]
        found = [
            head.expand([Leaf("s", depth, tuple(range(1, depth + 1)), tuple(drafted[:depth]))])
            for depth in range(DEPTHS)
        ]
        return torch.cat([f.token_ids for f in found]), torch.cat([f.log_q for f in found])


def differs(loaded: Loaded) -> float:
    """The largest difference of a logit from the oracle's."""
    return float((loaded.logits().clamp(min=-99) - loaded.oracle().clamp(min=-99)).abs().max())


@pytest.mark.parametrize("name", FILES)
def test_every_published_format_loads_and_computes_what_the_oracle_computes(
    name: str, tmp_path: Path, targets: dict
) -> None:
    file = made(name)
    loaded = Loaded(file, tmp_path / name, targets)
    assert sum(path.stat().st_size for path in (tmp_path / name).iterdir()) < 1_000_000
    assert loaded.plan.features.boundaries == file.boundaries
    assert loaded.plan.features.every_position == bool(loaded.plan.layers)
    oracle = loaded.oracle()
    torch.testing.assert_close(loaded.logits(), oracle, atol=1e-4, rtol=1e-4)
    ids, log_q = loaded.served()
    wanted = torch.full((DEPTHS, VOCAB), float("-inf"))
    wanted[:, file.target_ids] = oracle.log_softmax(-1)
    got = torch.full((DEPTHS, VOCAB), float("-inf")).scatter(1, ids, log_q)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


GOLDEN = {
    "mlp": [[0.43583, 0.36021, -0.66408], [0.39454, -0.27044, 0.61462], [0.73649, -0.38945, -0.23582]],
    "mlp_tied": [[-0.30855, 0.99315, -0.58212], [-1.07493, 2.31007, -1.37932], [-0.95584, 1.60234, 0.30605]],
    "eagle_bias": [[0.03618, -0.25825, 0.09371], [-0.08384, -0.11606, 0.02456], [0.15131, -0.24727, -0.19365]],
    "eagle": [[-0.06204, -0.12309, 0.05803], [-0.12131, -0.11646, -0.0759], [0.0135, -0.25981, -0.22092]],
    "eagle3": [[0.15326, 0.74746, -0.32838], [0.25485, 1.03264, 0.20186], [0.76403, 1.33559, 0.29225]],
    "eagle3_speculators": [[1.31585, -0.74271, 0.10149], [0.80993, -1.00442, 0.56866], [0.68831, -1.35016, 0.67752]],
    "eagle3_norm_output": [[0.15326, 0.74746, -0.32838], [0.01457, 0.85782, 0.12585], [0.51485, 0.8371, 0.03401]],
    "peagle": [[1.80324, -1.02162, -0.75789], [-1.79558, 0.33171, 0.1332], [-1.55249, 0.16662, -0.17753]],
    "peagle_speculators": [[1.02284, 0.48366, -1.05904], [0.26878, -0.0315, -0.34143], [0.47203, -0.05692, -0.43033]],
    "dflash": [[0.07986, 0.02523, -0.02727], [0.06648, 0.01951, -0.05428], [0.10174, -0.01641, -0.06825]],
    "dflash2_speculators": [[-math.inf] * 3, [-math.inf, 1.07213, -math.inf], [2.01217, -0.87283, -math.inf]],
    "dspark_speculators": [[1.20578, 0.72906, 0.45386], [0.78319, -0.02746, 1.10549], [0.54799, -0.39324, 0.01248]],
    "mtp_qwen": [[-0.12598, -0.0908, -0.01293], [0.00101, 0.01627, 0.02373], [-0.10786, 0.09767, -0.10392]],
}
"""The first logits of three recurrent steps by the authors' own code on the same files: MLP by fms-extras, EAGLE-1 and
EAGLE-3 by SafeAILab's cnets1.py and cnets.py, DFlash by z-lab's model.py, the others by speculators 0.9.0. All of their
logits were within 1e-5 of the modules'."""


@pytest.mark.parametrize("name", GOLDEN)
def test_logits_are_those_of_the_authors_code(name: str, tmp_path: Path, targets: dict) -> None:
    logits = Loaded(made(name), tmp_path, targets).logits()[:, :3]
    torch.testing.assert_close(logits, torch.tensor(GOLDEN[name]), atol=2e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------- mutants


def swapped(weight: Tensor) -> Tensor:
    """[state; embedding] in place of [embedding; state]."""
    return torch.cat(weight.chunk(2, 1)[::-1], 1)


def swap_inputs(head: Loaded) -> None:
    module = head.head.module
    if isinstance(module, Eagle3):
        attention = module.layers[0].self_attn
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    else:
        parts = [module.fc if isinstance(module, Eagle) else module.modules_by_depth[0].eh_proj]
    for part in parts:
        part.weight.data = swapped(part.weight.data)


def without(path: str) -> Callable[[Loaded], None]:
    """The norm of this name is skipped."""
    return lambda head: head.head.module.set_submodule(path, nn.Identity())


def doubled(path: str) -> Callable[[Loaded], None]:
    """The norm of this name is applied twice."""

    def mutate(head: Loaded) -> None:
        norm = head.head.module.get_submodule(path)
        head.head.module.set_submodule(path, nn.Sequential(norm, norm))

    return mutate


def recycle_before_norm(head: Loaded) -> None:
    module = head.head.module
    assert isinstance(module, Mtp)
    norm, logits = module.modules_by_depth[0].norm, module.logits
    module.modules_by_depth[0].norm = nn.Identity()
    module.logits = lambda state, depth: logits(norm(state), depth)


def recycle_after_norm(head: Loaded) -> None:
    module = head.head.module
    assert isinstance(module, Eagle3)
    step, logits = module.step, module.logits
    module.step = lambda *args: module.norm(step(*args))
    module.logits = lambda state, depth: module.lm_head(state)
    assert logits is not None


def recycle_the_raw_state(head: Loaded) -> None:
    module = head.head.module
    assert isinstance(module, Eagle3)
    module.form = replace(module.form, norm_output=False)


def norm_before_residual(head: Loaded) -> None:
    module = head.head.module
    assert isinstance(module, Eagle3)
    module.form = replace(module.form, norm_before_residual=not module.form.norm_before_residual)


def layer_norm(head: Loaded) -> None:
    module = head.head.module
    for index, ln in enumerate(module.ln):
        other = nn.LayerNorm(len(ln.weight), eps=1e-6)
        other.weight, other.bias = ln.weight, ln.bias
        module.ln[index] = other


def unscaled(head: Loaded) -> None:
    head.head.module._scale_input = False


def drop_bias(head: Loaded) -> None:
    head.head.module.fc.bias = None


def ignore_embedding(head: Loaded) -> None:
    table = head.tables["embed"]
    head.head.module._embed = lambda ids: table[ids]


def ignore_lm_head(head: Loaded) -> None:
    table = head.tables["lm_head"]
    head.head.module._lm_head = lambda x: x @ table.T


def next_row(head: Loaded) -> None:
    """A head of all depths in one pass whose rows are read one too late."""
    logits = head.head.module.logits
    head.head.module.logits = lambda state, depth: logits(state.roll(-1, -2), depth)


def next_head(head: Loaded) -> None:
    logits = head.head.module.logits
    head.head.module.logits = lambda state, depth: logits(state, depth + 1)


def block_form(**changes: object) -> Callable[[Loaded], None]:
    """A block head of another form."""

    def mutate(head: Loaded) -> None:
        head.head.module.form = replace(head.head.module.form, **changes)

    return mutate


def without_mask_state(head: Loaded) -> None:
    """The state of the places that the target has not computed is nothing."""
    head.head.module.mask_hidden.data.zero_()


def token_before_the_mask(head: Loaded) -> None:
    head.head.module.mask_token_id -= 1


def rows_at_one_position(head: Loaded) -> None:
    """Every depth is rotated by the position of the anchor."""
    step = head.head.module.step
    head.head.module.step = lambda ids, state, at, attend, depth: step(ids, state, at - depth, attend, depth)


def without_residual(head: Loaded) -> None:
    """Of a Medusa head, what its block adds to the state alone."""
    module = head.head.module
    for depth in range(module.num_variants):
        module.get_submodule(f"{depth}.0").register_forward_hook(lambda _, args, out: out - args[0])


def other_mask(head: Loaded) -> None:
    """Rows see the whole block where they saw those before them, or the other way round."""
    module = head.head.module
    module.bidirectional = frozenset(range(len(module.layers))) - module.bidirectional


def without_windows(head: Loaded) -> None:
    for layer in head.head.module.layers:
        layer.window = None


def rows_late(head: Loaded) -> None:
    """The rows of the block are rotated by positions one too late."""
    ahead = head.head.module.ahead
    head.head.module.ahead = lambda ids, state, positions, attend: ahead(ids, state, positions + 1, attend)


def stale_states(head: Loaded) -> None:
    """The newest state is that of the position before it."""
    step = head.head.module.step
    head.head.module.step = lambda ids, state, *rest: step(ids, torch.cat([state[:, :1], state[:, :-1]], 1), *rest)


def token_one_late(head: Loaded) -> None:
    """The Markov chain and the selector take the token before the one that is before the predicted one."""
    predict = head.head.module.predict
    head.head.module.predict = lambda state, ids, depth: predict(state, ids.roll(1, -1), depth)


def convolution_of_the_future(head: Loaded) -> None:
    for layer in head.head.module.layers:
        layer.attention_conv.base_kernel.data = layer.attention_conv.base_kernel.data.flip(1)


MUTANTS = {
    "eagle: state before embedding": ("eagle_bias", swap_inputs),
    "eagle: bias dropped": ("eagle_bias", drop_bias),
    "eagle: own embedding ignored": ("eagle_bias", ignore_embedding),
    "eagle3: state before embedding": ("eagle3", swap_inputs),
    "eagle3: last norm skipped": ("eagle3", without("norm")),
    "eagle3: state not normed": ("eagle3", without("layers.0.hidden_norm")),
    "eagle3: embedding normed twice": ("eagle3", doubled("layers.0.input_layernorm")),
    "eagle3: recycled after the norm": ("eagle3", recycle_after_norm),
    "eagle3: residual of the normed state": ("eagle3", norm_before_residual),
    "eagle3: residual of the raw state": ("eagle3_norm_before_residual", norm_before_residual),
    "eagle3: recycled before the norm, where it is after it": ("eagle3_norm_output", recycle_the_raw_state),
    "eagle3: no norm before fc": ("eagle3_norm_before_fc", without("input_norm")),
    "eagle3: no norm of one boundary": ("eagle3_fc_norm", without("fc_norm.1")),
    "eagle3: own embedding ignored": ("eagle3_layers", ignore_embedding),
    "peagle: rows one too late": ("peagle", next_row),
    "peagle: rows at one position": ("peagle", rows_at_one_position),
    "peagle: stale states": ("peagle", stale_states),
    "peagle: no state of the mask": ("peagle", without_mask_state),
    "peagle: another token than the mask's": ("peagle", token_before_the_mask),
    "mtp: state before embedding": ("mtp_deepseek", swap_inputs),
    "mtp: last norm skipped": ("mtp_deepseek", without("modules_by_depth.0.norm")),
    "mtp: last norm twice": ("mtp_deepseek", doubled("modules_by_depth.0.norm")),
    "mtp: state normed twice": ("mtp_deepseek", doubled("modules_by_depth.0.hnorm")),
    "mtp: recycled before the norm": ("mtp_deepseek", recycle_before_norm),
    "mtp: own tables ignored: embedding": ("mtp_own_tables", ignore_embedding),
    "mtp: own tables ignored: LM head": ("mtp_own_tables", ignore_lm_head),
    "mlp: LayerNorm": ("mlp", layer_norm),
    "mlp: input not scaled": ("mlp_tied", unscaled),
    "medusa: heads one too far": ("medusa_v1", next_head),
    "medusa: stale states": ("medusa_v1", stale_states),
    "medusa: no residual": ("medusa_v1", without_residual),
    "dflash: the anchor's row": ("dflash", block_form(first_row=0)),
    "dspark: the row behind the anchor's": ("dspark", block_form(first_row=1)),
    "dflash: state not normed": ("dflash", without("hidden_norm")),
    "dflash: last norm skipped": ("dflash", without("norm")),
    "dflash: rows see those before them only": ("dflash", other_mask),
    "jetspec: rows see the whole block": ("jetspec", other_mask),
    "jetspec: rows one position late": ("jetspec", rows_late),
    "jetspec: stale states": ("jetspec", stale_states),
    "jetspec: the row before": ("jetspec", block_form(first_row=0)),
    "dflash: windows of the speculators library open": ("dflash_speculators", other_mask),
    "dflash: no windows": ("dflash_windows", without_windows),
    "dflash: rows one position late": ("dflash", rows_late),
    "dflash: stale states": ("dflash", stale_states),
    "dflash: embedding of the mask ignored": ("dflash_windows", block_form(own_mask=False)),
    "dflash 2: kernels reversed": ("dflash2", convolution_of_the_future),
    "dflash 2: no selector": ("dflash2", block_form(selector=None)),
    "dflash 2: selector by another token": ("dflash2", token_one_late),
    "dflash 2: embedding not scaled": ("dflash2", block_form(embedding_scale=1.0)),
    "dspark: no chain": ("dspark", block_form(markov=None)),
    "dspark: chain by another token": ("dspark", token_one_late),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_mistake_is_no_longer_what_the_oracle_computes(name: str, tmp_path: Path, targets: dict) -> None:
    file, mutate = MUTANTS[name]
    loaded = Loaded(made(file), tmp_path, targets)
    assert differs(loaded) < 1e-4
    mutate(loaded)
    assert differs(loaded) > 1e-2


def test_interleaved_rotation_is_not_what_the_oracle_computes(
    tmp_path: Path, targets: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(made("eagle3"), tmp_path, targets)

    def interleaved(x: Tensor) -> Tensor:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)

    monkeypatch.setattr(modeling_llama, "rotate_half", interleaved)
    assert differs(loaded) > 1e-2


@pytest.mark.parametrize("name", ["eagle3", "mtp_deepseek"])
def test_a_chunk_whose_last_row_has_the_targets_guess_and_rows_that_are_not_overwritten_are_noticed(
    name: str, tmp_path: Path, targets: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(made(name), tmp_path, targets)
    right = loaded.served()
    feed = loaded.head.feed

    def guessed(fed: list[Fed]) -> None:
        last = [each.position + len(each.token_ids) == LENGTH - 1 for each in fed]
        guess = [each.token_ids if end else (*each.token_ids[:-1], 5) for each, end in zip(fed, last, strict=True)]
        feed([replace(each, token_ids=ids) for each, ids in zip(fed, guess, strict=True)])

    monkeypatch.setattr(loaded.head, "feed", guessed)
    assert not same(loaded.served(), right)
    monkeypatch.undo()
    assert same(loaded.served(), right)
    placed = paged.rows_to_write
    monkeypatch.setattr(paged, "rows_to_write", lambda part: placed(part)[-1:])
    assert not same(loaded.served(), right)


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    """True if two sets of candidates have the same probabilities."""
    rows = [torch.zeros(DEPTHS, VOCAB).scatter(1, ids, log_q.exp()) for ids, log_q in (a, b)]
    return torch.allclose(*rows, atol=1e-5)


@pytest.mark.parametrize("shift", [0, 1, -1])
def test_states_of_the_target_are_those_of_the_named_boundaries(shift: int, tmp_path: Path, targets: dict) -> None:
    """The project's own runner hands the head the states that transformers numbers the same way, and no others."""
    file = made("eagle3_norm_before_fc")
    loaded = Loaded(file, tmp_path, targets)
    model = LlamaForCausalLM.from_pretrained(targets["llama"][0]).eval()
    seen: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    text = loaded.tokens[: LENGTH - 1]
    with torch.no_grad():
        hidden = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        loaded.states = torch.cat([seen[0] if b == LAYERS else hidden[b] for b in file.boundaries], -1)[0]
        wanted = loaded.oracle()
    shifted = tuple(min(b + shift, LAYERS) for b in file.boundaries)
    runner = prepare(model, compile=False, features=replace(loaded.plan.features, boundaries=shifted)).runner(2)
    step = SequenceStep(text, range(len(text)), range(len(text)), [0], 0)
    _, loaded.states = runner.forward_with_states([step])
    found = (loaded.logits() - wanted).abs().max()
    assert found < 1e-4 if shift == 0 else found > 1e-2


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d2t: d2t + torch.arange(DRAFT), "d2t . index of .* must be distinct ids of the target's 61 tokens"),
        (lambda d2t: d2t * 0, "d2t and t2d of .* name different tokens"),
        (lambda d2t: -torch.arange(DRAFT), "must be distinct ids"),
    ],
    ids=["absolute ids", "no offsets", "one token"],
)
def test_a_draft_vocabulary_that_is_none_is_refused(
    change: Callable[[Tensor], Tensor], message: str, tmp_path: Path, targets: dict
) -> None:
    file = made("eagle3")
    file.tensors["d2t"] = change(file.tensors["d2t"])
    with pytest.raises(ConfigError, match=message):
        Loaded(file, tmp_path, targets)


def test_files_that_are_none_are_refused(tmp_path: Path, targets: dict) -> None:
    target = Checkpoint.open(str(targets["llama"][0]))

    def refused(message: str, source: Path = tmp_path) -> None:
        with pytest.raises(ConfigError, match=message):
            open_head("medusa", str(source), target)

    with pytest.raises(ConfigError, match=r"method is 'hydra': dflash, .* are allowed"):
        open_head("hydra", str(tmp_path), target)
    refused("does not exist", tmp_path / "none")
    refused("holds no weights: model, pytorch_model, medusa_lm_head with")
    path = tmp_path / "medusa_lm_head.pt"
    torch.save({"0.0.linear.weight": [1]}, path)
    refused("holds something other than named tensors")
    torch.save(Path("x"), path)
    refused("is not a file of tensors that torch.save has written")
    path.write_bytes(b"no pickle")
    refused("is not a file of tensors that torch.save has written")
    path.unlink()
    made("medusa_v1").write(tmp_path)
    path = tmp_path / "medusa_lm_head.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    refused("is cut short: it has")
    path.write_bytes(b"\x09" * 20)
    refused("is not a safetensors file")


def test_the_files_of_a_target_say_how_many_mtp_modules_they_hold(tmp_path: Path, targets: dict) -> None:
    assert mtp_layers(Checkpoint.open(str(targets["llama"][0]))) == 0
    for name in ("mtp_deepseek", "mtp_qwen", "mtp_sharded"):
        assert mtp_layers(Checkpoint.open(str(made(name).write(tmp_path / name)))) == 1


@pytest.mark.parametrize(
    "name", ["medusa_v1", "mlp_tied", "eagle_bias", "eagle3", "peagle", "mtp_deepseek", "dflash", "dspark"]
)
def test_in_bfloat16_candidates_are_close_to_those_in_float32(name: str, tmp_path: Path, targets: dict) -> None:
    loaded = Loaded(made(name), tmp_path, targets)
    ids, log_q = loaded.served()
    exact = torch.zeros(DEPTHS, VOCAB).scatter(1, ids, log_q.exp())
    target = tmp_path if name.startswith("mtp") else targets["llama"][0]
    source = None if name.startswith("mtp") else str(tmp_path)
    plan = open_head(loaded.file.method, source, Checkpoint.open(str(target)), num_tokens=DEPTHS)
    loaded.head, loaded.states = plan.load(torch.bfloat16, CPU, num_candidates=VOCAB), loaded.states.bfloat16()
    ids, log_q = loaded.served(torch.bfloat16)
    rounded = torch.zeros(DEPTHS, VOCAB).scatter(1, ids, log_q.exp())
    assert (rounded - exact).abs().sum(-1).max() < 0.1
