"""Chains of steps, one after the other: the slow twin of ``CompiledPackage.run_chain``."""

import math
from bisect import bisect_right
from typing import Any

import torch

from paceline.core.noise import Stream, fast_gumbel_at
from paceline.model.chain import Chain, Draw, Ranked
from paceline.model.step_plan import unpack


class StepByStep:
    """A step that runs chains by itself, in torch."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.num_chains = 0

    def __call__(self, *inputs: Any) -> Any:
        return self.step(*inputs)

    def chains(self, dtype: torch.dtype) -> bool:
        return True

    def run_chain(self, chain: Chain, cache: Any, dtype: torch.dtype, window: int | None) -> Ranked:
        self.num_chains += 1
        ranked: Ranked = []
        draw, stop, path = chain.draw, chain.stop, chain.stop.path
        for depth in range(len(chain.writes) + 1):
            plan = chain.then if depth else chain.first
            if depth:
                self.place(chain, depth, ranked[-1][0][0])
            logits = self.step(*plan.inputs(cache, dtype, window))[0, 0].float()
            ids, scores = rank_row(draw, draw.position + depth, logits)
            if scores[0] == -math.inf:
                break
            ranked.append((ids, scores))
            total = sum(math.exp(score - scores[0]) for score in scores)
            gap = scores[0] - scores[1] if len(scores) > 1 else math.inf
            at = bisect_right(stop.edges, gap)
            path *= min(1.0, stop.correction * (stop.constants[at] + stop.slopes[at] * stop.mass / total))
            if path < stop.least:
                break
        return ranked

    def place(self, chain: Chain, depth: int, token_id: int) -> None:
        """Puts a token into the step that computes it."""
        it = unpack(chain.then.shape, chain.then.buffer)
        it.tokens[0], it.positions[0] = token_id, chain.draw.position + depth - 1
        it.write_rows[0] = chain.writes[depth - 1]
        it.visible[0, :, chain.rows[depth - 1]] = True


def rank_row(draw: Draw, position: int, logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """The ranked tokens of a row of logits [vocab], and their scores."""
    ids = torch.arange(len(logits))
    scores = logits.double()
    if draw.temperature > 0:
        x = (logits - logits.max()) / draw.temperature
        least = torch.maximum(x.topk(min(draw.top_k, len(x))).values[-1], torch.tensor(draw.log_min_p))
        log_q = torch.where(x < least, -math.inf, x).log_softmax(-1)
        key = torch.tensor([draw.seed_bits]), torch.tensor([position])
        noise = fast_gumbel_at(*key, Stream.COUPLED, ids[None])[0]
        scores = log_q.double() + noise
    order = sorted(ids.tolist(), key=lambda v: (-scores[v].item(), v))[: draw.fan_out]
    return order, scores[order].tolist()
