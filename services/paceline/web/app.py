"""The ASGI application: paths, keys, statuses; ``make_app`` over one ``Edge``.

GET  /health /ping /version /metrics     anybody
GET  / and what its page loads           anybody, unless it is switched off
GET  /v1/models, /v1/status,             who has a key, where there are keys
POST /v1/completions, /v1/chat/completions and its /batch, /v1/responses, /v1/messages, and the two that count tokens
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from paceline import __version__, logs
from paceline.errors import InvalidRequestError, NotFoundError, PacelineError
from paceline.router.preparation import Preparation
from paceline.types import Chunk, Result, check_request_id
from paceline.types import Request as Generation
from paceline.web import anthropic
from paceline.web import responses as responding
from paceline.web.anthropic_schema import CountBody, MessageBody
from paceline.web.bodies import Bodies, BodyBounds
from paceline.web.chat import ChatCompletion
from paceline.web.chat_batch import ChatBatch, ChatBatchBody
from paceline.web.choices import Item, run_all
from paceline.web.completions import Completion
from paceline.web.errors import ClientLeftError, body_of, to_http
from paceline.web.fields import Ignored
from paceline.web.guard import Guard, Load, Origins, allow_cors
from paceline.web.messages import ChatBody
from paceline.web.playground import add_playground
from paceline.web.responses_schema import ResponseBody
from paceline.web.schema import Body, CompletionBody, StreamOptions, read
from paceline.web.sending import Events, Json, LargeAnswers, check_prompt_logprobs, framed, shows_many
from paceline.web.service import Edge
from paceline.web.tokenization import DetokenizeBody, Text, TokenizeBody, Tokens

log = logging.getLogger(__name__)

_SMALL_BODY = 4096
"""Bytes up to which the event loop parses a body itself (1-2 ms), unless there is a chat template."""
_REQUEST_ID = "x-request-id"
_MAY_BE_NAMED = frozenset(
    name
    for kind in (CompletionBody, ChatBody, ResponseBody, MessageBody)
    for names in (kind.model_fields, kind.INERT, kind.RENAMED, kind.FORMS)
    for name in names
)


class Answer(Protocol):
    """The answer to one body."""

    requests: list[Generation]
    """One for each choice."""
    ends_with_done: bool
    """The last line of a stream is ``[DONE]``."""

    def take(self, i: int, item: Chunk | Result) -> Iterable[dict[str, Any]]:
        """Records a chunk or the result of choice ``i``; returns its events."""

    def finish(self) -> Iterable[dict[str, Any]]:
        """Returns the last events of a stream."""

    def body(self) -> dict[str, Any]:
        """The whole answer."""

    def failure(self, status: int, body: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """Returns the last events of a stream that fails; ``body``: OpenAI's body of the error."""


_A = TypeVar("_A", covariant=True)


class _Kind(Protocol[_A]):
    """Makes what answers a body."""

    def __call__(self, edge: Edge, body: Any, request_id: str, /) -> _A: ...


