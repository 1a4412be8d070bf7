"""The memory that a replica is said to take: by hand, against the tensors, and against a process that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from tests.support.models import letters_tokenizer, pair, random_model
from tests.support.rings import nightly, slow
from torch import nn
from transformers import LlamaConfig

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.size import ModelSize, size_of
from paceline.config import (
    DraftModel,
    DraftOptions,
    DraftSetup,
    HeadDraftOptions,
    LocalConfig,
    NgramOptions,
    TargetModel,
    TargetOptions,
    TargetSetup,
)
from paceline.core import native
from paceline.draft.build import build_draft_engine
from paceline.embedded import DRAFT_DIR, HEAD_DIRS, TARGET_DIR
from paceline.model.attention.schedule import scratch_bytes, sum_bytes
from paceline.model.shapes import padded_pages
from paceline.preflight.estimate import (
    ENGINE_PROCESS_BYTES,
    PROCESS_BYTES,
    REPLICA_RAY_BYTES,
    draft_estimate,
    modelless_estimate,
    target_estimate,
)
from paceline.preflight.heads import heads_size, remote_size
from paceline.preflight.host_memory import draft_pages, session_pages, target_pages

MIB = 1 << 20
FACTS = ModelSize(
    num_parameters=5 * MIB,
    kv_values=2 * 4 * 2 * 32,
    item_bytes=2,
    num_layers=4,
    hidden_size=128,
    intermediate_size=320,
    vocab_size=1000,
)


def target(tree_budget=256, **options):
    """A target whose attention copies keys and values, with drafts of so many nodes."""
    return TargetSetup("target", TargetOptions(**{"compile": False, "attention": "sdpa", **options}), tree_budget)


def draft(**options):
    return DraftSetup.for_target(target(), "draft", DraftOptions(**options))


def test_the_parts_of_a_target_by_hand():
    estimate = target_estimate(target(max_sessions=8, max_step_tokens=128), FACTS, 2048)
    assert estimate.weights_bytes == 10 * MIB
    assert estimate.packed_bytes == 0
    assert estimate.num_pages == 8 * 17
    assert estimate.kv_bytes == estimate.least_kv_bytes == (8 * 17 + 1) * 64 * 512 * 2
    assert estimate.tree_bytes == 8 * 256 * 1024
    activations = 128 * 2 * (6 * 128 + 3 * 320)
    attention = (128 // 16 + 8) * 33 * 64 * 128 * 2  # 128 numbers per token and layer
    assert estimate.workspace_bytes == activations + attention
    many_words = replace(FACTS, vocab_size=50_000)
    logits = 128 * 50_000 * (2 + 4 + 4)  # 8 sessions could have 136 rows
    several = target(max_sessions=8, max_step_tokens=128)
    assert target_estimate(several, many_words, 2048).workspace_bytes == activations + logits > activations + attention
    assert (estimate.num_longest, estimate.num_typical) == (8 * 17 // 33, 8)
    assert estimate.total_bytes == sum(
        (ENGINE_PROCESS_BYTES, 10 * MIB, estimate.kv_bytes, estimate.tree_bytes, estimate.workspace_bytes)
    )
    assert estimate.least_bytes == PROCESS_BYTES + 10 * MIB + estimate.kv_bytes + estimate.workspace_bytes


def test_attention_that_reads_pages_in_place_takes_no_copy_of_them(monkeypatch):
    def workspace(attention, on_gpu=False):
        return target_estimate(target(attention=attention), FACTS, 8192, on_gpu=on_gpu).workspace_bytes

    assert native.has_avx512() == (torch.backends.cpu.get_cpu_capability() == "AVX512")
    for flags, auto in (("avx512f avx512bw avx512dq avx512vl fma", "native"), ("avx2 fma", "sdpa")):
        monkeypatch.setattr(native, "machine", lambda found=flags: found)
        assert workspace("auto") == workspace(auto)
    assert workspace("sdpa", on_gpu=True) == workspace("sdpa")
    assert workspace("triton", on_gpu=True) == workspace("auto", on_gpu=True)


def test_the_largest_step_of_an_8b_leaves_a_gpu_its_cache():
    """Partial sums are bounded, and masks counted, however long contexts are."""
    size = ModelSize(8_030_000_000, 2 * 8 * 128 * 32, 2, 32, 4096, 14336, 128256, num_kv_heads=8)

    def workspace(max_step_tokens, max_len):
        setup = target(attention="auto", max_step_tokens=max_step_tokens, max_sessions=64, kv_fraction=0.9)
        return target_estimate(setup, size, max_len, on_gpu=True).workspace_bytes

    assert workspace(256, 8192) < 2 << 30
    assert workspace(256, 131_072) < 2 << 30
    assert workspace(2048, 131_072) - workspace(2048, 8192) < 2 << 30, "of masks"


def test_partial_sums_are_counted_as_the_kernel_allocates_them():
    """By the heads, of a rank its own; what the kernel refuses runs by copies."""
    config = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 16,
              "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 64, "vocab_size": 10}  # fmt: skip
    size = size_of(config, 1000, 2)

    def workspace(size, **how):
        setup = target(attention="auto", max_step_tokens=256, max_sessions=4)
        return target_estimate(setup, size, 65_472, on_gpu=True, **how).workspace_bytes

    activations = 256 * 2 * (6 * 64 + 3 * 64)
    counted = scratch_bytes(256, padded_pages(session_pages(65_472)), sum_bytes(16, 128))
    assert workspace(size) == workspace(size, kernel="triton") == activations + counted
    ranks = target_estimate(
        target(attention="auto", max_step_tokens=256), size, 8192, on_gpu=True, tensor_parallel_size=2
    )
    own = scratch_bytes(256, padded_pages(session_pages(8192)), sum_bytes(8, 128))
    assert ranks.workspace_bytes == activations - 256 * 2 * 3 * 32 + own
    for refused in (replace(size, value_dim=513), replace(size, index_values=128)):
        assert workspace(refused) == workspace(refused, kernel="sdpa") != workspace(refused, kernel="triton")
    latents = size_of(config | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 1000, 2)
    assert (latents.num_heads, latents.value_dim, latents.num_kv_heads) == (16, 512, 1)
    assert workspace(latents) == workspace(latents, kernel="triton")


def test_what_changes_the_parts_of_a_target():
    plain = target_estimate(target(), FACTS, 1024)
    assert target_estimate(target(tree_budget=0), FACTS, 1024).tree_bytes == 0 < plain.tree_bytes
    assert target_estimate(target(compile="auto"), FACTS, 1024).packed_bytes == FACTS.weights_bytes
    assert target_estimate(target(compile="auto"), FACTS, 1024, on_gpu=True).packed_bytes == 0
    assert target_estimate(target(max_step_tokens=512), FACTS, 1024).workspace_bytes > plain.workspace_bytes
    small = target_estimate(target(kv_pages=4), FACTS, 1024)
    assert (small.num_pages, small.num_longest, small.num_typical) == (4, 0, 0)
    assert small.workspace_bytes < plain.workspace_bytes, "no context is longer than the cache"


def test_kv_fraction_is_a_share_of_what_the_other_parts_leave():
    others = target_estimate(target(kv_fraction=0.5), FACTS, 1024)
    left = others.total_bytes - others.kv_bytes + 1000 * FACTS.page_bytes
    estimate = target_estimate(target(kv_fraction=0.5), FACTS, 1024, left_bytes=left)
    assert estimate.num_pages == 499, "and the scratch page"
    assert target_estimate(target(kv_fraction=1.0), FACTS, 1024, left_bytes=left).total_bytes == left
    assert estimate.least_kv_bytes == FACTS.kv_bytes(session_pages(1024))
    assert target_estimate(target(kv_fraction=0.5), FACTS, 1024).num_pages == session_pages(1024)


def test_a_rank_holds_its_share_of_matrices_and_kv_heads_and_all_norms():
    facts = replace(FACTS, num_whole=MIB, num_kv_heads=2)
    settings = target(compile=True, max_sessions=8)
    whole, half, eighth = (target_estimate(settings, facts, 2048, tensor_parallel_size=n) for n in (1, 2, 8))
    assert whole == replace(target_estimate(settings, facts, 2048), num_ranks=1)
    assert half.weights_bytes == half.packed_bytes == (MIB + 4 * MIB // 2) * 2
    assert half.kv_bytes * 2 == whole.kv_bytes
    assert eighth.kv_bytes == half.kv_bytes, "a head is not split"
    assert eighth.weights_bytes == (MIB + 4 * MIB // 8) * 2
    assert eighth.workspace_bytes < whole.workspace_bytes
    assert (half.num_pages, half.num_ranks, eighth.num_ranks) == (whole.num_pages, 2, 8)
    half_draft = draft_estimate(draft(tensor_parallel_size=2), facts, 2048)
    assert (half_draft.weights_bytes, half_draft.num_ranks) == (half.weights_bytes, 2)


def test_the_parts_of_a_draft():
    facts = replace(FACTS, vocab_size=500_000)
    estimate = draft_estimate(draft(max_sessions=3, tree_step_tokens=16), facts, 2048)
    assert estimate.num_pages == draft_pages(draft(max_sessions=3), 2048) == 3 * 21
    assert estimate.tree_bytes == 3 * 256 * 1024
    assert (estimate.num_longest, estimate.num_typical) == (3 * 21 // 37, 3)
    wider = draft_estimate(draft(max_sessions=3), facts, 2048)
    assert wider.workspace_bytes - estimate.workspace_bytes == 16 * 500_000 * (2 + 4), "up to 32 rows when measured"
    without = modelless_estimate(DraftSetup.for_target(target(max_sessions=3), None, NgramOptions()))
    assert without.total_bytes == ENGINE_PROCESS_BYTES + estimate.tree_bytes


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3_moe"])
def test_the_pages_are_those_of_the_cache(tmp_path, family):
    random_model(family).save_pretrained(tmp_path)
    facts = Checkpoint.open(str(tmp_path)).size("float32")
    loaded, _ = pair(family)
    cache = loaded.runner(9).cache
    assert facts.kv_bytes(9) == sum(pool.nbytes for pool in (*cache.keys, *cache.values))
    assert facts.vocab_size == loaded.vocab_size
    assert facts.num_layers == len(loaded.layers)
    assert facts.hidden_size == 64
    assert facts.intermediate_size == {"gpt2": 256}.get(family, 96)


def head_options(**options):
    """The embedded EAGLE-3 head in the draft pool."""
    return HeadDraftOptions(method="eagle3", model=str(HEAD_DIRS["eagle3"]), dtype="float32", device="cpu", **options)


def test_what_a_head_in_the_pool_takes_is_that_of_its_files_and_of_the_tables_that_it_borrows():
    size = Checkpoint.open(str(TARGET_DIR)).size("float32")
    setup = replace(target(), source=str(TARGET_DIR), link=head_options())
    draft_setup = DraftSetup.for_target(setup, None, setup.link)
    drafter = build_draft_engine(draft_setup, lambda _: None).drafter
    module, cache = drafter._head.module, drafter.cache
    own = sum(p.nbytes for p in module.parameters()) + sum(b.nbytes for b in module.buffers())
    tables = 2 * size.vocab_size * size.hidden_size * 4
    estimate = draft_estimate(draft_setup, remote_size(setup.link, size), 1024)
    assert own <= estimate.weights_bytes <= 1.02 * (own + tables) + MIB
    assert estimate.kv_bytes == sum(pool.nbytes for pool in (*cache.keys, *cache.values))
    assert estimate.packed_bytes == 0


def test_a_compiled_target_counts_the_tables_that_its_hints_read_again():
    size = Checkpoint.open(str(TARGET_DIR)).size("float32", None)
    for compile, copies in ((False, 0), (True, 2)):
        options = TargetOptions(hints={"boundary": 6}, compile=compile)
        heads = heads_size(TargetSetup(str(TARGET_DIR), options), size, 1024)
        assert heads.weights_bytes == copies * size.vocab_size * size.hidden_size * 4


def test_a_target_counts_the_states_that_it_keeps_for_a_head_in_the_pool():
    size = Checkpoint.open(str(TARGET_DIR)).size("float32")
    setup = replace(target(), source=str(TARGET_DIR), link=head_options())
    heads = heads_size(setup, size, 1024)
    assert heads.kv_values == size.hidden_size, "one vector a token"
    assert heads.weights_bytes == 3 * size.hidden_size**2 * 4, "fc over three boundaries"
    assert heads.page_values == 0
    more = target_estimate(setup, size, 1024, heads=heads)
    less = target_estimate(target(), size, 1024)
    assert more.kv_bytes - less.kv_bytes == (more.num_pages + 1) * 64 * size.hidden_size * 4


# -- against a process ------------------------------------------------------------------------------------------

TOLERANCE, TOLERANCE_BYTES = 0.25, 64 * MIB

_PRELUDE = """
import json, sys
import paceline.draft.build, paceline.target.build, transformers.models.llama.modeling_llama
from paceline.config import LocalConfig

