"""Published heads in a target that is built from its configuration: what they draft is what their module says of the
target's own states, through prompts in chunks, cached prefixes, batches and preemption, and no text changes."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.drafters.head_files import SIZE, VOCAB, made, write_target
from tests.support.models import letters_tokenizer, save_pair
from tests.support.rings import nightly, slow
from torch import nn

from paceline.checkpoint.files import Checkpoint
from paceline.config import HeadOptions, SuffixMatching, TargetOptions, TargetSetup
from paceline.config.methods.suffix import TOKEN_BYTES
from paceline.drafters.colocated import DraftModelHead
from paceline.drafters.heads import probe as probe_module
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.heads.load import open_head
from paceline.drafters.heads.module import HeadModule
from paceline.drafters.protocol import Leaf
from paceline.errors import ConfigError
from paceline.messages import DraftState, OpenSession, Outcome, SessionFailed
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.linear import PackedLinear
from paceline.model.device import Placement
from paceline.model.loading import load_model
from paceline.model.step_plan import SequenceStep
from paceline.preflight.estimate import HeadsSize, target_estimate
from paceline.preflight.heads import heads_size
from paceline.target import build, mount
from paceline.target.build import build_target_engine
from paceline.target.control.report import explain
from paceline.target.engine import TargetEngine
from paceline.target.mount import open_heads, with_own_mtp
from paceline.types import Mode, SamplingParams, SpeculationParams, pages_for

OPTIONS = {"dtype": "float32", "device": "cpu", "compile": False, "batch_invariant": "off", "max_step_tokens": 40}


def built(source: Path, heads: list[HeadOptions], **options) -> TargetEngine:
    sent: list = []
    fields = OPTIONS | {"adaptive": False, "kv_pages": 7, "max_model_len": 256, "heads": heads} | options
    engine = build_target_engine(TargetSetup(str(source), TargetOptions(**fields)), sent.extend)
    engine.sent = sent  # type: ignore[attr-defined]
    return engine


def texts(engine: TargetEngine, prompts: list[list[int]], mode: Mode, temperature: float = 0.0) -> list[list[int]]:
    """The texts of a few sessions, opened one after the other while earlier ones run."""
    engine.sent.clear()
    waiting = list(enumerate(prompts))
    for step in range(2000):
        if waiting and step % 4 == 0:
            i, tokens = waiting.pop(0)
            sampling = SamplingParams(temperature=temperature, max_tokens=20, seed=i)
            params = SpeculationParams(mode=mode, max_draft_tokens=4)
            name = f"{mode}{i}"
            engine.receive([OpenSession(name, 1, tuple(tokens), len(tokens), i, sampling, params)])
            engine.receive([DraftState(name, 1, available=False)])
        engine.step()
        engine.check_integrity()
        if not waiting and not engine.num_sessions:
            break
    found = [list(p) for p in prompts]
    for message in engine.sent:
        assert not isinstance(message, SessionFailed), message
        if isinstance(message, Outcome):
            found[int(message.session_id.removeprefix(mode))].extend(message.token_ids)
    return found


def prompts_of(vocab: int) -> list[list[int]]:
    torch.manual_seed(1)
    shared = torch.randint(10, vocab, (70,)).tolist()
    lengths = (3, 40, 64, 65, 90)
    own = [torch.randint(10, vocab, (n,)).tolist() for n in lengths]
    return [*own, [*shared, 11], [*shared, 12, 13]]


class Record:
    """What a head was asked of sessions without holes, and the likeliest token that it answered with."""

    def __init__(self, head: HeadDrafter, engine: TargetEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[list[int], tuple[int, ...], int]] = []
        expand = head.expand

        def recording(leaves: list[Leaf]):
            candidates = expand(leaves)
            for i, leaf in enumerate(leaves):
                if candidates.log_q[i, 0] > -1e30 and not head.sessions[leaf.session_id].holes:
                    tokens = list(engine.sessions[leaf.session_id].tokens)
                    self.asked.append((tokens, leaf.path, int(candidates.token_ids[i, 0])))
            return candidates

        monkeypatch.setattr(head, "expand", recording)


KINDS = [
    "eagle3",
    "mtp_deepseek",
    "dspark_speculators",
    *slow(["dflash", "dflash2", "dflash_windows", "dspark", "jetspec"]),
    *slow(["eagle_bias", "medusa_v2", "peagle", "eagle3_fc_norm", "mlp_tied"]),
    *nightly(["medusa_v1"]),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_head_drafts_what_its_module_says(kind, tmp_path, monkeypatch) -> None:
    file = made(kind)
    folder = file.write(tmp_path / "head")
    target = folder if file.method == "mtp" else tmp_path / "target"
    if file.method != "mtp":
        write_target(target, file.target)
    source = None if file.method == "mtp" else str(folder)
    head = HeadOptions(method=file.method, model=source, num_speculative_tokens=3, probe=False)
    engine = built(target, [head])
    (mounted,) = engine.heads.mounted
    assert isinstance(mounted.head, HeadDrafter)
    record = Record(mounted.head, engine, monkeypatch)
    prompts = prompts_of(VOCAB)
    found = texts(engine, prompts, Mode.OVERLAPPED)
    greedy = [*record.asked]  # with noise the candidates are others than the likeliest
    assert found == texts(engine, prompts, Mode.PLAIN)
    sampled = texts(engine, prompts, Mode.OVERLAPPED, 0.7)
    assert sampled == texts(engine, prompts, Mode.PLAIN, 0.7)
    assert not mounted.failure
    assert mounted.stats.rows > 100
    assert engine.stats.preemptions > 0
    assert engine.stats.cached_tokens > 0
    assert engine.runner.cache.num_used == 0

    features = mounted.head.features
    options = TargetOptions(**OPTIONS)
    runner = load_model(Checkpoint.open(str(target)), options, features=features).runner(8)
    pages, right, compared = runner.cache.allocate(4), 0, 0
    for tokens, path, answer in greedy[::4]:
        if file.method == "peagle" and path:
            continue  # its deeper rows do not take the path's tokens
        span = range(len(tokens) - 1)
        _, states = runner.forward_with_states(
            [SequenceStep(tokens[:-1], span, span, pages[: pages_for(len(tokens))], len(span))]
        )
        ids = torch.tensor([[*tokens, *path]])
        with torch.no_grad():
            *_, logits = mounted.head.module.unroll(states[None], ids, len(path) + 1)
        best = mounted.head.module.to_target_ids(logits[0, -1:], VOCAB).argmax()
        right += int(best) == answer
        compared += 1
    assert compared > 20
    assert right >= 0.95 * compared, "but for ties"


@pytest.mark.parametrize("kind", ["dflash", "dflash_default_layers", "dflash2_speculators", "dspark", "jetspec"])
def test_the_memory_of_a_block_head_is_known_from_its_files(kind: str, tmp_path: Path) -> None:
    """What is counted before anything is loaded is what the head keeps on the target's pages."""
    write_target(tmp_path / "target")
    file = made(kind)
    head = HeadOptions(method=file.method, model=str(file.write(tmp_path / "head")))
    setup = TargetSetup(str(tmp_path / "target"), TargetOptions(**OPTIONS, heads=[head]))
    checkpoint = Checkpoint.open(setup.source)
    target = checkpoint.size("float32", None)
    assert target is not None
    counted = heads_size(setup, target, 256)
    (opened,) = open_heads(setup, checkpoint)
    assert opened.plan is not None
    assert counted.page_values == len(opened.plan.features.boundaries) * SIZE
    assert counted.kv_values == sum(layer.kv_bytes(torch.float32) // 4 for layer in opened.plan.layers)
    assert counted.weights_bytes >= 4 * opened.plan.num_parameters


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, "float32") for kind in ("medusa_v1_pt", "medusa_v2", "medusa_blocks_one_lm_head", "mlp", "mlp_tied")),
        *((kind, "float32") for kind in ("eagle", "eagle3", "eagle3_whole_vocabulary", "peagle", "dflash", "dspark")),
        *((kind, "float32") for kind in ("dflash_speculators", "jetspec", "mtp_deepseek", "mtp_own_tables")),
        *((kind, "bfloat16") for kind in ("medusa_v2", "eagle3", "dspark", "mtp_deepseek")),
    ],
)
def test_what_a_head_holds_beside_its_target_is_counted_from_its_files(kind: str, dtype: str, tmp_path: Path) -> None:
    """Beside a compiled target it holds the tables that it borrows; an eager one lends them."""
    tables = write_target(tmp_path / "target")
    file, number = made(kind), getattr(torch, dtype)
    head = HeadOptions(method=file.method, model=str(file.write(tmp_path / "head")))
    checkpoint = Checkpoint.open(str(tmp_path / "target"))
    options, size = TargetOptions(**OPTIONS | {"dtype": dtype, "heads": [head]}), checkpoint.size(dtype, None)
    assert size is not None

    def counted(**changes) -> int:
        setup = TargetSetup(checkpoint.path, options.model_copy(update=changes))
        return heads_size(setup, size, 256).weights_bytes

    lent = {
        "embed": partial(F.embedding, weight=tables["embed"]),
        "lm_head": partial(F.linear, weight=tables["lm_head"]),
    }
    for given, count in (({}, counted(compile=True)), (lent, counted(compile=False))):
        drafter = open_head(file.method, head.source, checkpoint).load(number, torch.device("cpu"), **given)
        assert isinstance(drafter, HeadDrafter)
        held, padding = held_bytes(drafter.module)
        assert 0 <= held - count <= padding + 256, "but for angles, and ids in int64"
    assert counted(tensor_parallel_size=2) == counted(quantization="int8") == counted(compile=True)


