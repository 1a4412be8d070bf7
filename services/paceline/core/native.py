"""Compiler of the package's C++ sources: once on each machine, kept in the cache folder."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from paceline.config import cache_dir
from paceline.errors import EngineError

_HEADERS = (Path(__file__).with_name("objects.h"),)
_COMPILERS = ("g++", "c++", "clang++")
COMPILE_LIMIT_S = 600.0
log = logging.getLogger(__name__)


def compiled(source: Path, digest: str, options: Sequence[str], purpose: str) -> Path:
    """Path of the shared library of ``source``, compiled if the cache has none. One process compiles at a time.

    Args:
        digest: part of the library's name; must differ wherever two compilations must not share a library.
        options: of the compiler.
        purpose: the library's name in the log.

    Raises:
        EngineError: there is no compiler, or it fails, with its first error; or the cache cannot be written.
    """
    path = library_path(source, digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(source, path, options, purpose)
    except OSError as error:
        raise EngineError(f"the cache {path.parent} cannot be written: {error.strerror or error}") from error
    return path


@dataclass(frozen=True)
class Library:
    """The shared library of a C++ source, for ctypes."""

    source: Path
    purpose: str
    """Its name in the log."""
    options: tuple[str, ...] = ()
    """Of the compiler, in addition to the common ones."""
    headers: tuple[Path, ...] = ()
    """Headers of the package that the source includes."""
    of_torch: bool = True
    """True: it uses the operators of torch."""

    @property
    def digest(self) -> str:
        """Digest of the sources, their options, the machine's instruction set and torch's version."""
        facts = f"{machine()} {self.options}"
        if self.of_torch:
            import torch

            facts = f"{torch.__version__} {facts}"
        sources = b"".join([path.read_bytes() for path in (self.source, *self.headers)])
        return hashlib.blake2b(sources + facts.encode(), digest_size=8).hexdigest()

    @property
    def is_compiled(self) -> bool:
        """True if ``load`` would compile nothing."""
        return library_path(self.source, self.digest).exists()

    def load(self, mode: int = ctypes.RTLD_LOCAL, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
        """The library, compiled if it never was. Raises EngineError with the reason if it cannot be had.

        ``mode``: ``RTLD_GLOBAL`` where compiled models look for its symbols.
        """
        included = [f"-I{path.parent}" for path in self.headers]
        options = (*self.options, *included, *(torch_options() if self.of_torch else ()))
        path = compiled(self.source, self.digest, options, self.purpose)
        try:
            return kind(str(path), mode=mode, use_errno=True)
        except OSError as error:
            raise EngineError(f"{path.name} could not be loaded: {error}") from error

    def load_or_warn(self, otherwise: str, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL | None:
        """``load``; None if that fails: the log says what happens ``otherwise``, and why."""
        try:
            return self.load(kind=kind)
        except EngineError as error:
            log.warning("%s, which is slower: %s", otherwise, error)
            return None


def extension(
    source: Path, name: str, purpose: str, headers: Sequence[Path] = (), options: Sequence[str] = ()
) -> ModuleType:
    """The extension module ``name`` that ``source`` defines, compiled as above.

    Args:
        headers: other headers that it includes.
        options: of the compiler, in addition to the common ones.

    Raises:
        EngineError: there are no headers of Python or no compiler, or it fails; with its first error.
        ImportError: the module cannot be loaded.
    """
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        raise EngineError(f"there is no Python.h in {include}")
    folders = dict.fromkeys(path.parent for path in (*_HEADERS, *headers))
    options = (f"-I{include}", *[f"-I{folder}" for folder in folders], "-ffp-contract=off", *options)
    facts = f"{machine()} {sysconfig.get_config_var('SOABI')} {options}"
    sources = b"".join(path.read_bytes() for path in (source, *_HEADERS, *headers))
    digest = hashlib.blake2b(sources + facts.encode(), digest_size=8).hexdigest()
    loader = ExtensionFileLoader(name, str(compiled(source, digest, options, purpose)))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def find_compiler() -> str | None:
    """The C++ compiler of the package's sources; None: there is none."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def library_path(source: Path, digest: str) -> Path:
    """Path that the shared library of ``source`` has in the cache, whether it is there or not."""
    return cache_dir() / "operators" / f"{source.stem}-{digest}.so"


def torch_options() -> tuple[str, ...]:
    """Compiler options of a library that uses the operators of this torch."""
    import torch

    include, lib = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    return (
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-L{lib}",
        f"-Wl,-rpath,{lib}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    )


def machine() -> str:
    """Processor and instruction set, part of the digest of libraries that are compiled for one machine alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        cpu = ""
    return f"{platform.machine()} {platform.processor()} {cpu}"


def has_avx512() -> bool:
    """True if torch would report AVX-512 for this machine's CPU; does not import torch."""
    return {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"} <= set(machine().split())


def packs_bfloat16() -> bool:
    """True if this machine has the instructions of the native products by packed weights: AVX512-BF16."""
    return "avx512_bf16" in machine().split()


def has_amx() -> bool:
    """True if this machine multiplies tiles of bfloat16: AMX."""
    return {"amx_tile", "amx_bf16"} <= set(machine().split())


def _compile(source: Path, path: Path, options: Sequence[str], purpose: str) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise EngineError(f"there is no C++ compiler ({', '.join(_COMPILERS)})")
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.so")
    command = [compiler, "-std=c++20", "-O3", "-shared", "-fPIC", str(source), "-o", str(temporary), *options]
    log.warning("compiling %s (once; later starts load it)", purpose)
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        temporary.rename(path)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        line = next((line for line in said.splitlines() if "error" in line), said.strip()[:200])
        raise EngineError(f"{compiler} could not compile {source.name}: {line}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
