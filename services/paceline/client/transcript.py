"""One stream of a service: its messages become chunks, and in the end a Result or an error. Knows no connections."""

from __future__ import annotations

import time

import grpc

from paceline.errors import ConfigError, DeadlineExceededError, EngineError, PacelineError
from paceline.rpc import generation as api
from paceline.rpc.status import from_rpc_error, is_ours
from paceline.types import Chunk, FinishReason, Request, Result, SpeculationStats, Timing, Usage
from paceline.v1 import generation_pb2 as pb


class Transcript:
    """One stream as it comes in: its chunks, and in the end its Result or its error."""

    def __init__(self, request: Request, address: str, timeout_s: float | None) -> None:
        self.request = request
        self.over = False
        """True when no further message is to be awaited."""
        self.cancelled = False
        """True if this client cancelled the request: its end is an abort, whatever the connection reports."""
        self._address = address
        self._timeout_s = timeout_s
        self._result: Result | None = None
        self._error: PacelineError | None = None
        self._chunks: list[Chunk] = []
        self._num_tokens = 0
        self._prompt_tokens = 0 if isinstance(request.prompt, str) else len(request.prompt)
        self._cached_tokens = 0
        self._started_s = self._first_s = self._last_s = time.perf_counter()

    def feed(self, message: pb.GenerateResponse) -> Chunk | None:
        """Takes in one message and returns its chunk, if it has one. ``end`` must follow the last message."""
        kind = message.WhichOneof("response")
        try:
            if kind == "complete":
                self._result = api.complete_from_proto(message.complete, self._chunks)
            if kind != "chunk":  # or something that only newer clients know
                return None
            chunk = api.chunk_from_proto(message.chunk)
        except PacelineError as error:
            self.over, self._error = True, error
            return None
        self._last_s = time.perf_counter()
        if not self._chunks:
            self._first_s = self._last_s
        self._chunks.append(chunk)
        self._num_tokens += len(chunk.token_ids)
        self._prompt_tokens = message.chunk.prompt_tokens
        self._cached_tokens = message.chunk.cached_tokens
        return chunk

    def end(self, error: grpc.RpcError | None = None) -> None:
        """Closes the transcript: after the result, by a cancel, or too early."""
        self.over = True
        if self._result is not None:
            return
        if self.cancelled:
            self._result = self._aborted()
        elif error is None:
            self._error = EngineError(f"the service at {self._address} ended the stream without a result")
        else:
            self._error = explained(error, self._address, self._timeout_s, self._num_tokens)

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

    def _aborted(self) -> Result:
        """The result of a cancelled request: what has arrived, by this client's clock."""
        stats = SpeculationStats()
        for chunk in self._chunks:
            if chunk.round is not None:
                stats.add(chunk.round)
        decode_s = self._last_s - self._first_s
        num_later = self._num_tokens - len(self._chunks[0].token_ids) if self._chunks else 0
        first_s = self._first_s if self._chunks else time.perf_counter()
        assert self.request.sampling.seed is not None
        return Result(
            text="".join(chunk.text for chunk in self._chunks),
            token_ids=tuple(token_id for chunk in self._chunks for token_id in chunk.token_ids),
            logprobs=tuple(logprob for chunk in self._chunks for logprob in chunk.logprobs),
            finish_reason=FinishReason.ABORT,
            usage=Usage(self._prompt_tokens, self._num_tokens, self._cached_tokens),
            speculation=stats,
            timing=Timing(first_s - self._started_s, decode_s, num_later / decode_s if decode_s > 0 else 0.0),
            seed=self.request.sampling.seed,
        )


def explained(error: grpc.RpcError, address: str, timeout_s: float | None, num_tokens: int) -> PacelineError:
    """Returns the error to raise; one that no Paceline server sent is told where it happened."""
    found = from_rpc_error(error)
    if not is_ours(error):
        code, reason = error.code(), str(found).rpartition("Failed to connect to remote host: ")[2]
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
            found = DeadlineExceededError(f"the time limit of {timeout_s:g} s was over after {num_tokens} tokens")
        elif code is grpc.StatusCode.UNAVAILABLE and num_tokens == 0:
            found = EngineError(f"the service at {address} cannot be reached: {reason}")
        elif num_tokens and isinstance(found, EngineError):
            found = EngineError(f"the stream from {address} broke after {num_tokens} tokens: {reason}")
        elif code is grpc.StatusCode.UNIMPLEMENTED:
            found = ConfigError(f"the server at {address} is not a Paceline service of this version: {reason}")
    found.__cause__ = error
    return found