def status(key):
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields[key].split()[0]) * 1024

def count_peak_from_here():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
"""

_MEASURE = (
    _PRELUDE
    + """
import torch
from paceline.runtime.build import EngineSpec
from paceline.preflight.host_memory import draft_session_pages, session_pages
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import draft_candidates, process, sample_coupled
from paceline.model.step_plan import SequenceStep
from paceline.types import SamplingParams

role, config = sys.argv[1], LocalConfig.model_validate_json(sys.argv[2])
target, draft = config.target_setup(), config.draft_setup()
before = status("VmRSS")
if role == "target":
    runner = EngineSpec(target).build(lambda messages: None).runner
    num_pages = session_pages(config.target.max_model_len)
else:
    drafter = EngineSpec(draft).build(lambda messages: None).drafter
    runner, num_pages = drafter.runner, draft_session_pages(config.draft, config.target.max_model_len)
loaded = status("VmRSS")
count_peak_from_here()
sessions, tokens, longest = config.target.max_sessions, config.target.max_step_tokens, config.target.max_model_len
pages = runner.cache.allocate(num_pages)
others = [runner.cache.allocate(1) for _ in range(sessions - 1)]
chunk = range(longest - tokens + sessions - 1, longest)
decoding = [SequenceStep([5], [3], [3], table, num_logits=1) for table in others]
runner.forward([SequenceStep([5] * len(chunk), chunk, chunk, pages, num_logits=1), *decoding])
state = SamplerState(SamplingParams(temperature=1, repetition_penalty=1.1), 0, (5,), vocab_size=runner.vocab_size)
if role == "target":
    each = range(tokens // sessions)
    verifying = [SequenceStep([5] * len(each), each, each, t, num_logits=len(each)) for t in [pages[:1], *others]]
    sample_coupled(process(runner.forward(verifying), [Row(state)] * len(each) * sessions))
else:
    width = drafter.max_leaves
    rows = range(longest, longest + width)
    visible, own = torch.ones(rows.stop, dtype=torch.bool), [[row] for row in rows]
    tree = SequenceStep([5] * width, rows, rows, pages, width, visible, own_rows=own)
    draft_candidates(runner.forward([tree]), [Row(state)] * width, config.draft.draft_top_m)
print(json.dumps({"before": before, "loaded": loaded, "peak": status("VmHWM")}))
"""
)


def run_script(script, *arguments):
    """What a process of its own prints, as JSON."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def save_model(folder):
    """Directory of a model with 46 million parameters."""
    model = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1536,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=7,
        pad_token_id=0,
    )
    random_model(model).save_pretrained(folder)
    letters_tokenizer().save_pretrained(folder)
    return str(folder)


