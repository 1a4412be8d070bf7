"""Compiles what lies between a model's matrix products on CUDA: norms, activations and rotary embeddings.

transformers computes each by up to a dozen kernels, and torch's mean takes a row's sum in an order that depends on the
number of rows. ``torch.compile`` makes one or two kernels of them, whose order is fixed. Only these parts are compiled,
each once for any number of tokens. A whole step would be compiled for several kinds of sizes, and a token's bits could
depend on the kind. The products stay cuBLASLt's, the attention is ours (``attention/triton.py``).

A call of a part costs the host more than the kernels it replaces, so steps that are not recorded as CUDA graphs become
slower. Nearly all steps are recorded (``buckets.py``).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import PreTrainedModel

from paceline.config import cache_dir

RANKS_ON_GPUS = "ranks on GPUs run eagerly"
"""Why nothing is compiled of a model that several GPUs share, as a clause."""
_ROTARY = "apply_rotary_pos_emb"
_MOST_VARIANTS = 64
"""Most variants of one function. Each dtype, size and rank of a model's modules makes one, and models of a family share
the function.
"""
_OPTIONS: dict[str, Any] = {"compile_threads": 1, "deterministic": True}
"""No pool of processes for a few kernels; none chosen by a timing, which another replica might decide otherwise."""


def compile_parts(model: PreTrainedModel) -> int:
    """Marks every part of ``model`` for compilation at its first run; returns the number of parts.

    A part is a module named ``...RMSNorm``, an ``...MLP`` of plain linear layers, or the rotary embedding of an
    attention module. transformers' classes call the latter by one name. What a rank exchanges (``parallel/model.py``)
    stays between the parts: a module that does so is none, nor one that calls it.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
    compiled = functools.cache(compiled_function)
    num_parts = 0
    for module in model.modules():
        forward: Any = inspect.unwrap(type(module).forward)
        if _exchanges(module):
            continue
        if _is_part(module):
            forward = compiled(forward)
        elif isinstance(forward, FunctionType) and _ROTARY in forward.__code__.co_names:
            forward = _calling(forward, compiled(forward.__globals__[_ROTARY]))
        else:
            continue
        module.forward = MethodType(forward, module)
        num_parts += 1
    return num_parts


def compiled_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, compiled for any number of tokens; under a dispatch mode, where torch compiles none, as it is."""
    quick = torch.compile(function, dynamic=True, options=_OPTIONS)

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        return (quick if _get_current_dispatch_mode() is None else function)(*arguments, **named)

    return run


def _is_part(module: torch.nn.Module) -> bool:
    name, children = type(module).__name__, [*module.children()]
    if any(_exchanges(child) for child in children):
        return False
    if name.endswith("RMSNorm"):
        return not children
    plain = [type(child) is torch.nn.Linear or not [*child.parameters()] for child in children]
    return name.endswith("MLP") and bool(children) and all(plain)


def _exchanges(module: torch.nn.Module) -> bool:
    """True if something was put around the module's forward."""
    return "forward" in vars(module)


def _calling(forward: FunctionType, rotary: Any) -> FunctionType:
    """``forward`` with another rotary embedding, for one module: other models of the class keep theirs."""
    names = {**forward.__globals__, _ROTARY: rotary}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return own
