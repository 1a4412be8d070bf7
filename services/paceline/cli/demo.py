"""``paceline demo``: one question, answered by plain and by speculative decoding in turn; the tokens must be the same.

Starts the service, asks it over gRPC and stops it; with ``--local`` all engines run under this process instead. All
runs use the same running engines, and the modes alternate, so a machine that drifts does so for both. A model without
a chat template continues a prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from paceline.cli.drafting import is_embedded
from paceline.cli.exit import EXIT_DONE, EXIT_FAILED
from paceline.cli.flags import add_model_argument, take_model_argument
from paceline.cli.generate import add_engine_flags, local_config, write_text
from paceline.cli.startup import StartView
from paceline.cli.table import table
from paceline.client import Client
from paceline.cluster.ports import free_ports
from paceline.config.environment import without_settings
from paceline.errors import EngineError, InvalidRequestError
from paceline.logs import narrate
from paceline.types import Chunk, Generation, Mode, Result, SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from paceline.config import LocalConfig
    from paceline.local import LocalPipeline

PROMPT = "def read_file(path):\n"
"""For a model without a chat template; the embedded one writes Python."""
QUESTION = "Write a Python function that returns the larger of two numbers, with an example of its use."
_MODES = (Mode.PLAIN, Mode.OVERLAPPED)
_WARM_UP_TOKENS = 48
_STOP_S = 60.0
_MEANING = """\
tokens/s    median of the runs, fastest and slowest in brackets; the tokens of the first outcome are not counted
per step    tokens that one forward of the target yields: 1 by plain decoding
accepted    share of the drafted tokens that the target took"""
_HIT_RATE = "hit rate    how often a draft's next proposal was there when the target's step ended"
_FIRST = "first token {cold:.1f} s after the start (cold), {warm:.0f} ms after the request (warm, median)"
_SMALL_PAIR = """\
A step of the embedded target takes a few milliseconds, about as long as a step of its draft or a message between
them: there is little to gain here. At the cost of a larger target: paceline bench local --grow-target 150M"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline demo``."""
    parser.description = (
        "Starts the service, has it answer by plain and by speculative decoding in turn, and compares tokens and speed."
    )
    add_model_argument(parser)
    add_engine_flags(parser, "run both engines under this process instead of the service")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default 0: greedy")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each mode (default 3)")
    # All runs are of one model: one that was swapped between them would be compared with an eager one.
    parser.set_defaults(run=run_demo, background_compilation=False)


def run_demo(args: argparse.Namespace) -> int:
    """Runs ``paceline demo``. Returns 0 if all runs gave the same tokens."""
    from paceline.local import LocalPipeline

    take_model_argument(args)
    if args.repeats < 1:
        raise InvalidRequestError(f"--repeats is {args.repeats}: it must be at least 1")
    began = time.perf_counter()
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    results: dict[Mode, list[Result]] = {mode: [] for mode in _MODES}
    config = local_config(args)
    pipeline = LocalPipeline(config)
    pipeline.load()
    shown, prompt = _prompt(config)
    pipeline.encode(prompt, sampling)  # refuses what cannot be served before anything is started
    cold: list[float] = []
    warm: list[float] = []
    with _started(pipeline) if args.local else _service(args) as source:
        warm_up = SamplingParams(max_tokens=min(_WARM_UP_TOKENS, args.max_tokens))
        for mode in _MODES:
            for _ in _noting_first(source.generate(prompt, warm_up, SpeculationParams(mode=mode)), began, cold):
                pass
        for repeat in range(args.repeats):
            for mode in _MODES:
                asked = time.perf_counter()
                generation = source.generate(prompt, sampling, SpeculationParams(mode=mode))
                chunks = _noting_first(generation, asked, warm)
                if repeat == 0:
                    print(f"--- {mode.value} {'-' * (68 - len(mode.value))}")
                    sys.stdout.write(shown)
                    write_text(chunks, sys.stdout)
                for _ in chunks:
                    pass
                results[mode].append(generation.result)
    print("-" * 73)
    print(comparison(results, has_draft=config.draft is not None))
    print(_FIRST.format(cold=cold[0], warm=1000 * statistics.median(warm)))
    if is_embedded(args.target) and args.draft is None:
        print(f"\n{_SMALL_PAIR}\n")
    return _compare([result for mode in _MODES for result in results[mode]])