def held_bytes(module: HeadModule) -> tuple[int, int]:
    """Bytes of the weights of a head with what it has borrowed, if that is a module; the most of them that are packed
    layers' padding, and biases in float32."""
    borrowed = [function.func for function in (module._embed, module._lm_head) if isinstance(function, partial)]
    parts = [part for whole in (module, *borrowed) if isinstance(whole, nn.Module) for part in whole.modules()]
    tensors = [t for part in parts for t in (*part.parameters(recurse=False), *part.buffers(recurse=False))]
    packed = {part for part in parts if isinstance(part, PackedLinear)}
    padding = sum(part.packed[0].nbytes + (0 if part.bias is None else part.bias.nbytes) for part in packed)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()), padding


def test_a_head_that_predicts_nothing_is_refused_when_the_target_starts(tmp_path: Path) -> None:
    """It has random weights, and is asked for what the target writes after the texts of a file, or after our own."""
    write_target(tmp_path / "target")
    letters_tokenizer(VOCAB).save_pretrained(tmp_path / "target")
    folder, texts = str(made("eagle3").write(tmp_path / "head")), tmp_path / "texts"
    texts.write_text("abcd\n\nefgh\n", encoding="utf-8")
    for more in ({}, {"probe_file": str(texts)}):
        head = HeadOptions(method="eagle3", model=folder, **more)
        with pytest.raises(ConfigError) as error:
            built(tmp_path / "target", [head])
        assert str(error.value).startswith(f"head eagle3 {folder} predicts 0.")
        assert "of the target's tokens (by depth) with boundaries (2, 4, 5), where the most frequent" in str(
            error.value
        )
    with pytest.raises(ConfigError, match=r"^probe_file is '/nowhere': it cannot be read"):
        built(tmp_path / "target", [HeadOptions(method="eagle3", model=folder, probe_file="/nowhere")])
    for fields in ({"probe": False}, {"method": "draft_model"}):
        with pytest.raises(ValueError, match="probe_file is 'x' with "):
            HeadOptions(**{"method": "eagle3", "model": folder, "probe_file": "x"} | fields)