def estimate_of(role, settings, facts, max_len):
    """The estimate of one of a local config's engines."""
    if role == "target":
        return target_estimate(settings.target_setup(), facts, max_len)
    return draft_estimate(settings.draft_setup(), facts, max_len)


def assert_takes(estimate, role, settings):
    """Peak and growth of a process that runs its largest step, within 25 % + 64 MiB of the estimate."""
    measured = run_script(_MEASURE, role, settings.model_dump_json())
    parts = {key: value // MIB for key, value in measured.items()}
    loading = estimate.weights_bytes + estimate.packed_bytes + estimate.kv_bytes
    for part, expected, actual in (
        ("weights and KV", loading, measured["loaded"] - measured["before"]),
        ("everything but the process", estimate.device_bytes, measured["peak"] - measured["before"]),
        ("everything, without Ray", estimate.total_bytes - REPLICA_RAY_BYTES, measured["peak"]),
    ):
        assert abs(actual - expected) <= TOLERANCE * expected + TOLERANCE_BYTES, (part, expected // MIB, parts)
    assert PROCESS_BYTES < measured["before"] < ENGINE_PROCESS_BYTES
    assert estimate.least_bytes < measured["peak"], "what is refused could not have run"


@pytest.mark.parametrize(
    ("role", "dtype", "attention"),
    [
        *slow([("draft", "bfloat16", "auto")]),
        *nightly([("target", d, a) for d, a in (("float32", "sdpa"), ("bfloat16", "sdpa"), ("bfloat16", "auto"))]),
        *nightly([("draft", "float32", "sdpa"), ("draft", "bfloat16", "sdpa")]),
    ],
)
def test_a_process_takes_what_is_estimated(tmp_path, role, dtype, attention):
    path = save_model(tmp_path)
    model = {"path": path, "dtype": dtype, "compile": False, "device": "cpu", "attention": attention}
    settings = LocalConfig(target=TargetModel(max_model_len=4096, **model), draft=DraftModel(**model))
    facts = Checkpoint.open(str(tmp_path)).size(dtype)
    assert facts.num_parameters > 40 * 10**6
    estimate = estimate_of(role, settings, facts, 4096)
    assert estimate.workspace_bytes > 5 * MIB
    pages = {"target": target_pages(settings.target, 4096), "draft": draft_pages(settings.draft_setup(), 4096)}
    assert estimate.num_pages == pages[role]
    assert_takes(estimate, role, settings)


_LOAD = (
    "import sys; from paceline.checkpoint.files import Checkpoint; from paceline.config import ModelOptions; "
    "from paceline.model.loading import load_model; "
)


@pytest.mark.compiler
@pytest.mark.nightly
@pytest.mark.parametrize(("role", "folder"), [("target", TARGET_DIR), ("draft", DRAFT_DIR)])
def test_a_process_with_a_compiled_model_takes_what_is_estimated(role, folder):
    """The embedded pair. Compiled beforehand: a process keeps what its compiler took."""
    run_script(_LOAD + "load_model(Checkpoint.open(sys.argv[1]), ModelOptions()); print(0)", str(folder))
    settings = LocalConfig(
        target=TargetModel(path=str(TARGET_DIR), max_model_len=1024), draft=DraftModel(path=str(DRAFT_DIR))
    )
    estimate = estimate_of(role, settings, Checkpoint.open(str(folder)).size(), 1024)
    assert estimate.packed_bytes == estimate.weights_bytes
    assert_takes(estimate, role, settings)


_SERVE = (
    _PRELUDE
    + """
import random
from paceline.runtime.build import EngineSpec
from paceline.local import LocalPipeline
from paceline.types import Mode, SamplingParams, SpeculationParams

engines = []

def target(emit):
    engines.append(EngineSpec(config.target_setup()).build(emit))
    return engines[-1]

config = LocalConfig.model_validate_json(sys.argv[1])
with LocalPipeline(config, target_factory=target) as pipeline:
    loaded = status("VmRSS")
    count_peak_from_here()
    running = []
    for i in range(16):
        draw = random.Random(i)
        sampling = SamplingParams(max_tokens=60, temperature=i % 2, seed=i, ignore_eos=True)
        tokens = [draw.randrange(10, 90) for _ in range(100)]
        running.append(pipeline.submit(tokens, sampling, SpeculationParams(mode=list(Mode)[i % 3])))
    tokens = [list(generation.result.token_ids) for generation in running]
    print(json.dumps({
        "tokens": tokens, "loaded": loaded, "peak": status("VmHWM"), "preemptions": engines[0].stats.preemptions
    }))
"""
)


@pytest.mark.nightly
def test_more_sessions_than_fit_take_no_more_than_is_estimated(tmp_path):
    """16 sessions of three pages each in seven pages: the same tokens as with room for all, in the same memory."""
    model = {"path": save_model(tmp_path), "dtype": "float32", "compile": False, "device": "cpu"}
    facts, found = Checkpoint.open(str(tmp_path)).size("float32"), {}
    for kv_pages in (7, 16 * 4):
        settings = LocalConfig(
            target=TargetModel(max_model_len=256, kv_pages=kv_pages, adaptive=False, **model),
            draft=DraftModel(max_sessions=2, tree_step_tokens=8, **model),
            worker="thread",
        )
        found[kv_pages] = run_script(_SERVE, settings.model_dump_json())
        both = [estimate_of(role, settings, facts, 256) for role in ("target", "draft")]
        grown = found[kv_pages]["peak"] - found[kv_pages]["loaded"]
        assert grown <= sum(estimate.reserved_bytes for estimate in both), grown // MIB
    small, large = found.values()
    assert small["tokens"] == large["tokens"]
    assert {len(tokens) for tokens in small["tokens"]} == {60}
    assert small["preemptions"] > 0 == large["preemptions"]


def test_int8_takes_a_byte_for_each_number_of_a_linear_layer_and_a_scale_for_each_block(tmp_path):
    """A block of 32 numbers has a scale of two bytes. Tables and norms keep the dtype.

    Weights that come in other formats count as they are stored.
    """
    model = random_model("llama")
    model.save_pretrained(tmp_path / "plain")
    plain = Checkpoint.open(str(tmp_path / "plain")).size()
    linear = sum(
        m.weight.numel() for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"
    )
    rounded = Checkpoint.open(str(tmp_path / "plain")).size(quantization="int8")
    assert rounded.weights_bytes == plain.weights_bytes - linear + linear // 32 * 2
    stored = {name: p.to(torch.int8) if p.dim() == 2 else p for name, p in model.state_dict().items()}
    (tmp_path / "stored").mkdir()
    save_file(stored, tmp_path / "stored" / "model.safetensors")
    model.config.save_pretrained(tmp_path / "stored")
    matrices = sum(p.numel() for p in stored.values() if p.dim() == 2)
    rest = sum(p.numel() for p in stored.values() if p.dim() < 2)
    assert Checkpoint.open(str(tmp_path / "stored")).size().weights_bytes == matrices + 2 * rest
