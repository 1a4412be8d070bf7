"""The tokenizer of a GGUF file as a checkpoint's files: tokenizer.json, its settings, the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+END|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*END"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _WORDS.replace("END", "")
_GPT4O = _WORDS.replace("END", f"{_CONTRACTIONS}?").replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_DIGITS = r"\p{N}"
_SPLITS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "mellum", "exaone4", "a.x-4.0"): (_GPT2,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): (_DIGITS, _GPT2),
    ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"): (_QWEN2,),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): (
        _LLAMA3,
    ),
    ("tekken",): (_TEKKEN,),
    ("gpt-4o", "llama4", "kanana2"): (_GPT4O,),
}
"""``tokenizer.ggml.pre`` -> the patterns that split a text before tokens are merged."""
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken")
"""Pre-tokenizers that begin with BOS and keep a piece that is a token whole, whatever its merges give."""
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|return|>", "<|call|>")
"""Tokens that end a turn in the templates that write them."""


def tokenizer_files(metadata: Mapping[str, Any], vocab_size: int, what: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The content of files by their names, and the content of tokenizer_config.json.

    Args:
        metadata: that of the file.
        vocab_size: rows of the embedding.
        what: the file, for messages.

    Raises:
        ConfigError: there is no tokenizer, or one of a kind that is not read.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(f"{what} holds no tokenizer.ggml.tokens: a model with its tokenizer is needed")
    if len(tokens) > vocab_size:
        raise ConfigError(
            f"{what} holds {len(tokens)} tokens and {vocab_size} embeddings: each token needs an embedding"
        )
    if kind not in ("gpt2", "llama"):
        raise ConfigError(f"tokenizer.ggml.model is {kind!r} in {what}: gpt2 and llama are read")
    try:
        backend = (_byte_level if kind == "gpt2" else _sentencepiece)(metadata, what)
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises nothing more special
        reason = str(error).strip() or type(error).__name__
        raise ConfigError(f"{what} holds a tokenizer that cannot be made: {reason}") from error
    _add_tokens(backend, metadata, tokens, what)
    roles = {role: _token(metadata, key, tokens, what) for role, key in _ROLES.items()}
    _frame(backend, metadata, roles)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{role: token for role, token in roles.items() if token is not None},
    }
    files = {"tokenizer.json": backend.to_str()}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        files["chat_template.jinja"] = template
    for name in metadata.get("tokenizer.chat_templates") or ():
        if isinstance(other := metadata.get(f"tokenizer.chat_template.{name}"), str):
            files[f"additional_chat_templates/{name}.jinja"] = other
    return files, settings


_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer: EOS, and ends of turns that the file names or its chat template writes."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    found = dict.fromkeys(one for one in named if isinstance(one, int))
    template = str(metadata.get("tokenizer.chat_template", ""))
    types = metadata.get("tokenizer.ggml.token_type") or ()
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind == _CONTROL and token in _ENDS and token in template:
            found[token_id] = None
    return [*found]


def _token(metadata: Mapping[str, Any], key: str, tokens: list[str], what: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ConfigError(f"tokenizer.ggml.{key}_token_id is {token_id!r} in {what}: below {len(tokens)} is needed")
    return tokens[token_id]


def _byte_level(metadata: Mapping[str, Any], what: str) -> Any:
    """BPE over bytes, which are written as printable characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre")
    splits = next((patterns for names, patterns in _SPLITS.items() if pre in names), None)
    if splits is None:
        known = ", ".join(sorted(name for names in _SPLITS for name in names))
        raise ConfigError(f"tokenizer.ggml.pre is {pre!r} in {what}: {known} are read")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ConfigError(f"{what} holds no tokenizer.ggml.merges: a tokenizer of kind gpt2 needs them")
    model = models.BPE(
        vocab={token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])},
        merges=[_pair(merge, what) for merge in merges],
        ignore_merges=pre in _WHOLE_FIRST,
    )
    backend = Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits]
    steps.append(
        pre_tokenizers.ByteLevel(
            add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix")), use_regex=False
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str, what: str) -> tuple[str, str]:
    first, space, second = merge[1:].partition(" ")  # the first character may be a space
    if not space:
        raise ConfigError(f"{what} holds the merge {merge!r}: two tokens with a space between them are needed")
    return merge[0] + first, second


def _sentencepiece(metadata: Mapping[str, Any], what: str) -> Any:
    """BPE over characters with a token for each byte, by transformers' own conversion."""
    from tokenizers import decoders, pre_tokenizers
    from transformers.integrations.gguf import convert_gguf_tokenizer

    arch = str(metadata.get("general.architecture"))
    content = {key: metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "scores", "merges")}
    if not content["scores"] and not content["merges"]:
        raise ConfigError(f"{what} holds no tokenizer.ggml.scores: a tokenizer of kind llama needs them")
    given = {key: value for key, value in content.items() if value}
    backend, _ = convert_gguf_tokenizer(arch, {"tokenizer_type": "llama", **given})
    if metadata.get("tokenizer.ggml.add_space_prefix") is False and not arch.startswith("gemma"):
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _add_tokens(backend: Any, metadata: Mapping[str, Any], tokens: list[str], what: str) -> None:
    """Makes control tokens special and user-defined ones whole."""
    from tokenizers import AddedToken

    types = metadata.get("tokenizer.ggml.token_type") or ()
    vocab, kept = backend.get_vocab(with_added_tokens=True), []
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind in (_CONTROL, _USER_DEFINED) and token and vocab.get(token) == token_id:
            kept.append(AddedToken(token, normalized=False, special=kind == _CONTROL))
    backend.add_tokens(kept)
    if backend.get_vocab_size(with_added_tokens=True) > len(tokens):
        raise ConfigError(f"{what} holds a tokenizer that grows while it is read: tokens are missing")


def _frame(backend: Any, metadata: Mapping[str, Any], roles: Mapping[str, str | None]) -> None:
    """Puts the tokens around a prompt that the file asks for."""
    from tokenizers import processors

    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    begins = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _WHOLE_FIRST)
    bos, eos = roles["bos_token"] if begins else None, None
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        eos = roles["eos_token"]
    around = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    special = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around) if token != "$A"]
    backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