def test_what_the_probe_warns_of_is_in_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the replica runs, not only in its log."""
    write_target(tmp_path / "target")
    letters_tokenizer(VOCAB).save_pretrained(tmp_path / "target")
    folder = str(made("eagle3").write(tmp_path / "head"))
    monkeypatch.setattr(probe_module, "judge", lambda name, scores, by_chance: f"head {name} reads the wrong layer")
    head = HeadOptions(method="eagle3", model=folder)
    for heads, said in (([head], True), ([head.model_copy(update={"probe": False})], False)):
        sentence = explain(built(tmp_path / "target", heads))
        assert f"head eagle3 {folder}: 0% of rounds" in sentence
        assert (f"; warning of the probe at start-up: head eagle3 {folder} reads the wrong layer" in sentence) == said


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Before weights are read: a head of another target, no MTP, another vocabulary, a draft model without a place."""
    write_target(tmp_path / "target")
    other = made("medusa_v1").write(tmp_path / "head")
    pair = save_pair(tmp_path / "pair")
    for head, target, said in (
        (HeadOptions(method="medusa", model=str(other)), pair / "target", "medusa head"),
        (HeadOptions(method="mtp"), tmp_path / "target", "mtp"),
        (HeadOptions(method="eagle", model=str(tmp_path / "nowhere")), tmp_path / "target", "nowhere"),
        (HeadOptions(method="draft_model", model=str(tmp_path / "nowhere")), pair / "target", "nowhere"),
    ):
        with pytest.raises(ConfigError, match=said):
            built(target, [head])


