"""Tokens/s of plain decoding against what the device's memory allows; what a step costs with CUDA graphs and without.

    python benchmarks/gpu.py [--models grown-1B,grown-8B] [--context 256] [--tokens 128] [--attention triton]

A model is ``grown-SIZE``, the embedded target grown to that size (``paceline/bench/grow.py``), or ``llama-1B`` or
``llama-8B``, random weights in the shapes of Llama 3. Both are made on the device. Imports no Ray and no gRPC.

The floor of a token is the time to read every weight once, at the bandwidth of a copy of 1 GiB on the same device
(bytes read and written): embeddings count only where they are the output layer too. Goal: 80 % of the floor's rate.
Writes ``benchmarks/results/gpu-DEVICE.txt``.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.core.deferred import download
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import draft_candidates
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.messages import FromTarget, OpenSession, Outcome
from paceline.model.compiled.backend import DeviceBackend
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.graphs import record_steps
from paceline.model.loading import LoadedModel, load_pretrained, prepare
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.model.step_plan import SequenceStep
from paceline.target.engine import TargetEngine
from paceline.types import PAGE_SIZE, Mode, SamplingParams, SpeculationParams, pages_for
from paceline_bench.grow import grow, parse_size

RESULTS = Path(__file__).parent / "results"
VERIFIED = (1, 4, 8, 16)
LEAVES = (1, 8, 16)
CHUNK, LONGEST = 2048, 32768
"""Tokens of a chunk of a prompt, and of the longest prompt."""
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "tie_word_embeddings")
_LLAMA = {"llama-1B": (2048, 8192, 16, 64, True), "llama-8B": (4096, 14336, 32, 128, False)}
_COMMON = {"vocab_size": 128_256, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}


def make_model(name: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of that name, on ``device``."""
    if name in _LLAMA:
        config = LlamaConfig(**_COMMON, **dict(zip(_SHAPE, _LLAMA[name], strict=True)))
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    kind, _, size = name.partition("-")
    if kind != "grown":
        raise SystemExit(f"model {name!r}: grown-SIZE, {' or '.join(_LLAMA)} is allowed")
    with torch.no_grad():
        return grow(LlamaForCausalLM.from_pretrained(TARGET_DIR, dtype=dtype).to(device), parse_size(size))


def read_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a token reads."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    return total if tied else total - embedding.numel() * embedding.element_size()


class Clock:
    """Times what a device does."""

    def __init__(self, device: str) -> None:
        self._wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def seconds(self, function: Callable[[], object], repeats: int) -> float:
        """Median of single calls, each waited for; three calls more come first."""
        times = []
        for i in range(repeats + 3):
            self._wait()
            started = time.perf_counter()
            function()
            self._wait()
            if i >= 3:
                times.append(time.perf_counter() - started)
        return statistics.median(times)


def bandwidth(device: str, clock: Clock) -> float:
    """Bytes per second of a copy, read and written ones."""
    num_bytes = 1 << 30 if device == "cuda" else 1 << 27
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / clock.seconds(lambda: target.copy_(source), 20)


def runners(model: LoadedModel, num_pages: int, limits: Limits, eager_too: bool) -> Iterator[tuple[str, ModelRunner]]:
    """With graphs where the device has them, then eagerly in the same shapes, if requested or there is no other."""
    if model.device.type == "cuda":
        graphs = model.runner(num_pages)
        record_steps(graphs, limits, model.max_len, "auto")
        yield "graphs", graphs
        if not eager_too:
            return
    eager = model.runner(num_pages)
    if model.device.type == "cuda":
        settings = {"kernel": model.kernel, "recorder": None, "max_shapes": model.max_cuda_graphs}
        eager.backend = DeviceBackend(eager.cache, model.dtype, model.sliding_window, **settings)
        eager.record(limits)
    yield "eager", eager


def step_seconds(runner: ModelRunner, num_tokens: int, context: int, clock: Clock, repeats: int) -> float:
    """One forward of the last ``num_tokens`` of a context, all logits."""
    pages = runner.cache.allocate(pages_for(context))
    span = range(context - num_tokens, context)
    step = SequenceStep([1] * num_tokens, span, span, pages, num_logits=num_tokens)
    try:
        return clock.seconds(lambda: runner.forward([step]), repeats)
    finally:
        runner.cache.release(pages)


def prompt_lines(model: LoadedModel, longest: int, clock: Clock, repeats: int) -> Iterator[str]:
    """Seconds of a chunk of a prompt, by our kernels and by the library if there is one."""
    runner = model.runner(pages_for(longest))
    pages = runner.cache.allocate(pages_for(longest))
    ways = {"our kernels": 0, "FlashInfer": CHUNK} if runner.backend.block_len else {"our kernels": 0}
    for context in (0, longest - CHUNK):
        span, cells = range(context, context + CHUNK), []
        for way, count in ways.items():
            step = SequenceStep([1] * CHUNK, span, span, pages, num_logits=1, num_by_library=count)
            cells.append(f"{way}: {1e3 * clock.seconds(partial(runner.forward, [step]), repeats):.3f}")
        yield f"  prompt, ms of {CHUNK} tokens after {context}  " + "  ".join(cells)