def make_app(edge: Edge) -> FastAPI:
    """The application. It may be mounted where other paths are served, too."""
    app = FastAPI(title="Paceline", version=__version__, docs_url=None, redoc_url=None)
    started, load = int(time.time()), Load()
    bodies, preparation = Bodies(BodyBounds.of(edge.service.info, edge.max_body_bytes)), Preparation()
    large = LargeAnswers()
    names = (edge.model_id, *edge.aliases)

    def caller_of(request: Request) -> str:
        return edge.access.identify(list(request.headers.items()))

    async def asked(request: Request, kind_of: Callable[[Any], tuple[_Kind[_A], type[Body]]]) -> tuple[Body, _A]:
        """The body of a request, and what answers it. ``kind_of``: tells by the body what does, and its type."""
        _request_id(request)
        data = await bodies.receive(request)

        def prepare() -> tuple[Body, _A]:
            parsed = bodies.parse(data)
            kind, body = kind_of(parsed)
            request.state.spelling = body.spelling(parsed) if isinstance(parsed, dict) else {}
            given = read(body, parsed, Ignored(strict=edge.strict_fields))
            if given.model and given.model not in names:
                raise _no_model(given.model, names)
            request_id = _request_id(request, given.request_id)
            given = given.with_word_ids(edge.service.info.tokenizer, edge.service.limits)
            if given.stream and given.stream_options is None and edge.force_include_usage:
                options = StreamOptions(include_usage=True, continuous_usage_stats=True)
                given = given.model_copy(update={"stream_options": options})
            return given, kind(replace(edge, model_id=given.model or edge.model_id), given, request_id)

        at_once = len(data) <= _SMALL_BODY and edge.chat is None
        given, made = prepare() if at_once else await preparation.run(len(data), prepare)
        given.ignored.warn()
        request.state.ignored = given.ignored.header
        return given, made

    async def answer(request: Request, kind_of: Callable[[Any], tuple[_Kind[Answer], type[Body]]]) -> Response:
        caller = caller_of(request)
        given, made = await asked(request, kind_of)
        requests = made.requests
        check_prompt_logprobs(requests)
        scores = any(one.sampling.prompt_logprobs is not None for one in requests)
        if given.stream_options is not None and given.stream_options.include_trace:
            requests = [replace(one, trace=True) for one in requests]
        if edge.trace_headers is not None:
            found = edge.trace_headers(request.headers.items())
            requests = [replace(one, trace_headers=found) for one in requests]
        items = run_all(edge, caller, requests, request.receive)
        headers = _id_headers(request)

        def take(i: int, item: Chunk | Result) -> None:
            for _ in made.take(i, item):
                pass

        if not given.stream:
            async with contextlib.aclosing(items):
                async for i, item in items:
                    if scores:
                        await large.run(partial(take, i, item))
                    else:
                        take(i, item)
            return await large.json(made.body, headers) if shows_many(requests) else Json(made.body(), headers=headers)
        try:
            first = await anext(items)  # a refused request is answered with a status, not with an event
        except BaseException:
            await items.aclose()
            raise
        return Events(
            _events(made, first, items, large if scores else None), headers=headers | {"cache-control": "no-cache"}
        )

    @app.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        """Says if a request would be served now."""
        trouble = edge.service.trouble
        return PlainTextResponse(f"{trouble or 'serving'}\n", 503 if trouble else 200)

    @app.post("/ping", response_class=PlainTextResponse, operation_id="ping_by_post")
    @app.get("/ping", response_class=PlainTextResponse)
    async def ping() -> Response:
        """Answers as ``/health`` does, under the name that SageMaker uses."""
        return await health()

    if edge.metrics is not None:
        page = edge.metrics

        @app.get("/metrics", response_class=PlainTextResponse)
        async def metrics(request: Request) -> Response:
            """The metrics, for Prometheus; metrics of API keys only for callers that may see them."""
            try:
                text = edge.access.visible(await page(), list(request.headers.items()))
                return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
            except PacelineError as error:
                return PlainTextResponse(f"{error}\n", 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of the service."""
        return {"version": __version__}

    @app.get("/load")
    async def server_load() -> dict[str, int]:
        """The number of requests in progress, as vLLM tells it."""
        return {"server_load": load.num_requests}

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "paceline",
            "root": edge.model_id,
            "parent": None,
            "max_model_len": edge.service.info.max_model_len,
        }

    if edge.status is not None:
        status_now = edge.status

        @app.get("/v1/status")
        async def status(request: Request) -> Response:
            """The pools, their replicas and sessions."""
            caller_of(request)
            return Json((await status_now()).as_json(), headers={"cache-control": "no-store"})

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """The model that is served."""
        caller_of(request)
        return {"object": "list", "data": [model(name) for name in names]}

    @app.get("/v1/models/{model_id:path}")
    async def one_model(request: Request, model_id: str) -> dict[str, Any]:
        """The model of this id."""
        caller_of(request)
        if model_id not in names:
            raise _no_model(model_id, names)
        return model(model_id)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continues prompts."""
        return await answer(request, lambda _: (Completion, CompletionBody))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answers chats."""
        return await answer(request, lambda _: (ChatCompletion, ChatBody))

    @app.post("/v1/chat/completions/batch")
    async def chat_batch(request: Request) -> Response:
        """Answers several chats, each by a choice."""
        return await answer(request, lambda _: (ChatBatch, ChatBatchBody))

    @app.post("/invocations")
    async def invocations(request: Request) -> Response:
        """Answers a chat or continues a prompt, whichever the body holds, by the name that SageMaker asks for."""

        def kind_of(body: Any) -> tuple[_Kind[Answer], type[Body]]:
            chats = isinstance(body, dict) and "messages" in body
            return (ChatCompletion, ChatBody) if chats else (Completion, CompletionBody)

        return await answer(request, kind_of)

    def respond(request: Request) -> Callable[[Any], tuple[_Kind[responding.Response], type[Body]]]:
        kind = partial(responding.Response, owner=caller_of(request))
        return lambda _: (kind, ResponseBody)

    @app.post(responding.PATH)
    async def responses(request: Request) -> Response:
        """Answers by items."""
        return await answer(request, respond(request))

    @app.post(f"{responding.PATH}/input_tokens")
    async def input_tokens(request: Request) -> Response:
        """Counts the tokens of the prompt of a response."""
        _, made = await asked(request, respond(request))
        counted = {"object": "response.input_tokens", "input_tokens": made.num_prompt_tokens}
        return Json(counted, headers=_id_headers(request))

    @app.get(f"{responding.PATH}/{{response_id}}")
    async def one_response(request: Request, response_id: str) -> Response:
        """A response that is kept."""
        data = responding.kept(edge, caller_of(request), response_id)
        return Response(data, headers=_id_headers(request), media_type="application/json")

    @app.delete(f"{responding.PATH}/{{response_id}}")
    async def forget_response(request: Request, response_id: str) -> Response:
        """Forgets a response that is kept."""
        caller = caller_of(request)
        if edge.responses is None or not edge.responses.delete(caller, response_id):
            raise responding.unknown(response_id)
        return Json({"id": response_id, "object": "response", "deleted": True}, headers=_id_headers(request))

    @app.post(f"{responding.PATH}/{{response_id}}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Refuses: a response that is kept has ended."""
        responding.kept(edge, caller_of(request), response_id)
        raise InvalidRequestError("Cannot cancel a synchronous response.")

    @app.post(anthropic.PATH)
    async def messages(request: Request) -> Response:
        """Answers chats in Anthropic's words."""
        return await answer(request, lambda _: (anthropic.Message, MessageBody))

    @app.post(f"{anthropic.PATH}/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """Counts the tokens of a chat in Anthropic's words."""
        caller_of(request)
        _, made = await asked(request, lambda _: (anthropic.Message, CountBody))
        return Json({"input_tokens": made.num_prompt_tokens}, headers=_id_headers(request))

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        """The special tokens by their roles, and the chat template, as vLLM tells them."""
        caller_of(request)
        template = None if edge.chat is None else edge.chat.source
        return Json({**edge.service.info.tokenizer.special_names, "chat_template": template})

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or a chat."""
        caller_of(request)
        _, made = await asked(request, lambda _: (Tokens, TokenizeBody))
        return Json(made.content, headers=_id_headers(request))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        caller_of(request)
        _, made = await asked(request, lambda _: (Text, DetokenizeBody))
        return Json(made.content, headers=_id_headers(request))

    if edge.playground:
        add_playground(app, edge.access)

    def refusal(request: Request, status: int, body: dict[str, Any], headers: Mapping[str, str]) -> Response:
        ids = _id_headers(request)
        if anthropic.PATH in request.url.path:
            body = anthropic.error_body(status, body["error"]["message"], ids[_REQUEST_ID])
        return Json(body, status, headers={**headers, **ids})

    @app.exception_handler(PacelineError)
    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientLeftError):
            return Response(status_code=499)
        status, body, headers = to_http(error, _MAY_BE_NAMED, getattr(request.state, "spelling", {}))
        return refusal(request, status, body, headers)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, headers = str(error.detail), error.headers or {}
        if error.status_code == 404:
            message = f"this path is not served: the paths are {', '.join(sorted(set(_paths(app))))}"
        if error.status_code == 405:
            methods = sorted(_methods(app, request.scope))
            message = f"the method is {request.method}: {' or '.join(methods)} is allowed"
            headers = {**headers, "Allow": ", ".join(methods)}
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        return refusal(request, error.status_code, body_of(message, kind), headers)

    origins = Origins(edge.cors_origins, edge.access.has_keys)
    app.add_middleware(Guard, refuse=refusal, load=load, origins=origins, hosts=edge.allowed_hosts)
    allow_cors(app, origins)
    return app


def _paths(app: FastAPI) -> Iterator[str]:
    """The paths that clients call, without the files of the page."""
    paths = (route.path for route in app.routes if hasattr(route, "path"))
    return (path for path in paths if not path.startswith("/playground/"))


def _methods(app: FastAPI, scope: Scope) -> set[str]:
    """The methods that the path of a request has."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    return {method for route in routes for method in route.methods or ()}


def _no_model(name: str, names: Sequence[str]) -> NotFoundError:
    served = " and ".join(map(repr, names))
    return NotFoundError(f"model is {name[:200]!r}: {served} {'is' if len(names) == 1 else 'are'} served")


def _id_headers(request: Request) -> dict[str, str]:
    """Returns headers with the request's id, OpenAI's and on its paths Anthropic's, and with the ignored fields of its
    body.
    """
    if not hasattr(request.state, "request_id"):  # it was refused before its id was read
        request.state.request_id = secrets.token_hex(16)
    request_id = request.state.request_id
    named = (_REQUEST_ID, "request-id") if anthropic.PATH in request.url.path else (_REQUEST_ID,)
    return {**dict.fromkeys(named, request_id), **getattr(request.state, "ignored", {})}


def _request_id(request: Request, given: str | None = None) -> str:
    """The id of a request: the client's in its header or, if it has none, ``given`` in its body, else a random one.

    Raises InvalidRequestError for one that is too long, or that no header can hold.
    """
    request_id: str = request.headers.get(_REQUEST_ID) or given or _id_headers(request)[_REQUEST_ID]
    if given and not (given.isascii() and given.isprintable()):
        raise InvalidRequestError(f"request_id is {given[:60]!a}: only printable ASCII characters are allowed")
    check_request_id(request_id)
    request.state.request_id = request_id
    return request_id


async def _events(
    answer: Answer, first: Item, items: AsyncGenerator[Item, None], large: LargeAnswers | None
) -> AsyncGenerator[bytes, None]:
    """``large``: makes the events, if they may be large."""

    def taken(item: Item) -> list[bytes]:
        return [framed(event) for event in answer.take(*item)]

    async with contextlib.aclosing(items):
        try:
            for data in taken(first) if large is None else await large.run(lambda: taken(first)):
                yield data
            async for item in items:
                for data in taken(item) if large is None else await large.run(partial(taken, item)):
                    yield data
            for event in answer.finish():
                yield framed(event)
            if answer.ends_with_done:
                yield b"data: [DONE]\n\n"
        except ClientLeftError:
            return
        except Exception as error:
            if not isinstance(error, PacelineError):
                logs.unexpected(log, error)
            status, body, _ = to_http(error)
            for event in answer.failure(status, body):
                yield framed(event)
