"""Quantized weights: where each method runs, its requirements and its memory. Free of torch.

A checkpoint may come quantized, by any method that transformers loads; or its weights are quantized while they are
loaded (``ModelOptions.quantization``). Either way what runs is the target, and speculation reproduces it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Method:
    """Requirements of transformers for loading weights of one method (its ``validate_environment``)."""

    packages: tuple[tuple[str, str], ...] = ()
    """Each by the name it is imported by and the name it is installed by."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Devices that its kernels run on, or that transformers dequantizes it for. Empty: it loads no such checkpoint."""


_ACCELERATE = ("accelerate", "accelerate")
_GPTQMODEL = ("gptqmodel", "gptqmodel")
_BITSANDBYTES = Method((("bitsandbytes", "bitsandbytes"), _ACCELERATE))

METHODS: dict[str, Method] = {
    "aqlm": Method((("aqlm", "aqlm[cpu]"), _ACCELERATE)),
    "auto-round": Method((("auto_round", "auto-round"), _ACCELERATE)),
    "awq": Method((_GPTQMODEL, _ACCELERATE)),
    "bitnet": Method((_ACCELERATE,)),
    "bitsandbytes_4bit": _BITSANDBYTES,
    "bitsandbytes_8bit": _BITSANDBYTES,
    "compressed-tensors": Method((("compressed_tensors", "compressed-tensors"),)),
    "eetq": Method((("kernels", "kernels"), _ACCELERATE), ("cuda",)),
    "fbgemm_fp8": Method((("fbgemm_gpu", "fbgemm-gpu"), _ACCELERATE), ("cuda",)),
    "fouroversix": Method((("fouroversix", "fouroversix"),), ("cuda",)),
    "fp8": Method(),
    "fp_quant": Method((("fp_quant", "fp_quant"), ("qutlass", "qutlass")), ("cuda",)),
    "gemma": Method(),
    "gguf": Method(devices=()),
    "gptq": Method((("optimum", "optimum"), _GPTQMODEL)),
    "higgs": Method((("flute", "flute-kernel"), _ACCELERATE), ("cuda",)),
    "hqq": Method((("hqq", "hqq"),), ("cuda",)),
    "metal": Method(),
    "mxfp4": Method(),
    "mxfp8": Method((_ACCELERATE,)),
    "nvfp4": Method(devices=()),
    "quanto": Method(devices=()),
    "quark": Method((("quark", "amd-quark"),)),
    "sinq": Method((("sinq", "sinq"),)),
    "spqr": Method((("spqr_quant", "spqr_quant[gpu]"), _ACCELERATE), ("cuda",)),
    "torchao": Method((("torchao", "torchao"),)),
    "vptq": Method((("vptq", "vptq"), _ACCELERATE), ("cuda",)),
}
"""Methods by their names in transformers' ``AUTO_QUANTIZATION_CONFIG_MAPPING``. Formats of ``packing.py`` need nothing
of this: they are dequantized while they are read."""


def method_of(config: Mapping[str, Any]) -> str:
    """The method that the ``quantization_config`` of a checkpoint names, as a key of ``METHODS`` if it is known."""
    method = config.get("quant_method", "bitsandbytes")
    method = str(getattr(method, "value", method))  # transformers has an enumeration of some
    if method == "bitsandbytes":
        return f"bitsandbytes_{'4bit' if config.get('load_in_4bit') else '8bit'}"
    return method


def require_method(path: str, method: str, device: str, *, is_here: bool = True) -> None:
    """Raises ConfigError in one sentence if the checkpoint at ``path``, quantized by ``method``, cannot run here.
    ``is_here``: False: it runs on another machine, whose packages are not known."""
    known = METHODS.get(method)
    subject = f"model {path!r} is quantized by {method!r}"
    if known is None:
        raise ConfigError(f"{subject}, which transformers does not know: use another checkpoint of this model")
    if not known.devices:
        raise ConfigError(f"{subject}, which transformers cannot load ready-made: use another checkpoint of this model")
    if device not in known.devices:
        needed = " or ".join(repr(name) for name in known.devices)
        raise ConfigError(f"{subject}, which needs device {needed}, and device is {device!r}: use another checkpoint")
    if is_here and (missing := [install for name, install in known.packages if not is_installed(name)]):
        names = f"package{'s' if missing[1:] else ''} {' and '.join(missing)}"
        remedy = f"pip install {' '.join(missing)}, or use another checkpoint"
        raise ConfigError(f"{subject}, which needs the {names}: {remedy}")


def require_quantization(quantization: str, path: str, method: str | None) -> None:
    """Raises ConfigError in one sentence if weights cannot be quantized while they are loaded.

    ``method``: what the checkpoint at ``path`` is quantized by already, if it is.
    """
    subject = f"quantization is {quantization!r}"
    if method is not None:
        raise ConfigError(
            f"{subject}, and model {path!r} is quantized by {method!r} already: set quantization to null to run it as "
            "it is, or name a checkpoint that is not quantized"
        )


def batch_dependence(config: Mapping[str, Any]) -> str | None:
    """Says why tokens of one step change each other's logits under the ``quantization_config``; None if they need not.

    A draft may do so. A target that does is not the same target when it verifies as when it decodes.
    """
    threshold = config.get("llm_int8_threshold", 6.0)
    if method_of(config) == "bitsandbytes_8bit" and threshold:
        return f"llm_int8_threshold is {threshold}: its outlier columns are taken from all tokens of a step together"
    return None


def weight_bytes_per_parameter(quantization: str | None, dtype: str) -> float:
    """Bytes that a number of a linear layer takes as it will run; ``dtype`` auto counts as bfloat16, the smallest.

    Scales and minima of 32 numbers are counted. The embedding keeps ``dtype``: call it with None for that.
    """
    if quantization is not None:
        return {"int8": 34 / 32, "int4": 20 / 32}[quantization]
    return 4 if dtype == "float32" else 2


def is_installed(name: str) -> bool:
    """True if a module can be imported."""
    return importlib.util.find_spec(name) is not None
