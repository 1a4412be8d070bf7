"""The tokenizer of ``tiktoken.model``, a list of byte sequences with their ranks, as a ``tokenizer.json``.

Such files come with Python code that names the pattern which splits a text into pieces. The code is not run: it is
known by its name, and where it is there, its pattern is read and compared.
"""

from __future__ import annotations

import ast
import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.token_text import byte_alphabet
from paceline.errors import ConfigError

FILE = "tiktoken.model"
_NUM_RESERVED = 256
"""Ids of added tokens, after those of the file."""
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_WORD}{_UPPER}*{_LOWER}+{_ENDING}",
        f"{_WORD}{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Of Moonshot's models: Chinese characters apart from other letters, digits in threes."""
_CODE = re.compile(r"(tokenization_(?:kimi|moonshot))\.TikTokenTokenizer")
_PLAIN_SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
_REPLACED = ("auto_map", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
"""Settings that ``tokenizer.json`` has instead."""


def is_known(folder: Path, settings: Mapping[str, Any]) -> bool:
    """True for a directory whose one tokenizer is a ``tiktoken.model`` with the pattern that is known here.

    ``settings``: content of its tokenizer_config.json.
    """
    if not (folder / FILE).is_file() or (folder / "tokenizer.json").is_file():
        return False
    mapped = settings.get("auto_map")
    named = str(mapped.get("AutoTokenizer") if isinstance(mapped, Mapping) else mapped)
    if (code := _CODE.search(named)) is None:
        return False
    file = folder / f"{code[1]}.py"
    return not file.is_file() or _pattern_in(file) == PATTERN


def is_unknown(folder: Path) -> bool:
    """True for a directory whose one tokenizer is a ``tiktoken.model`` that nothing says how to read."""
    return (folder / FILE).is_file() and not (folder / "tokenizer.json").is_file()


def _pattern_in(file: Path) -> str | None:
    """The value of ``pat_str`` in Python code, a string or a join of strings; None if it has no such line."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "pat_str" for to in node.targets):
            value = node.value
            parts = value.args[0] if isinstance(value, ast.Call) and len(value.args) == 1 else value
            try:
                found = ast.literal_eval(parts)
                return found if isinstance(found, str) else "|".join(found)
            except (TypeError, ValueError):
                return None
    return None


def converted(folder: Path, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The content of ``tokenizer.json``, and of the tokenizer_config.json next to it.

    Raises:
        ConfigError: the file or the settings are damaged, tokens are added outside the ids after its own, or two have
            one text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    ranks = _ranks(folder / FILE)
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    spelled = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    merges = [(spelled[first], spelled[second]) for first, second in merges_of(ranks)]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    splits = [pre_tokenizers.Split(Regex(PATTERN), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    added = _added(settings, len(ranks), str(folder))
    backend.add_tokens([AddedToken(text, normalized=False, special=special) for text, special in added])
    for token_id, (text, _) in enumerate(added, len(ranks)):
        if backend.token_to_id(text) != token_id:  # a text is added once, so all later ids would be others
            raise ConfigError(
                f"tokenizer_config.json of {str(folder)!r} adds {text!r} as token {token_id}: a text that no other "
                "token has is needed"
            )
    kept = {key: value for key, value in settings.items() if key not in _REPLACED}
    return backend.to_str(), kept | _PLAIN_SETTINGS


def _ranks(file: Path) -> dict[bytes, int]:
    """Byte sequences and their ranks, which are their ids. Raises ConfigError unless each id has one."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError, binascii.Error) as error:
        raise ConfigError(f"{str(file)!r} is damaged: lines of a token in base64 and its rank are needed") from error
    if sorted(ranks.values()) != [*range(len(ranks))] or any(bytes([one]) not in ranks for one in range(256)):
        raise ConfigError(f"{str(file)!r} is damaged: ranks from 0 without a gap are needed, of all 256 bytes too")
    return ranks


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Pairs of tokens that make a token, lowest rank first: the order in which tiktoken joins them."""
    found = []
    for token, rank in ranks.items():
        for place in range(1, len(token)):
            first, second = ranks.get(token[:place]), ranks.get(token[place:])
            if first is not None and second is not None:
                found.append((rank, first, second, token[:place], token[place:]))
    return [pair[3:] for pair in sorted(found)]


def _added(settings: Mapping[str, Any], first: int, where: str) -> list[tuple[str, bool]]:
    """Texts of the added tokens in the order of their ids, and whether each is special."""
    decoder, listed = (settings.get(key) or {} for key in ("added_tokens_decoder", "additional_special_tokens"))
    try:
        given = {int(token_id): (_text(token), bool(token.get("special"))) for token_id, token in decoder.items()}
        special = {_text(token) if isinstance(token, Mapping) else token for token in listed}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"added tokens in tokenizer_config.json of {where!r} are damaged"
        raise ConfigError(f"{what} ({type(error).__name__}: {error})") from error
    if wrong := [one for one in given if not first <= one < first + _NUM_RESERVED]:
        raise ConfigError(
            f"tokenizer_config.json of {where!r} adds a token with id {wrong[0]}: {first} to "
            f"{first + _NUM_RESERVED - 1} are allowed"
        )
    found = [given.get(at, (f"<|reserved_token_{at}|>", True)) for at in range(first, first + _NUM_RESERVED)]
    return [(text, is_special or text in special) for text, is_special in found]


def _text(token: Mapping[str, Any]) -> str:
    text = token["content"]
    if not isinstance(text, str):
        raise TypeError(f"content is {text!r}: a string is needed")
    return text