def draft_seconds(runner: ModelRunner, num_leaves: int, context: int, clock: Clock, repeats: int) -> float:
    """One tree step: forward, candidates of each leaf, and the way back to the host."""
    pages = runner.cache.allocate(pages_for(context + num_leaves))
    rows = range(context, context + num_leaves)
    positions = torch.arange(context + num_leaves).clamp_(max=context)
    visible, own = torch.arange(context + num_leaves) < context, [[row] for row in rows]
    step = SequenceStep([1] * num_leaves, [context] * num_leaves, rows, pages, num_leaves, visible, positions, own)
    where = {"vocab_size": runner.vocab_size, "device": runner.cache.keys[0].device}
    state = SamplerState(SamplingParams(temperature=0), 0, (1,), **where)
    leaves = [Row(state)] * num_leaves
    try:
        return clock.seconds(lambda: download(*draft_candidates(runner.forward([step]), leaves, 48)), repeats)
    finally:
        runner.cache.release(pages)


def plain_tokens_per_s(runner: ModelRunner, context: int, num_tokens: int, temperature: float) -> float:
    """One session through the target engine: decode tokens over their time, the prompt's step excluded."""
    times: list[float] = []

    def emit(events: list[FromTarget]) -> None:
        times.extend(time.perf_counter() for event in events if isinstance(event, Outcome))

    longest = context + num_tokens + PAGE_SIZE
    engine = TargetEngine(runner, emit, max_sessions=1, max_step_tokens=256, max_model_len=longest)
    engine.calibrate()
    sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    for session_id in ("first", "measured"):
        times.clear()
        prompt = tuple(7 + i % 250 for i in range(context))
        speculation = SpeculationParams(mode=Mode.PLAIN)
        engine.receive([OpenSession(session_id, 1, prompt, context, 0, sampling, speculation)])
        while engine.num_sessions:
            engine.step()
    return (len(times) - 1) / (times[-1] - times[0])


def report(name: str, device: str, args: argparse.Namespace, peak: float, clock: Clock) -> Iterator[str]:
    """The lines of one target, each as soon as it is measured."""
    made = make_model(name, device, getattr(torch, args.dtype))
    num_bytes = read_bytes(made)
    model = prepare(made, compile=args.compile and device == "cuda", attention=args.attention)
    longest = args.context + args.tokens + PAGE_SIZE
    num_pages = 2 * pages_for(longest) + 2
    floor = peak / num_bytes
    size = f"{model.size.num_parameters / 1e9:.2f} B parameters, {num_bytes / 1e9:.2f} GB read per token"
    yield f"{name}: {size}, floor {1e3 / floor:.3f} ms = {floor:.1f} tokens/s"
    limits = Limits(1, 64, pages_for(longest))
    for kind, runner in runners(model, num_pages, limits, args.eager):
        for temperature in (0.0, 1.0):
            rate = plain_tokens_per_s(runner, args.context, args.tokens, temperature)
            share = f"{rate:9.1f} tokens/s = {100 * rate / floor:5.1f} % of the floor's rate"
            yield f"  plain, {kind:7} temperature {temperature:g} {share}"
        times = [1e3 * step_seconds(runner, n, args.context, clock, args.repeats) for n in VERIFIED]
        cells = "  ".join(f"{n}: {ms:.3f} ({ms / times[0]:.2f} x)" for n, ms in zip(VERIFIED, times, strict=True))
        yield f"  step, {kind:7} ms by tokens  {cells}"
        yield f"  {kind}: {check_invariance(runner, model.max_len)}"
    yield from prompt_lines(model, min(model.max_len, LONGEST), clock, args.repeats)


def report_draft(device: str, args: argparse.Namespace, clock: Clock) -> Iterator[str]:
    """The lines of the embedded draft."""
    model = prepare(
        load_pretrained(Checkpoint.open(str(DRAFT_DIR)), getattr(torch, args.dtype)).to(device),
        compile=args.compile and device == "cuda",
    )
    limits = Limits(1, max(LEAVES), pages_for(args.context + 256), is_tree=True)
    yield f"embedded draft: {model.size.num_parameters / 1e6:.1f} M parameters"
    for kind, runner in runners(model, 2 * limits.max_pages + 2, limits, args.eager):
        times = [1e3 * draft_seconds(runner, n, args.context, clock, args.repeats) for n in LEAVES]
        cells = "  ".join(f"{n}: {ms:.3f}" for n, ms in zip(LEAVES, times, strict=True))
        yield f"  tree step, {kind:7} ms by leaves  {cells}"


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="grown-1B,grown-8B,llama-1B,llama-8B")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument(
        "--attention", choices=["auto", "sdpa", "triton", "flashinfer"], default="auto", help="of the targets"
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="no part of a model is compiled")
    parser.add_argument("--no-eager", dest="eager", action="store_false", help="only steps that are replayed")
    parser.add_argument("--context", type=int, default=256, help="tokens before the measured ones")
    parser.add_argument("--tokens", type=int, default=128, help="decoded for tokens/s")
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device was found: this benchmark is for one (--device cpu tries the script out)")
    clock = Clock(args.device)
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    peak = bandwidth(args.device, clock)
    kernel = ("" if args.attention == "auto" else f"-{args.attention}") + ("" if args.compile else "-eager")
    path = RESULTS / f"gpu-{re.sub('[^a-z0-9]+', '-', device_name.lower()).strip('-')}{kernel}.txt"
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if args.device == "cuda":
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    say(f"{device_name}, torch {torch.__version__}, transformers {transformers.__version__}, {args.dtype}")
    run = f"attention {args.attention}, context {args.context}, {args.tokens} tokens, medians of {args.repeats}"
    say(f"copy {peak / 1e9:.0f} GB/s, {run}")
    for line in report_draft(args.device, args, clock):
        say(line)
    for name in args.models.split(","):
        for line in report(name, args.device, args, peak, clock):
            say(line)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
