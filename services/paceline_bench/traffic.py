"""Traffic of the benchmarks that put a service under stress: requests, what has to come, and what is wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.client import Tls
from paceline.local import LocalPipeline
from paceline.types import Acceptance, FinishReason, Mode, Result, SamplingParams, SpeculationParams
from paceline_bench.prompts import held_out_prompts, held_out_texts


@dataclass(frozen=True)
class Template:
    """A request that is sent again and again."""

    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationParams
    stop: tuple[str, ...]

    @property
    def claimed(self) -> bool:
        """True if its tokens have to be plain decoding's."""
        return self.sampling.temperature == 0 or self.speculation.acceptance is Acceptance.COUPLED


def service_of(
    models: Sequence[Path | str], engines: Sequence[Any], replicas: Sequence[int] = (1, 1)
) -> dict[str, Any]:
    """The configuration of a service: models, their engine options and numbers of replicas, target first."""
    return {
        f"{kind}_config": {
            "model_loading_config": {"model_id": f"stressed-{kind}", "model_source": str(model)},
            "engine_kwargs": engine,
            "deployment_config": {"num_replicas": count},
        }
        for kind, model, engine, count in zip(("target", "draft"), models, engines, replicas, strict=True)
    }


def tell(text: str) -> None:
    """Prints a line of a service that starts."""
    print(f"  {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Expected:
    """Result of plain decoding in one process."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched_stop: int | str | None


def make_templates(pipeline: LocalPipeline, count: int, max_tokens: int, rng: random.Random) -> list[Template]:
    """Requests of all kinds."""
    prompts: list[str | tuple[int, ...]] = [p.token_ids for p in held_out_prompts(pipeline.tokenizer, count, 1)]
    texts = list(held_out_texts().values())
    for i in range(0, count, 5):  # some as text
        text = rng.choice(texts)
        at = rng.randrange(len(text) - 400)
        prompts[i] = text[at : at + rng.randint(1, 400)]
    templates = []
    for prompt in prompts:
        temperature = rng.choice([0.0, 0.0, 0.5, 1.0, 1.3])
        sampling = SamplingParams(
            temperature=temperature,
            seed=rng.getrandbits(64),
            max_tokens=rng.choice([1, 2, max_tokens // 4, max_tokens // 2, max_tokens, max_tokens]) or 1,
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            ignore_eos=rng.random() < 0.8,
        )
        speculation = SpeculationParams(
            mode=rng.choice([Mode.OVERLAPPED] * 4 + [Mode.SEQUENTIAL, Mode.PLAIN]),
            acceptance=rng.choice([Acceptance.COUPLED] * 3 + [Acceptance.REJECTION]),
            max_draft_tokens=rng.choice([1, 3, 8, 8, 16]),
        )
        stop = rng.choice([(), (), (), ("\n\n",), ("return", "self."), (" = ", "(")])
        templates.append(Template(prompt, sampling, speculation, stop))
    return templates


def expect(pipeline: LocalPipeline, templates: Sequence[Template]) -> list[Expected]:
    """Expected results, by plain decoding."""
    plain = SpeculationParams(mode=Mode.PLAIN)
    running = [pipeline.submit(t.prompt, t.sampling, plain, t.stop) for t in templates]
    results = [generation.result for generation in running]
    return [Expected(r.token_ids, r.text, r.finish_reason, r.matched_stop) for r in results]


def fault_in(result: Result, expected: Expected, *, whole: bool) -> str | None:
    """Fault in a result that is claimed to be plain decoding's, with ``whole`` all of it; None if it is right."""
    if not whole:
        wrong = result.token_ids != expected.token_ids[: len(result.token_ids)]
        return "its tokens are no beginning of plain decoding's" if wrong else None
    if result.token_ids != expected.token_ids:
        return "its tokens are not plain decoding's"
    if result.text != expected.text:
        return "its text is not plain decoding's"
    if (result.finish_reason, result.matched_stop) != (expected.finish_reason, expected.matched_stop):
        return f"it ended by {result.finish_reason} {result.matched_stop!r} instead of {expected.finish_reason}"
    return None


class Wire:
    """A connection to the service that can break: it forwards bytes until ``cut``. An async context manager."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        """Resets both ends without a goodbye, for good."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, there[1]]
        for source, sink in ((reader, there[1]), (there[0], writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


def secured(folder: Path, key: str) -> tuple[dict[str, Any], dict[str, Any], Tls]:
    """Files of a service with TLS outside and inside and one API key: its ``server``, the rest of it, the client's."""
    import trustme  # of the development environment

    sections = []
    for name, of in (("public", "127.0.0.1"), ("internal", "internal.paceline")):
        authority = trustme.CA()
        issued = authority.issue_cert(of)
        files = {part: folder / f"{name}.{part}" for part in ("certificate", "key", "ca")}
        files["certificate"].write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        files["key"].write_bytes(issued.private_key_pem.bytes())
        files["ca"].write_bytes(authority.cert_pem.bytes())
        sections.append({part: str(file) for part, file in files.items()})
    public, internal = sections
    keys = folder / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text(json.dumps({"keys": [{"name": "soak", "sha256": hashlib.sha256(key.encode()).hexdigest()}]}))
    ca = Path(public.pop("ca"))
    return {"tls": public, "api_keys": str(keys)}, {"internal_tls": internal}, Tls(ca_file=ca)