def own_mtp(folder: Path, without: str = "", **config) -> Path:
    """A target with an MTP module of random weights in its files, and a tokenizer; ``without`` one of its tensors."""
    file = made("mtp_deepseek")
    file.config |= config
    file.tensors = {name: tensor for name, tensor in file.tensors.items() if not (without and name.endswith(without))}
    file.write(folder)
    letters_tokenizer(VOCAB).save_pretrained(folder)
    return folder


def test_mtp_modules_of_the_target_draft_where_no_head_is_configured(tmp_path, monkeypatch, caplog) -> None:
    source, prompts = own_mtp(tmp_path / "target"), prompts_of(VOCAB)
    monkeypatch.setattr(probe_module, "judge", lambda name, scores, by_chance: None)  # the weights are random
    with caplog.at_level("INFO", "paceline.target.mount"):
        engine = built(source, [], adaptive=True)
    (mounted,) = engine.heads.mounted
    assert mounted.name == "mtp"
    assert "comes with 1 MTP modules, which draft unless mtp_modules is 'off'" in caplog.text
    plain = built(source, [], adaptive=True, mtp_modules="off")
    assert not plain.heads.mounted
    assert plain.runner.features is None
    expected = texts(plain, prompts, Mode.OVERLAPPED)
    assert texts(engine, prompts, Mode.OVERLAPPED) == expected
    assert mounted.stats.depths > 0
    assert mounted.failure == ""


@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        ({}, {"adaptive": False}, "adaptive is false"),
        ({}, {"quantization": "int8"}, "quantization is 'int8': MTP layers are run as plain weights only"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            {},
            "is quantized: MTP layers",
        ),
        ({"without": ".eh_proj.weight"}, {}, "no weight file holds 'model.layers."),
    ],
)
def test_mtp_modules_that_cannot_be_run_leave_the_target_as_it_was(config, options, why, tmp_path, caplog) -> None:
    source = own_mtp(tmp_path / "target", **config)
    setup = TargetSetup(str(source), TargetOptions(**OPTIONS | options))
    placement = Placement(torch.device("cpu"), torch.float32)
    assert with_own_mtp(setup, Checkpoint.open(str(source)), placement) is setup
    assert "comes with 1 MTP modules, which do not draft: " in caplog.text
    assert why in caplog.text


def test_a_target_starts_without_mtp_modules_that_do_not_fit_or_predict_nothing(tmp_path, monkeypatch, caplog) -> None:
    """Both are errors where the head is configured."""
    source, prompts = own_mtp(tmp_path / "target"), prompts_of(VOCAB)
    with pytest.raises(ConfigError, match="head mtp predicts 0"):
        built(source, [HeadOptions(method="mtp")])
    engine = built(source, [], adaptive=True)
    assert "which do not draft: head mtp predicts 0" in caplog.text
    assert not engine.heads.mounted
    assert texts(engine, prompts, Mode.OVERLAPPED) == texts(engine, prompts, Mode.PLAIN)
    caplog.clear()

    def no_room(setup: TargetSetup, *_) -> None:
        if setup.options.heads:
            raise ConfigError("max_sessions is 16: there is room for 2")

    monkeypatch.setattr(mount, "require_target", no_room)
    assert not built(source, [], adaptive=True).heads.mounted
    assert "which do not draft: max_sessions is 16" in caplog.text


