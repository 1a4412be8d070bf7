"""Speculative decoding in its shortest form: the reference that everything else must equal.

One session, sequential, no KV cache, no batch. A ``Model`` maps a text of n token ids to logits [n, vocab_size].
The engines do the same with caches, trees, batches and two machines; the tests compare them with this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.core.processors import Grammar, Row, SamplerState
from paceline.core.sampling import process, sample_coupled
from paceline.types import SamplingParams, noise_key

Model = Callable[[Sequence[int]], Tensor]


def speculative_decode(
    target: Model,
    draft: Model,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    k: int,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    grammar: Grammar | None = None,
) -> list[int]:
    """The tokens after ``prompt``: the same for every ``draft`` and every ``k`` (0: plain decoding).

    ``grammar``: that of ``params.structured_output``, before the first token.
    """
    key = noise_key(seed, params.seed_scope, prompt)
    state = SamplerState(params, key, prompt, eos_token_ids=eos_token_ids, vocab_size=vocab_size, grammar=grammar)
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    output: list[int] = []

    def draw(model: Model, proposal: Sequence[int], num_tokens: int) -> list[int]:
        """Draws a token after the output and after each token of the proposal; returns the last ``num_tokens``.

        argmax(log p + g) is an exact sample of p, because g is Gumbel noise; and the same sample on every machine,
        because g depends on (key, position, token) alone.
        """
        rows = [Row(state, tuple(proposal[:i])) for i in range(len(proposal) + 1)][-num_tokens:]
        logits = model([*prompt, *output, *proposal])[-num_tokens:]
        return sample_coupled(process(logits, rows)).tolist()

    while len(output) < params.max_tokens and stop_ids.isdisjoint(output):
        proposal: list[int] = []
        for _ in range(k):  # the draft guesses what the target will draw, with the target's own noise
            proposal += draw(draft, proposal, 1)
        own = draw(target, proposal, k + 1)  # one forward: the target's token at all k + 1 places
        num_accepted = next((i for i in range(k) if proposal[i] != own[i]), k)
        outcome = own[: num_accepted + 1]  # what both drew, then the recovered or the bonus token
        output += outcome
        state.append(outcome)
    end = next((i + 1 for i, token in enumerate(output) if token in stop_ids), len(output))
    return output[: min(end, params.max_tokens)]
