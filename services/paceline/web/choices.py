"""The choices of one request: all run at once, and end together when one fails or the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from paceline.errors import RequestCancelledError
from paceline.types import MAX_SEED, Chunk, FinishReason, Request, Result, Round, SamplingParams, Timing, Trace, Usage
from paceline.web.errors import ClientLeftError
from paceline.web.service import Edge

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Item = tuple[int, Chunk | Result]
"""Index of a choice, and one of its chunks or its result."""
_TIMES = tuple(field.name for field in fields(Timing))


def with_seed(sampling: SamplingParams, i: int) -> SamplingParams:
    """Parameters of the ``i``-th choice of a prompt: choices have the seeds from the request's on."""
    if sampling.seed is None or not i:
        return sampling
    return sampling.model_copy(update={"seed": (sampling.seed + i) % (MAX_SEED + 1)})


def with_defaults(sampling: SamplingParams, max_model_len: int) -> SamplingParams:
    """Parameters of an answer, which may fill the context unless the request or the model says otherwise."""
    return sampling.with_defaults(SamplingParams(max_tokens=max_model_len))


async def run_all(edge: Edge, caller: str, requests: Sequence[Request], receive: Receive) -> AsyncGenerator[Item, None]:
    """Yields what all choices yield, as it comes. Each counts as a request of its caller's.

    Raises PacelineError, and ClientLeftError once ``receive`` says that the client has disconnected; no choice goes on
    then. Leaving the generator ends them, too.
    """
    queue: asyncio.Queue[Item | BaseException] = asyncio.Queue()
    edge.access.check_sequences(caller, len(requests))
    requests = [replace(one, share=caller or requests[0].request_id) for one in requests]
    with contextlib.ExitStack() as stack:
        charges = [stack.enter_context(edge.access.enter(caller)) for _ in requests]

        async def pump(i: int) -> None:
            try:
                async with contextlib.aclosing(edge.service.run(requests[i], caller, charges[i].note)) as items:
                    async for item in items:
                        if isinstance(item, Result) and item.finish_reason is FinishReason.ABORT:
                            raise RequestCancelledError("the request was cancelled")
                        queue.put_nowait((i, item))
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(pump(i), name="paceline-choice") for i in range(len(requests))]
        tasks.append(asyncio.create_task(_watch(receive, queue), name="paceline-client"))
        try:
            num_running = len(requests)
            while num_running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                num_running -= isinstance(item[1], Result)
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(receive: Receive, queue: asyncio.Queue[Item | BaseException]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    queue.put_nowait(ClientLeftError("the client has left"))


class Totals:
    """Token counts over all choices; the tokens of a prompt count once, however many choices it has."""

    def __init__(self, per_prompt: int) -> None:
        """``per_prompt``: choices of each prompt, at consecutive indices."""
        self._per_prompt = per_prompt
        self._usage: dict[int, Usage] = {}
        self._accepted: dict[int, int] = {}
        self._drafted: dict[int, int] = {}

    def begin(self, i: int, item: Chunk | Result) -> None:
        """Records the prompt of a choice; ``item`` is the first that it yields, and is yet to be noted."""
        assert item.usage is not None, "every chunk of a session has it"
        self._usage[i] = replace(item.usage, completion_tokens=0)

    def note(self, i: int, item: Chunk | Result) -> None:
        """Adds the counts of a chunk, or of the result, of choice ``i``."""
        assert item.usage is not None, "every chunk of a session has it"
        self._usage[i] = item.usage
        if isinstance(item, Result):
            self._accepted[i], self._drafted[i] = item.speculation.accepted, item.speculation.drafted
            return
        for one in item.rounds:
            self._accepted[i] = self._accepted.get(i, 0) + one.num_accepted
            self._drafted[i] = self._drafted.get(i, 0) + one.num_drafted

    def _prompts(self, name: str) -> int:
        first: dict[int, int] = {}
        for i, usage in sorted(self._usage.items()):
            first.setdefault(i // self._per_prompt, getattr(usage, name))
        return sum(first.values())

    def counts(self, responses: bool = False) -> dict[str, Any]:
        """Returns OpenAI's ``usage``. ``responses``: by the names of /v1/responses."""
        prompt, completion = self._prompts("prompt_tokens"), sum(u.completion_tokens for u in self._usage.values())
        accepted = sum(self._accepted.values())
        cached = {"cached_tokens": self._prompts("cached_tokens")}
        details = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(self._drafted.values()) - accepted,
        }
        names = ("input", "output") if responses else ("prompt", "completion")
        if responses:
            details["reasoning_tokens"] = cached["cache_write_tokens"] = 0
        return {
            f"{names[0]}_tokens": prompt,
            f"{names[1]}_tokens": completion,
            "total_tokens": prompt + completion,
            f"{names[0]}_tokens_details": cached,
            f"{names[1]}_tokens_details": details,
        }


def speculation_of(result: Result) -> dict[str, Any]:
    """Speculation of a finished choice: the extension field of its last event."""
    stats, timing = result.speculation, result.timing
    return {
        "seed": result.seed,
        **stats.counts(),
        "causes": {cause.value: count for cause, count in stats.causes.items()},
        "acceptance_histogram": {str(i): count for i, count in sorted(stats.acceptance_histogram.items())},
        "timing": {name: getattr(timing, name) for name in _TIMES},
    }


def metrics_of(requests: Sequence[Request], results: Sequence[Result | None]) -> dict[str, Any]:
    """vLLM's ``metrics`` of a finished answer: its times, and how its proposals were accepted if any was verified.

    Empty for several choices.
    """
    if len(results) != 1 or results[0] is None:
        return {}
    timing, num_tokens = results[0].timing, len(results[0].token_ids)
    metrics: dict[str, Any] = {
        "time_to_first_token_ms": timing.prefill_s * 1000,
        "generation_time_ms": timing.decode_s * 1000,
        "queue_time_ms": timing.queue_s * 1000,
    }
    if num_tokens > 1:
        metrics["mean_itl_ms"] = timing.decode_s / (num_tokens - 1) * 1000
    if (seconds := timing.prefill_s + timing.decode_s) > 0:
        metrics["tokens_per_second"] = num_tokens / seconds
    if results[0].speculation.acceptance_histogram:
        metrics["speculative_decoding"] = _acceptance_of(requests[0], results[0])
    return {"metrics": metrics}


def _acceptance_of(request: Request, result: Result) -> dict[str, Any]:
    stats = result.speculation
    histogram = stats.acceptance_histogram
    num_steps, longest = sum(histogram.values()), max(request.speculation.max_draft_tokens, *histogram)
    return {
        "mean_acceptance_length": 1 + stats.accepted / num_steps,
        "draft_acceptance_rate": stats.accepted / stats.drafted,
        "acceptance_histogram": [histogram.get(i, 0) for i in range(longest + 1)],
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": longest,
    }


def ended(choice: dict[str, Any], end: Mapping[str, Any]) -> None:
    """Adds the reason for its end to a choice of an event. Fields about its last round stay."""
    choice |= {**end, "speculation": {**choice.get("speculation", {}), **end["speculation"]}}


def round_of(chunk: Chunk) -> dict[str, Any]:
    """Returns the extension field of an event: which text of a chunk was drafted, and facts about its round."""
    found: dict[str, Any] = {"segments": [{"text": text, "drafted": drafted} for text, drafted in chunk.segments]}
    if chunk.round is not None:
        found["round"] = _facts_of(chunk.round)
    if chunk.earlier_rounds:
        found["earlier_rounds"] = [_facts_of(one) for one in chunk.earlier_rounds]
    if chunk.trace is not None:
        found["trace"] = _trace_of(chunk.trace)
    return found


def _facts_of(one: Round) -> dict[str, Any]:
    counts = {"drafted": one.num_drafted, "accepted": one.num_accepted}
    counts |= {"head_drafted": one.head_drafted, "head_accepted": one.head_accepted}
    counts |= {"lookup_drafted": one.lookup_drafted, "lookup_accepted": one.lookup_accepted}
    return {"cause": one.cause.value, **counts, "lookup": one.lookup, "head": one.head}


def _trace_of(trace: Trace) -> dict[str, Any]:
    """Returns the times of a round, and the nodes that the draft sent during it. docs/http.md describes the fields."""
    steps = [
        {
            "at_s": round(step.at_s, 6),
            "step_s": round(step.step_s, 6),
            "nodes": [
                [node.node_id, node.parent_id, node.token_id, node.text, round(node.prob, 4)] for node in step.nodes
            ],
        }
        for step in trace.steps
    ]
    return {
        "began_s": round(trace.began_s, 6),
        "ended_s": round(trace.ended_s, 6),
        "in_flight": list(trace.in_flight),
        "draft_opened_at": trace.draft_opened_at,
        "draft": steps,
    }
