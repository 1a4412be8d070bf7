"""A real HTTP server with the OpenAI API, in a thread of its own, that answers as the name of the model says."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from aiohttp import web


class FakeOpenAI:
    """A context manager. Every answer has ``tokens`` tokens, two in each chunk but with ``single``. ``flaky`` refuses
    every second request for eight tokens."""

    def __init__(self, model: str = "good", tokens: int = 6, gap_s: float = 0.002) -> None:
        self.model, self.tokens, self.gap_s = model, tokens, gap_s
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)

    def __enter__(self) -> FakeOpenAI:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    def _main(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model}] if self.model != "none" else []})

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.model == "single":
            return web.Response(status=404)
        count = len(self.requests)
        return web.Response(
            text="# TYPE vllm:spec_decode_num_drafts_total counter\n"
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {count * 2}\n'
            f'vllm:spec_decode_num_drafts_total{{engine="1"}} {count}\n'
            f"vllm:spec_decode_num_draft_tokens_total {count * 12}\n"
            f"vllm:spec_decode_num_accepted_tokens_total {count * 6}\n"
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {count * 4}\n'
            "vllm:num_requests_running 1\n"
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        kind = body["model"]
        if kind == "500" or (kind == "flaky" and len(self.requests) % 2 and body["max_tokens"] == 8):
            return web.Response(status=500, text="out of order")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._stream(request, kind, "chat" in request.path, body)
        finally:
            self.at_once -= 1

    async def _stream(self, request: web.Request, kind: str, chat: bool, body: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)

        async def send(text: str) -> None:
            await answer.write(text.encode())

        total = min(self.tokens, body["max_tokens"])
        each = 1 if kind == "single" else 2
        await send(": a comment\n\n")
        if chat:
            await send('data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n')
        for seen in range(each, total + each, each):
            seen = min(seen, total)
            choice = {"delta": {"content": "ab"}} if chat else {"text": "ab"}
            event: dict[str, Any] = {"choices": [choice]}
            if kind in ("good", "flaky"):
                event["usage"] = {"completion_tokens": seen}
            await send(f"data: {json.dumps(event)}\n\n")
            await asyncio.sleep(self.gap_s)
            if kind == "malformed":
                await send('data: {"choices": [\n\n')
            if kind == "garbage":
                await send("hello\n\n")
            if kind == "error":
                await send('data: {"error": {"message": "the engine died"}}\n\n')
            if kind == "cut":
                return answer
        if kind != "uncounted":
            await send(f'data: {{"choices": [], "usage": {{"completion_tokens": {total}}}}}\n\n')
        await send("data: [DONE]\n\n")
        return answer