def test_a_draft_model_beside_the_target(tmp_path: Path) -> None:
    """Built from the configuration, in one process: the text is plain's and every page is free again."""
    folder = save_pair(tmp_path)
    engine = built(folder / "target", [HeadOptions(method="draft_model", model=str(folder / "draft"))])
    (mounted,) = engine.heads.mounted
    prompts = prompts_of(200)
    for temperature in (0.0, 1.0):
        assert texts(engine, prompts, Mode.OVERLAPPED, temperature) == texts(engine, prompts, Mode.PLAIN, temperature)
    assert mounted.stats.rows_used > 20
    assert mounted.head.runner.cache.num_used == 0


def test_a_draft_model_beside_the_target_is_warm_before_it_is_timed(tmp_path, monkeypatch) -> None:
    """Else the time in which its first calls compile would count as its own, and pause it. One call has the leaves of
    all sessions, and a step of the target the branches of one."""
    expanded: list[tuple[tuple[int, ...], bool]] = []
    recorded: list[Limits] = []
    expand = DraftModelHead.expand

    def noted(self, leaves):
        [leaf] = leaves
        expanded.append((leaf.path_ids, self.sessions[leaf.session_id].sampler.greedy))
        return expand(self, leaves)

    monkeypatch.setattr(DraftModelHead, "expand", noted)
    for module in (mount, build):
        monkeypatch.setattr(module, "record_steps", lambda runner, limits, *_: recorded.append(limits))
    folder = save_pair(tmp_path)
    heads = [HeadOptions(method="draft_model", model=str(folder / "draft"))]
    engine = built(folder / "target", heads, max_sessions=3)
    assert expanded == [((), True), ((1,), True), ((), False), ((1,), False)]
    head = engine.heads.mounted[0].head
    assert isinstance(head, DraftModelHead)
    assert (head.max_leaves, head.sessions) == (4 * 3, {})
    head.check_integrity()
    of_head, of_target = recorded
    assert (of_head.max_rows, of_head.max_tokens, of_head.is_tree) == (3, 4 * 3, True)
    assert of_target.max_rows == 16
    built(folder / "target", [], max_sessions=3, tree_verification="off")
    built(folder / "target", [], max_sessions=20)
    assert [limits.max_rows for limits in recorded[2:]] == [3, 20]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_suffixes_beside_the_target(temperature: float, tmp_path: Path) -> None:
    """The text is plain's, whether what is proposed is right, from a corpus of these texts, or mostly wrong; outputs
    are shared with later sessions if that is asked for."""
    source, prompts = save_pair(tmp_path) / "target", prompts_of(200)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("")
    expected = texts(built(source, []), prompts, Mode.PLAIN, temperature)
    used = []
    for lines, shared_tokens in (([], 0), (expected, 0), ([], 10_000)):
        corpus.write_text("".join(f"{line}\n" for line in lines))
        matching = SuffixMatching(corpus=[str(corpus)], shared_tokens=shared_tokens)
        engine = built(source, [HeadOptions(method="suffix", suffix=matching)])
        (mounted,) = engine.heads.mounted
        for _ in range(2):
            assert texts(engine, prompts, Mode.OVERLAPPED, temperature) == expected
            used.append(mounted.stats.rows_used)
            mounted.stats.rows_used = 0
        assert mounted.failure == ""
        assert not mounted.head.sessions
    alone, again, with_corpus, _, first, shared = used
    assert alone == again, "nothing stays of other sessions"
    assert with_corpus > alone + 40
    assert shared > first + 40


def test_what_suffixes_take_of_the_machine_is_counted(tmp_path: Path) -> None:
    source = save_pair(tmp_path) / "target"
    size = Checkpoint.open(str(source)).size("float32", None)
    assert size is not None
    for matching, host_bytes in ((None, 0), (SuffixMatching(shared_tokens=1000), 1000 * TOKEN_BYTES)):
        options = TargetOptions(**OPTIONS, heads=[HeadOptions(method="suffix", suffix=matching)])
        setup = TargetSetup(str(source), options)
        counted = heads_size(setup, size, 256)
        assert counted == HeadsSize(host_bytes=host_bytes)
        without = target_estimate(setup, size, 256)
        assert target_estimate(setup, size, 256, heads=counted).host_bytes == without.host_bytes + host_bytes
