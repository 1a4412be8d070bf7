"""One stream of a service: its messages become chunks, and in the end a Result or an error. Knows no connections."""

from __future__ import annotations

import time
from dataclasses import replace

import grpc

from paceline.client.retries import Retries
from paceline.errors import ConfigError, DeadlineExceededError, EngineError, PacelineError, RequestCancelledError
from paceline.rpc import generation as api
from paceline.rpc.status import from_rpc_error, is_lost, is_ours
from paceline.types import (
    Chunk,
    FinishReason,
    PromptLogprobs,
    Request,
    Result,
    SpeculationStats,
    Timing,
    TokenLogprob,
    Usage,
)
from paceline.v1 import generation_pb2 as pb


class Transcript:
    """One stream as it comes in: its chunks, and in the end its Result or its error."""

    def __init__(
        self, request: Request, message: pb.GenerateRequest, address: str, timeout_s: float | None, retries: Retries
    ) -> None:
        """``message`` is the request as it is sent first."""
        self.request = request
        self.over = False
        """True when no further message is to be awaited."""
        self.cancelled = False
        """True if this client cancelled the request: it then ends as aborted, even if the connection reports an
        error."""
        self.num_resumes = 0
        """Times that the request was sent again with tokens that had arrived."""
        self._message = message
        self._address = address
        self._timeout_s = timeout_s
        self._retries = retries
        self._result: Result | None = None
        self._error: PacelineError | None = None
        self._chunks: list[Chunk] = []
        self._num_tokens = self._num_first = 0
        self._scores: list[TokenLogprob | None] = []  # of the prompt's tokens, if they were asked for
        if request.sampling.prompt_logprobs is not None:
            self._scores.append(None)
        self._prompt_tokens = 0 if isinstance(request.prompt, str) else len(request.prompt)
        self._cached_tokens = 0
        self._started_s = self._first_s = self._last_s = time.perf_counter()

    def feed(self, message: pb.GenerateResponse) -> Chunk | None:
        """Records one message and returns its chunk, if it has one. ``end`` must follow the last message."""
        kind = message.WhichOneof("response")
        try:
            if kind == "complete":
                result = api.complete_from_proto(message.complete, self._chunks)
                result = self._with_scores(result)
                self._result = self._whole(result) if self.num_resumes else result
            if kind != "chunk":  # or something that only newer clients know
                return None
            chunk = api.chunk_from_proto(message.chunk)
            if self.num_resumes:
                self._check_count(message.chunk.completion_tokens, self._num_tokens + len(chunk.token_ids))
        except PacelineError as error:
            self.over, self._error = True, error
            return None
        if chunk.prompt_logprobs is not None:
            return self._feed_scores(chunk, chunk.prompt_logprobs)
        self._last_s = time.perf_counter()
        if not self._chunks:
            self._first_s, self._num_first = self._last_s, len(chunk.token_ids)
            self._prompt_tokens = message.chunk.prompt_tokens
            self._cached_tokens = message.chunk.cached_tokens
        self._chunks.append(chunk)
        self._num_tokens += len(chunk.token_ids)
        return chunk

    def _feed_scores(self, chunk: Chunk, logprobs: PromptLogprobs) -> Chunk | None:
        """Records log probabilities of the prompt, each once: a request that is sent again gets all of them again."""
        rest = logprobs.after(len(self._scores))
        if rest is None:
            return None
        self._scores += rest.tokens
        return replace(chunk, prompt_logprobs=rest)

    def _with_scores(self, result: Result) -> Result:
        """The result with the prompt's log probabilities. Raises EngineError if an older server sent none."""
        if self.request.sampling.prompt_logprobs is None:
            return result
        if len(self._scores) != result.usage.prompt_tokens:
            reason = (
                f"sent {len(self._scores) - 1} log probabilities of a prompt of {result.usage.prompt_tokens} tokens"
            )
            raise EngineError(f"the service at {self._address} {reason}")
        return replace(result, prompt_logprobs=tuple(self._scores))

    def _check_count(self, theirs: int, ours: int) -> None:
        """Raises EngineError if a server's count differs from the received tokens: an older one starts over instead."""
        if theirs != ours:
            reason = f"counts {theirs} tokens where {ours} have come: it cannot resume streams"
            raise EngineError(f"the service at {self._address} {reason}")

    def pause_s(self, error: grpc.RpcError) -> float | None:
        """Seconds until the request is to be sent again after its call has failed; None: ``end`` it with the error."""
        if self._result is not None or self.cancelled:
            return None
        return self._retries.pause_s(error, self._num_tokens)

    def next_call(self) -> tuple[pb.GenerateRequest, float | None]:
        """Returns the request as it is to be sent now, with the tokens that have arrived, and the time that is left."""
        message, left_s = self._message, self._timeout_s
        if self._num_tokens:
            self.num_resumes += 1
            message = pb.GenerateRequest()
            message.CopyFrom(self._message)
            message.generated_token_ids.extend(token_id for chunk in self._chunks for token_id in chunk.token_ids)
        if left_s is not None:
            left_s = max(left_s - (time.perf_counter() - self._started_s), 0.001)
        return message, left_s

    def end(self, error: grpc.RpcError | None = None, *, closed: bool = False) -> None:
        """Closes the transcript: after the result, by a cancel, or too early. ``closed``: by closing the client."""
        self.over = True
        if self._result is not None:
            return
        if self.cancelled:
            self._result = self._aborted()
        elif error is None and closed:
            self._error = RequestCancelledError("the client was closed")
        elif error is None:
            self._error = EngineError(f"the service at {self._address} ended the stream without a result")
        else:
            self._error = explained(error, self._address, self._timeout_s, self._num_tokens, closed=closed)

    def check(self) -> None:
        """Raises the error that the stream failed with, if it did."""
        if self._error is not None:
            raise self._error

    @property
    def result(self) -> Result:
        """The result of a stream that is over. Raises the error that it failed with."""
        self.check()
        assert self._result is not None
        return self._result

    def _whole(self, result: Result) -> Result:
        """The result of a resumed stream: a server reports the rounds and times of its own call only."""
        self._check_count(result.usage.completion_tokens, self._num_tokens)
        return replace(
            result,
            usage=replace(result.usage, cached_tokens=self._cached_tokens),
            speculation=self._speculation(),
            timing=self._timing(),
        )

    def _aborted(self) -> Result:
        """The result of a cancelled request: its tokens so far."""
        assert self.request.sampling.seed is not None
        return Result(
            text="".join(chunk.text for chunk in self._chunks),
            token_ids=tuple(token_id for chunk in self._chunks for token_id in chunk.token_ids),
            logprobs=tuple(logprob for chunk in self._chunks for logprob in chunk.logprobs),
            top_logprobs=tuple(place for chunk in self._chunks for place in chunk.top_logprobs),
            prompt_logprobs=tuple(self._scores),
            finish_reason=FinishReason.ABORT,
            usage=Usage(self._prompt_tokens, self._num_tokens, self._cached_tokens),
            speculation=self._speculation(),
            timing=self._timing(),
            seed=self.request.sampling.seed,
        )

    def _speculation(self) -> SpeculationStats:
        stats = SpeculationStats()
        for chunk in self._chunks:
            for round_ in chunk.rounds:
                stats.add(round_)
        return stats

    def _timing(self) -> Timing:
        """Times by this client's clock."""
        decode_s = self._last_s - self._first_s
        num_later = self._num_tokens - self._num_first
        first_s = self._first_s if self._chunks else time.perf_counter()
        return Timing(first_s - self._started_s, decode_s, num_later / decode_s if decode_s > 0 else 0.0)


