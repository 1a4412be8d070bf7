"""Padding after the last real token, so that elementwise kernels compute all real tokens alike.

torch's vectorized kernels take a contiguous tensor as one flat range, two vectors at a time. They take its last ``n mod
32`` numbers one by one, by functions that round differently. Where the numbers of a token are no multiple of that,
which token ends in the tail depends on how many tokens the step has. Then a step ends with tokens that nobody reads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

_BYTES = 2 * 64
"""Bytes that a kernel takes at a time: two vectors, of AVX-512. Half of it with AVX2, which needs no other padding."""
_ROUNDED = {
    *("sigmoid", "log_sigmoid_forward", "silu", "mish", "glu", "hardswish", "gelu", "elu", "celu", "selu", "softplus"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "rsqrt", "erf", "erfc"),
    *("sin", "cos", "tan", "atan", "sinh", "cosh", "tanh", "asinh"),
}
"""Functions whose vectors are rounded unlike single numbers. Sums, products, quotients and roots are exact in both."""
_EXACT_IN_FLOAT32 = {"pow", "rsqrt"}


class SpareTokens(TorchDispatchMode):
    """Watches a forward and finds the padding tokens that each of its steps needs after the last real token."""

    def __init__(self, num_tokens: int) -> None:
        """``num_tokens``: of the forward that is watched."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._num_tokens = num_tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func``, and notes how many numbers a token has if it is an elementwise function that rounds."""
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        if name in _ROUNDED and isinstance(args[0], Tensor):
            self._note(args[0], exact=name in _EXACT_IN_FLOAT32 and args[0].dtype == torch.float32)
        return func(*args, **(kwargs or {}))

    def _note(self, x: Tensor, *, exact: bool) -> None:
        lanes, width = _BYTES // x.element_size(), x.numel() // self._num_tokens
        if not exact and width and width % lanes and x.is_floating_point() and x.is_contiguous():
            self.count = max(self.count, -(-(lanes - 1) // width))


def widen_narrow_layers(model: PreTrainedModel) -> None:
    """Makes linear layers with few outputs, such as a gate with one, compute one more, which is dropped.

    The outputs of two tokens are then not contiguous. So elementwise kernels take them token by token and need no
    padding, which would be many tokens. Also, a layer with one output is no longer a matrix-vector product, which the
    library splits by the number of tokens.
    """
    few = _BYTES // model.dtype.itemsize
    for module in model.modules():
        if type(module) is not nn.Linear or module.out_features >= few:
            continue
        # A rank's layer that exchanges its output, and a quantized one, stay as they are.
        if "forward" not in vars(module) and type(module.weight) is nn.Parameter:
            module.forward = partial(_wider, module)  # type: ignore[method-assign]


def _wider(module: nn.Linear, x: Tensor) -> Tensor:
    weight = F.pad(module.weight, (0, 0, 0, 1))
    return F.linear(x, weight, None if module.bias is None else F.pad(module.bias, (0, 1)))[..., :-1]
