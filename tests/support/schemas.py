"""JSON Schemas drawn by a seed, in the mix of public collections, and a vocabulary of JSON's pieces for tiny models."""

import functools
import itertools
import random
import string
from typing import Any

from tests.support.models import EOS, VOCAB
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from paceline.checkpoint.grammar import Grammars
from paceline.checkpoint.tokenizer import JsonTokenizer, Tokenizer

_WORDS = ("true", "false", "null", '{"', '":', '",', '"}', '"]', "},", "],", "[]", "{}", "0.", ",Ġ", ":Ġ", "id", "na")
_NAMES = ("id", "name", "size", "tags", "kind", "a", "b")


@functools.cache
def json_tokenizer() -> Tokenizer:
    """300 tokens: 10 special ones, printable ASCII, bytes of two other characters, and frequent pieces of JSON."""
    chars = [chr(i) for i in range(0x21, 0x7F)] + ["Ġ", "Ċ", *"Ã©âĤ¬"]
    pieces = [*_WORDS, *(f"{a}{b}" for a, b in itertools.product(string.digits, repeat=2))]
    pieces += [f"{a}{b}" for a, b in itertools.product(string.ascii_lowercase, "aeiou")]
    merges: dict[tuple[str, str], str] = {}
    for piece in pieces:
        for end in range(2, len(piece) + 1):
            merges.setdefault((piece[: end - 1], piece[end - 1]), piece[:end])
    words = list(dict.fromkeys([*(f"<{i}>" for i in range(10)), *chars, *merges.values()]))[:VOCAB]
    assert len(words) == VOCAB
    vocab = {word: i for i, word in enumerate(words)}
    kept = [pair for pair, merged in merges.items() if merged in vocab]
    backend = Backend(models.BPE(vocab=vocab, merges=kept))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel()
    backend.add_special_tokens([f"<{i}>" for i in range(10)])
    return Tokenizer("json pieces", JsonTokenizer(backend, f"<{EOS}>"))


@functools.cache
def json_grammars() -> Grammars:
    """Grammars over ``json_tokenizer``."""
    return Grammars(json_tokenizer(), VOCAB, (EOS,))


def schema(seed: int) -> dict[str, Any]:
    """A schema of any kind; nearly all have short instances."""
    rng = random.Random(f"schema {seed}")
    found = _object(rng, 2) if rng.random() < 0.6 else _any(rng, 2)
    if rng.random() < 0.2:
        part = {"$ref": "#/$defs/part"}
        found = {
            "type": "object",
            "properties": {"x": part, "y": found},
            "required": ["x"],
            "additionalProperties": False,
            "$defs": {"part": _any(rng, 1)},
        }
    return found


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_integer, _number, _string, _enum, lambda _: {"type": "boolean"}, lambda _: {"type": "null"}]
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(leaves)(rng)
    return rng.choice([_object, _object, _array, _union, _both])(rng, depth - 1)


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-20, 50)
    if rng.random() < 0.2:
        return {"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": rng.choice([2, 5, 12])}
    return {"type": "integer", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 300)}


def _number(rng: random.Random) -> dict[str, Any]:
    return {"type": "number", "minimum": rng.randint(-3, 0), "maximum": rng.choice([0.5, 1, 12.25])}


def _string(rng: random.Random) -> dict[str, Any]:
    shortest = rng.randint(0, 2)
    return rng.choice(
        [
            {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 5)},
            {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(ab|cd)+$", "^[A-Z][a-z]?-[0-9]{3}$", "x$"])},
            {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])},
            {"type": "string", "maxLength": 3, "description": "short"},
        ]
    )


def _enum(rng: random.Random) -> dict[str, Any]:
    values = ["red", "green", "re", 'a"b', "caf\u00e9", 7, -1.5, True, None, {"a": [1]}]
    return {"const": rng.choice(values)} if rng.random() < 0.3 else {"enum": rng.sample(values, rng.randint(1, 5))}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    found: dict[str, Any] = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    found["required"] = [name for name in names if rng.random() < 0.6]
    roll = rng.random()
    if roll < 0.7:
        found["additionalProperties"] = False
    elif roll < 0.85:
        found["patternProperties"] = {"^x[0-9]$": {"type": "boolean"}}
        found["additionalProperties"] = False
    else:
        found |= {"additionalProperties": {"type": "null"}, "maxProperties": len(names) + 1, "required": names}
    return found


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_any(rng, 0), _any(rng, depth)], "items": False, "minItems": 1}
    return {"type": "array", "items": _any(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _both(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 9)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 90}]}