_HTTP_1 = "Failed parsing HTTP/2 (Expected SETTINGS frame"
"""Part of the text with which gRPC tells that the other side speaks HTTP/1."""


def explained(
    error: grpc.RpcError, address: str, timeout_s: float | None, num_tokens: int, *, closed: bool = False
) -> PacelineError:
    """Returns the error to raise. The message of an error that no Paceline server sent also names the address.

    ``closed``: the client was closed, so a cancelled call is not a lost one.
    """
    found = from_rpc_error(error)
    if not is_ours(error):
        code, reason = error.code(), str(found).rpartition("Failed to connect to remote host: ")[2]
        lost = is_lost(error) and not (closed and code is grpc.StatusCode.CANCELLED)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
            found = DeadlineExceededError(f"the time limit of {timeout_s:g} s was over after {num_tokens} tokens")
        elif _HTTP_1 in reason:
            found = ConfigError(f"the port at {address} speaks HTTP: the service's gRPC port is needed, such as 9000")
        elif lost and num_tokens == 0:
            found = EngineError(f"the service at {address} cannot be reached: {reason}")
        elif num_tokens and (lost or isinstance(found, EngineError)):
            found = EngineError(f"the stream from {address} broke after {num_tokens} tokens: {reason}")
        elif code is grpc.StatusCode.UNIMPLEMENTED:
            found = ConfigError(f"the server at {address} is not a Paceline service of this version: {reason}")
    found.__cause__ = error
    return found
