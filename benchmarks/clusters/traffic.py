"""Clients outside of the cluster: streams without a pause, every message with its time, until a file appears.

    python benchmarks/clusters/traffic.py ROUTER:9000 HEAD OUTPUT.jsonl STOP_FILE --streams 3

Each client asks the same request over and over; the first time plain and undisturbed, which gives the tokens that all
later streams must have. Lines of the output: {"t": seconds since 1970, "kind": ...} with
``message`` (client, tokens, drafted), ``end`` (client, identical or an error), ``pools`` (ready replicas of each
pool and their ids, sessions of the target on each node) and ``nodes`` (state of each address, as the head sees it) when
they change.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
import urllib.request
from pathlib import Path
from typing import Any, TextIO

from paceline.client import AsyncClient
from paceline.errors import PacelineError
from paceline.types import Mode, SamplingParams, SpeculationParams
from paceline_bench.prompts import held_out_texts

PROMPT_CHARACTERS = 400
POLL_S = 0.5


class Traffic:
    """All clients, and what they saw."""

    def __init__(self, args: argparse.Namespace, output: TextIO) -> None:
        self._args, self._output = args, output
        self._stop = Path(args.stop)
        self._references: dict[int, tuple[int, ...]] = {}

    def _note(self, kind: str, **fields: Any) -> None:
        self._output.write(json.dumps({"t": round(time.time(), 4), "kind": kind, **fields}) + "\n")
        if kind != "message":
            self._output.flush()

    async def run(self) -> None:
        async with AsyncClient(self._args.address) as client:
            await client.wait_ready(240.0)
            text = "".join(text for _, text in sorted(held_out_texts().items()))
            prompts = [text[index * PROMPT_CHARACTERS :][:PROMPT_CHARACTERS] for index in range(self._args.streams)]
            references = [self._stream(client, index, prompt, Mode.PLAIN) for index, prompt in enumerate(prompts)]
            self._references = dict(enumerate(await asyncio.gather(*references)))
            self._note("begin", tokens=[len(tokens) for tokens in self._references.values()])
            loops = [asyncio.create_task(self._client(client, index, text)) for index, text in enumerate(prompts)]
            watches = [asyncio.create_task(self._pools(client)), asyncio.create_task(self._nodes())]
            await asyncio.gather(*loops)
            for watch in watches:
                watch.cancel()

    async def _client(self, client: AsyncClient, index: int, text: str) -> None:
        while not self._stop.exists():
            try:
                tokens = await self._stream(client, index, text, Mode.OVERLAPPED)
                self._note("end", client=index, identical=tokens == self._references[index], tokens=len(tokens))
            except PacelineError as error:
                self._note("end", client=index, error=f"{type(error).__name__}: {error}"[:200])
                await asyncio.sleep(0.5)

    async def _stream(self, client: AsyncClient, index: int, text: str, mode: Mode) -> tuple[int, ...]:
        sampling = SamplingParams(
            max_tokens=self._args.max_tokens, temperature=0.0 if index % 2 else 0.7, seed=index + 1, ignore_eos=True
        )
        tokens: list[int] = []
        async for chunk in client.generate(
            text, sampling, SpeculationParams(mode=mode), timeout_s=self._args.timeout_s
        ):
            tokens += chunk.token_ids
            if mode is not Mode.PLAIN:
                drafted = sum(each.num_drafted for each in chunk.rounds)
                self._note("message", client=index, tokens=len(chunk.token_ids), drafted=drafted)
        return tuple(tokens)

    async def _pools(self, client: AsyncClient) -> None:
        last = None
        while True:
            with contextlib.suppress(PacelineError):
                info = await client.server_info(timeout_s=3.0)
                counts = {name: len(replicas) for name, replicas in info.pools.items()}
                sessions = {replica.node: replica.num_sessions for replica in info.pools.get("target", ())}
                ids = {name: sorted(each.replica_id for each in replicas) for name, replicas in info.pools.items()}
                if (pools := {"counts": counts, "sessions": sessions, "ids": ids}) != last:
                    self._note("pools", **pools)
                    last = pools
            await asyncio.sleep(POLL_S)

    async def _nodes(self) -> None:
        token = Path("~/.ray/auth_token").expanduser().read_text().strip()
        request = urllib.request.Request(
            f"http://{self._args.head}:8265/api/v0/nodes", headers={"Authorization": f"Bearer {token}"}
        )
        last = None
        while True:
            try:
                answer = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=2.0).read())
                rows = json.loads(answer)["data"]["result"]["result"]
                living = [row["node_ip"] for row in rows if row["state"] == "ALIVE"]
                states = {row["node_ip"]: "DEAD" for row in rows} | dict.fromkeys(living, "ALIVE")
            except (OSError, ValueError, KeyError, TypeError):
                states = {}
            if states != last:
                self._note("nodes", states=states)
                last = states
            await asyncio.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("address", help="HOST:PORT of a router's machine")
    parser.add_argument("head", help="address of the head, for its view of the nodes")
    parser.add_argument("output", type=Path)
    parser.add_argument("stop", help="file that ends it")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of a stream: one that hangs is an error")
    args = parser.parse_args()
    with args.output.open("w") as output:
        asyncio.run(Traffic(args, output).run())


if __name__ == "__main__":
    main()
