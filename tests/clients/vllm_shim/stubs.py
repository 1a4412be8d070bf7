"""Modules ``vllm.*`` for tests that import them: what reaches no server is a stub, and whatever calls it is skipped."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CHECKPOINT = os.environ.get("CLIENTS_CHECKPOINT", "")
OWN_CODE = "needs vLLM's own code"
"""Begins the reason of each test that calls a stub."""


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and all(callable(arg) for arg in args) and not kwargs:
            return args[0]  # a decorator
        if "PYTEST_CURRENT_TEST" not in os.environ:  # while modules are imported
            return stub(cls.__qualname__)
        pytest.skip(f"{OWN_CODE}: {cls.__qualname__}")

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __add__(cls, other: Any) -> Any:
        pytest.skip(f"{OWN_CODE}: {cls.__qualname__}")

    __sub__ = __mul__ = __gt__ = __lt__ = __add__


def stub(name: str) -> Any:
    """A class that can be imported, named in annotations and derived from; calling it skips the test."""
    return _Meta(name.rsplit(".", 1)[-1], (), {"__qualname__": name, "__module__": "vllm"})


class _Tokenizer:
    """The tokenizer of the checkpoint that is served, whatever model a test names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from tokenizers import Tokenizer

        self._own = Tokenizer.from_file(f"{CHECKPOINT}/tokenizer.json")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._own.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._own.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str) -> int:
        return int(self._own.token_to_id(token))


class _ModelConfig:
    """What tests ask of the model's configuration: the number of tokens that logits have."""

    def __init__(self, **_: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return 151_936


GIVEN: dict[str, Any] = {
    "torch.iinfo": lambda kind: SimpleNamespace(min=-(1 << 63), max=(1 << 63) - 1),
    "vllm.platforms.current_platform": SimpleNamespace(
        is_rocm=lambda: False,
        is_cuda=lambda: False,
        is_xpu=lambda: False,
        is_cpu=lambda: True,
        is_tpu=lambda: False,
        device_type="cpu",
    ),
    "vllm.config.ModelConfig": _ModelConfig,
    "vllm.tokenizers.get_tokenizer": _Tokenizer,
    "vllm._aiter_ops.is_aiter_found_and_supported": lambda: False,
    "vllm.transformers_utils.repo_utils.hf_api": lambda: SimpleNamespace(
        snapshot_download=lambda *args, **kwargs: "lora-that-is-not-there"
    ),
}


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if self.__name__ == "vllm.exceptions":
            return GIVEN.setdefault(full, type(name, (Exception,), {}))
        if full in GIVEN:
            return GIVEN[full]
        made = stub(full)
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of the packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = set(packages)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def install(packages: Sequence[str]) -> None:
    """Puts the stubs behind all modules that are there."""
    sys.meta_path.append(Finder(packages))