def _prompt(config: LocalConfig) -> tuple[str, str | Sequence[int]]:
    """Returns (text to show, prompt): a chat if the target has a template."""
    from paceline.checkpoint.chat import load_chat

    chat = load_chat(config.target.path, None, config.target.trust_remote_code)
    if chat is None:
        return PROMPT, PROMPT
    text = chat.render([{"role": "user", "content": QUESTION}], None, {"add_generation_prompt": True})
    return f"> {QUESTION}\n\n", chat.encode(text)


def _noting_first(chunks: Iterable[Chunk], since: float, seconds: list[float]) -> Iterator[Chunk]:
    """The chunks; when the first has come, appends the time since then to ``seconds``."""
    for i, chunk in enumerate(chunks):
        if i == 0:
            seconds.append(time.perf_counter() - since)
        yield chunk


class _Source(Protocol):
    """The service or the one-process pipeline."""

    def generate(
        self, prompt: str | Sequence[int], sampling: SamplingParams, speculation: SpeculationParams, /
    ) -> Generation: ...


@contextlib.contextmanager
def _started(pipeline: LocalPipeline) -> Iterator[_Source]:
    with contextlib.ExitStack() as stack:
        with StartView():
            stack.enter_context(pipeline)
        yield pipeline


@contextlib.contextmanager
def _service(args: argparse.Namespace) -> Iterator[_Source]:
    """``paceline serve`` with the same models on free ports, until the end of the block."""
    grpc_port, http_port = free_ports(2)
    command = [sys.executable, "-m", "paceline", "serve", "--host", "127.0.0.1"]
    command += ["--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    for name in ("target", "draft", "drafter", "dtype", "tensor_parallel_size", "cpu_threads", "placement"):
        if (value := getattr(args, name)) is not None:
            command += ["--" + name.replace("_", "-"), str(value)]
    if args.compile is not None:
        command.append("--compile" if args.compile else "--no-compile")
    command.append("--background-compilation" if args.background_compilation else "--no-background-compilation")
    command += [f"--{name}" for name in ("verbose", "quiet") if getattr(args, name)]
    narrate(f"starting the service: {' '.join(['paceline', *command[3:]])}")
    service = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=without_settings()
    )
    try:
        assert service.stdout is not None
        for line in service.stdout:
            narrate(line.rstrip())
            if line.strip() == "ready":
                break
        else:
            raise EngineError(f"the service could not be started: it ended with status {service.wait()}")
        with Client(f"127.0.0.1:{grpc_port}") as client:
            yield client
    finally:
        service.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.wait(_STOP_S)
        service.kill()
        service.wait()


def comparison(results: dict[Mode, list[Result]], *, has_draft: bool) -> str:
    """One line per mode, the ratio of the medians, and the meaning of the columns. Only a draft has a hit rate."""
    rows = [("", "tokens/s", "per step", "accepted", "hit rate")]
    medians = []
    for mode, runs in results.items():
        rates = [run.timing.tokens_per_s for run in runs]
        rounds, drafted, accepted, hits, misses = (
            sum(getattr(run.speculation, name) for run in runs)
            for name in ("rounds", "drafted", "accepted", "hits", "misses")
        )
        medians.append(statistics.median(rates))
        speed = f"{medians[-1]:.1f} ({min(rates):.1f} to {max(rates):.1f})"
        per_step = sum(run.usage.completion_tokens for run in runs) / max(rounds, 1)
        accepted_share = f"{accepted / drafted:.0%}" if drafted else "-"
        hit_rate = f"{hits / (hits + misses):.0%}" if hits + misses else "-"
        rows.append((mode.value, speed, f"{per_step:.2f}", accepted_share, hit_rate))
    if medians[0] > 0:
        rows.append(("speed-up", f"{medians[-1] / medians[0]:.2f}", "", "", ""))
    shown = rows if has_draft else [row[:-1] for row in rows]
    return "\n".join([*table(shown, sys.stdout), "", _MEANING, *([_HIT_RATE] if has_draft else [])])


def _compare(runs: list[Result]) -> int:
    reference = runs[0].token_ids
    for run in runs[1:]:
        if run.token_ids != reference:
            pairs = zip(reference, run.token_ids, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(run.token_ids)))
            print(f"tokens      DIFFERENT from position {first} on")
            return EXIT_FAILED
    print(f"tokens      identical in all {len(runs)} runs ({len(reference)} tokens each)")
    return EXIT_DONE
