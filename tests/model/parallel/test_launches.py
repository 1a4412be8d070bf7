"""Kernels that a rank's step launches, counted on meta tensors: what a CUDA graph of it holds."""

import collections
import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig
from transformers.initialization import no_init_weights

from paceline.model.compiled import parts
from paceline.model.kv_cache import KVCache, LayerSpec
from paceline.model.local_config import build
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.model import apply_plan
from paceline.model.parallel.plan import plan_shards
from paceline.model.step import Step

MOST = 26
"""Launches of a layer that a 70 B on four GPUs can afford: 80 layers in the time in which its weights are read."""
VIEWS = {
    *("view", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select"),
    *("split", "split_with_sizes", "unbind", "alias", "detach", "as_strided", "reshape", "narrow", "_reshape_alias"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
}
CONFIG = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
    vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=False,
)  # fmt: skip
"""Llama 70 B."""


class Launches(TorchDispatchMode):
    """Counts operators on meta tensors that are no views, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()
        self.part: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if self.part is None and name not in VIEWS and any(tensor.is_meta for tensor in tensors):
            self.counts[name] += 1
        return result

    @contextlib.contextmanager
    def counted_as(self, part: str, launches: int) -> Iterator[None]:
        """What is called inside is compiled to so many launches."""
        self.counts[part] += launches
        self.part = part
        yield
        self.part = None


class Exchange(Collectives):
    """One launch an exchange."""

    def __init__(self, degree: int, launches: Launches) -> None:
        super().__init__(1, degree, device=torch.device("meta"), timeout_s=1.0)
        self._launches = launches

    def all_gather(self, tensor: Tensor, *, timeout_s: float | None = None) -> Tensor:
        self._launches.counts["exchange"] += 1
        return tensor.new_empty(self.degree, *tensor.shape)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._launches.counts["exchange"] += 1
        return torch.empty_like(tensor)

    def close(self) -> None:
        """Nothing is open."""


class ManySteps(Exchange):
    """As over NCCL: a gather, a copy for each rank, and additions."""

    def all_gather(self, tensor: Tensor, *, timeout_s: float | None = None) -> Tensor:
        self._launches.counts["copy"] += self.degree
        return super().all_gather(tensor)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return Collectives.all_reduce(self, tensor)


def launches_of(num_layers: int, degree: int, monkeypatch: pytest.MonkeyPatch, exchange: type = Exchange) -> Launches:
    """Those of a step of 16 tokens in four rows."""
    launches = Launches()

    def attend(query: Tensor, *_: Any) -> Tensor:
        launches.counts["attention"] += 2
        return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])

    def write(*_: Any) -> None:
        launches.counts["attention"] += 1

    def compiled(function: Any) -> Any:
        """A norm is one kernel, a rotary embedding of queries and keys at most two."""

        def run(*args: Any, **named: Any) -> Any:
            with launches.counted_as("part", 2 if "rotary" in function.__name__ else 1):
                return function(*args, **named)

        return run

    kernel = SimpleNamespace(write_in_place=write, attend_in_place=attend)
    monkeypatch.setitem(sys.modules, "paceline.model.attention.triton", kernel)
    monkeypatch.setattr(parts, "compiled_function", compiled)
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": num_layers})
    plan = plan_shards(config, 1, degree)
    with torch.device("meta"), no_init_weights():
        model = build(plan.config, dtype=torch.bfloat16).eval()
    head, own = model.get_output_embeddings(), plan.vocab[1] - plan.vocab[0]
    head.weight = torch.nn.Parameter(torch.empty(own, CONFIG.hidden_size, dtype=torch.bfloat16, device="meta"))
    apply_plan(model, plan, exchange(degree, launches))
    parts.compile_parts(model)
    spec = LayerSpec(max(1, 8 // degree), 128, 128)
    cache = KVCache([spec] * num_layers, 64, torch.bfloat16, torch.device("meta"))

    def numbers(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.int64, device="meta")

    inputs = (*(numbers(1, 16) for _ in range(2)), numbers(16), numbers(32), numbers(32), numbers(4, 32))
    masks = [SimpleNamespace(by_library=None)]
    step = Step(model, "triton")
    with torch.no_grad(), launches:
        step(*inputs, numbers(4, 4), numbers(16), masks, cache.model_keys, cache.model_values)
    return launches


def of_a_layer(degree: int, monkeypatch: pytest.MonkeyPatch, exchange: type = Exchange) -> collections.Counter[str]:
    one, two = (launches_of(layers, degree, monkeypatch, exchange).counts for layers in (1, 2))
    return two - one


def test_a_layer_has_few_launches_at_any_degree(monkeypatch: pytest.MonkeyPatch) -> None:
    few = of_a_layer(2, monkeypatch)
    assert few["exchange"] == 2
    assert few["part"] == 4
    assert few["attention"] == 3
    assert few["mm"] == 7
    assert few.total() <= MOST
    assert of_a_layer(8, monkeypatch) == few


def test_exchanges_of_many_launches_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch for each rank: degree 8 exceeds what a layer may have."""
    assert of_a_layer(8, monkeypatch, ManySteps).total() > MOST
