"""Text to tokens and back: loading, comparing tokenizers by content.

Knows nothing of models or sessions. transformers is imported only for a tokenizer that needs more than its
``tokenizer.json``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.checkpoint import token_text
from paceline.checkpoint.folder import folder_of, read_json, require_no_code
from paceline.checkpoint.gguf.described import describes
from paceline.checkpoint.hub import fetch_gguf, require_fetchable
from paceline.checkpoint.tiktoken_model import FILE, is_unknown
from paceline.checkpoint.token_text import ByteDetokenizer, Decode, TokenBytes, WindowDetokenizer
from paceline.errors import ConfigError, InvalidRequestError, PromptTooLongError, TokenizerMismatchError

_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_OWN_CLASS_TYPES = ("qwen", "mistral", "ministral", "pixtral", "voxtral", "siglip", "hyperclovax")
"""Model types for which transformers replaces or patches a generic tokenizer."""
_CHANGING_KEYS = (
    "add_bos_token",
    "add_eos_token",
    "auto_map",
    "split_special_tokens",
    "extra_special_tokens",
    "additional_special_tokens",
)
LONG_TEXT = 2048
"""Characters above which a text is tokenized without the interpreter lock; shorter ones hold it for 1 to 2 ms."""
MAX_PIECE_CHARS = 65536
"""Characters that are tokenized at once where only a count is needed."""
_DENSE_TEXT = 8
"""Characters per token of the context above which a text is counted in pieces first: a text has about four."""
_NORMALIZED = 4
"""Factor by which a normalizer may shorten a text: NFKC makes one byte of four."""
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class JsonTokenizer:
    """The part of a transformers tokenizer that ``Tokenizer`` uses, over a ``tokenizer.json`` alone."""

    def __init__(self, backend: Any, eos_token: str | None) -> None:
        self.backend_tokenizer, self.eos_token = backend, eos_token
        self.eos_token_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Added tokens by id."""
        added: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that belong around a prompt."""
        return _encoded(self.backend_tokenizer, text, special=True)

    def get_vocab(self) -> dict[str, int]:
        """Every token, added ones included."""
        vocab: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocab


class Tokenizer:
    """A tokenizer and the name it was loaded by."""

    def __init__(self, name: str, hf_tokenizer: Any) -> None:
        self.name = name
        self._tokenizer = hf_tokenizer
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if backend is not None and backend.truncation is not None:  # of tokenizer.json
            backend.no_truncation()

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text``, with the special tokens that the tokenizer puts around a prompt.

        Raises InvalidRequestError for a lone surrogate, which stands for a byte that was no text, and for a text that
        the tokenizer fails on.
        """
        _num_bytes(text)
        backend = self._backend
        with self._explained():
            if backend is None or len(text) <= LONG_TEXT:
                return tuple(self._tokenizer.encode(text))
            return tuple(_encoded(backend, text, special=True))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of ``text`` alone, without special tokens around it."""
        with self._explained():
            if self._backend is not None:
                return _encoded(self._backend, text, special=False)
            return list(self._tokenizer.encode(text, add_special_tokens=False))

    @property
    def _backend(self) -> Any:
        """The fast backend that can replace the whole tokenizer; None: there is none, or its result could differ."""
        is_split = getattr(self._tokenizer, "split_special_tokens", False)
        return None if is_split else getattr(self._tokenizer, "backend_tokenizer", None)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raises InvalidRequestError for any failure of the library; its panics do not derive from Exception."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidRequestError(
                f"the text cannot be tokenized: the tokenizer {self.name!r} fails on it ({reason[0][:200]})"
            ) from error

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        """Text of ``token_ids``, spaces as they are; special tokens are left out unless ``special`` is true."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return str(backend.decode(list(token_ids), skip_special_tokens=not special))
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included; some ids below may have no token."""
        return max(len(self._tokenizer), 1 + max(self._tokenizer.get_vocab().values(), default=-1))

    @functools.cached_property
    def num_ids(self) -> int:
        """One more than the largest token id: ids may have holes."""
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """Tokens as the tokenizer writes them, None for an id without one."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return [backend.id_to_token(token_id) for token_id in token_ids]
        return list(self._tokenizer.convert_ids_to_tokens(list(token_ids)))

    @property
    def vocab(self) -> dict[str, int]:
        """Ids of all tokens as the tokenizer writes them, added ones included."""
        return dict(self._tokenizer.get_vocab())

    @property
    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Texts of the added tokens by id, and whether each is special."""
        return {int(i): (str(token), bool(token.special)) for i, token in self._tokenizer.added_tokens_decoder.items()}

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of text that each token stands for."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        special = [token_id for token_id, (_, is_special) in self.added_tokens.items() if is_special]
        if backend is None:
            return TokenBytes({}, lambda token_id: self.decode([token_id], special=True), special)
        return TokenBytes(json.loads(backend.to_str()).get("decoder") or {}, backend.id_to_token, special)

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), special: bool = False) -> token_text.Detokenizer:
        """The text of tokens that follow a prompt, as they come; with that of special ones if ``special`` is true."""
        if self.token_bytes.exact:
            return ByteDetokenizer(self.token_bytes, prompt_token_ids, special=special)
        return WindowDetokenizer(functools.partial(self.decode, special=special), prompt_token_ids)

    @functools.cached_property
    def max_token_bytes(self) -> int:
        """Maximum UTF-8 bytes of text per token: no text of ``n`` tokens has more than ``n`` times this number. An
        estimate if the tokenizer's normalizer drops text without a trace.
        """
        longest = max(len(token.encode("utf-8", "surrogatepass")) for token in self._tokenizer.get_vocab())
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return longest if backend is not None and backend.normalizer is None else _NORMALIZED * longest

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence token of the tokenizer, if it has one."""
        token_id = self._tokenizer.eos_token_id
        return () if token_id is None else (int(token_id),)

    def backend_json(self) -> str | None:
        """Content of ``tokenizer.json`` without padding and truncation; None if the tokenizer has no such form."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        content = json.loads(backend.to_str())
        return json.dumps({**content, "padding": None, "truncation": None})

    @property
    def special_names(self) -> dict[str, str | None]:
        """Text of the tokens that have a role: ``bos_token``, ``eos_token``, ``pad_token``, ``unk_token``."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {name: getattr(self._tokenizer, name, None) for name in names}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of vocabulary, merges and added tokens, 16 hex digits; not of roles such as "eos" or "pad"."""
        vocab = sorted(self._tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        merges: Any = []
        if backend is not None:
            merges = json.loads(backend.to_str())["model"].get("merges", [])
            merges = [merge.split(" ", 1) if isinstance(merge, str) else list(merge) for merge in merges]
        added = sorted((int(i), str(token)) for i, token in self._tokenizer.added_tokens_decoder.items())
        content = json.dumps([vocab, merges, added], ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _encoded(backend: Any, text: str, *, special: bool) -> list[int]:
    """Token ids. Long texts are tokenized without the interpreter lock, and without the places of their tokens."""
    if len(text) <= LONG_TEXT:
        return list(backend.encode(text, add_special_tokens=special).ids)
    return list(backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)


def Detokenizer(decode: Decode, prompt_token_ids: Sequence[int] = ()) -> token_text.Detokenizer:
    """The text of tokens as they come: by their bytes if ``decode`` is that of a tokenizer, in windows otherwise."""
    owner = getattr(decode, "__self__", None)
    if isinstance(owner, Tokenizer):
        return owner.detokenizer(prompt_token_ids)
    return WindowDetokenizer(decode, prompt_token_ids)


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | Sequence[int], max_model_len: int, vocab_size: int | None = None
) -> tuple[int, ...]:
    """Token ids of a prompt that leaves room for one token. Its size is checked before anything else is done with it.

    ``vocab_size``: rows of the model's embedding, which bound the ids; None: as the tokenizer has them.
    Raises InvalidRequestError for one that is empty, unknown or too long.
    """
    if isinstance(prompt, str):
        check_text(tokenizer, prompt, max_model_len)
        token_ids = tokenizer.encode(prompt)
    else:
        _check_num_tokens(len(prompt), max_model_len)
        token_ids = tuple(prompt)
    if not token_ids:
        raise InvalidRequestError("the prompt holds no token: at least one is needed")
    _check_num_tokens(len(token_ids), max_model_len)
    num_ids = tokenizer.vocab_size if vocab_size is None else vocab_size
    for wrong in (max(token_ids), min(token_ids)):
        if not 0 <= wrong < num_ids:
            allowed = f"0 to {num_ids - 1} are allowed, others are out of vocabulary"
            raise InvalidRequestError(f"the prompt holds token id {wrong}: {allowed}")
    return token_ids


def encode_bounded(tokenizer: Tokenizer, text: str, max_model_len: int, *, special: bool = True) -> tuple[int, ...]:
    """Token ids of a text, which may be somewhat longer than the context. ``special``: as ``encode`` has them.

    Raises PromptTooLongError, before all of it is tokenized, for a text that is much longer.
    """
    check_text(tokenizer, text, max_model_len)
    return tokenizer.encode(text) if special else tuple(tokenizer.encode_text(text))


def _check_num_tokens(num_tokens: int, max_model_len: int, at_least: str = "") -> None:
    if num_tokens >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {at_least}{num_tokens} tokens: at most {max_model_len - 1} leave room for a token in the "
            f"model's context of {max_model_len}"
        )


def check_text(tokenizer: Tokenizer, text: str, max_model_len: int) -> None:
    """Raises PromptTooLongError for a text that is much longer than the context, of which it tokenizes little."""
    limit = max_model_len * tokenizer.max_token_bytes
    if (size := _num_bytes(text)) > limit:
        raise PromptTooLongError(
            f"the prompt has {size} bytes: at most {limit} can fit the model's context of {max_model_len} tokens"
        )
    if len(text) <= _DENSE_TEXT * max_model_len + MAX_PIECE_CHARS:
        return
    # Long tokens may save it. Except at the cuts, the tokens of its pieces are its own tokens.
    num_tokens = 0
    for start in range(0, len(text), MAX_PIECE_CHARS):
        num_tokens += len(tokenizer.encode(text[start : start + MAX_PIECE_CHARS]))
        if num_tokens > 2 * max_model_len:
            _check_num_tokens(num_tokens, max_model_len, "at least ")


def _num_bytes(text: str) -> int:
    """Length in UTF-8. Raises InvalidRequestError for a lone surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the text is not valid Unicode: {error.reason} at {error.start}") from error


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Tokenizer:
    """Loads the tokenizer of a checkpoint directory or hub id. Raises ConfigError, naming ``path``.

    ``trust_remote_code``: Python code that comes with it may run.
    """
    require_fetchable(path)
    fetch_gguf(path)
    try:
        if (tokenizer := read_json_tokenizer(path)) is not None:
            return _tried(Tokenizer(path, tokenizer))
        tokenizer, directory = transformers_tokenizer(path, trust_remote_code), folder_of(path)
        files = [name for name in tokenizer.vocab_files_names.values() if name]
        if directory is not None and files and not any((directory / name).is_file() for name in files):
            raise ConfigError(f"it holds none of {', '.join(sorted(files))}")  # transformers makes an empty one
        return _tried(Tokenizer(path, tokenizer))
    except Exception as error:  # transformers raises whatever its parsers raise
        require_no_code(path, error)
        folder = None if isinstance(error, ConfigError) else folder_of(path)
        if folder is not None and not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            error = FileNotFoundError(f"it holds no tokenizer.json or tokenizer.model ({type(error).__name__})")
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"no tokenizer could be loaded from {path!r}: {reason[0]}") from error


def _tried(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer that can tokenize a text. Raises InvalidRequestError for one that fails on every text."""
    tokenizer.encode("")
    return tokenizer


def transformers_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint as transformers reads it. Raises whatever transformers raises, and ConfigError for
    a file of tokens whose pattern it would guess."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = folder_of(path)
    if folder is not None and describes(folder):  # the files are all there is to it, whatever the model's type
        return PreTrainedTokenizerFast.from_pretrained(folder)
    if folder is not None and not trust_remote_code and is_unknown(folder):
        raise ConfigError(
            f"its tokenizer is {FILE} with a pattern that is not known: "
            "a tokenizer.json is needed, or that its code is trusted"
        )
    return AutoTokenizer.from_pretrained(folder or path, trust_remote_code=trust_remote_code)


def read_json_tokenizer(path: str) -> JsonTokenizer | None:
    """Returns the tokenizer of ``tokenizer.json``; None if the file is not complete, so that transformers must load it.

    The file must name the generic fast class and have a post-processor. Neither it nor tokenizer_config.json may add
    tokens, truncate or pad.
    """
    if (folder := folder_of(path)) is None:
        return None
    data, settings = read_json(folder, "tokenizer.json"), read_json(folder, "tokenizer_config.json")
    model_type = str(read_json(folder, "config.json").get("model_type", ""))
    special = {token.get("content") for token in data.get("added_tokens") or [] if token.get("special")}
    roles = [settings.get(role) for role in _ROLES]
    names = [role.get("content") if isinstance(role, dict) else role for role in roles if role is not None]
    if (
        settings.get("tokenizer_class") not in _GENERIC_CLASSES
        or any(settings.get(key, []) not in ([], {}) for key in _CHANGING_KEYS)
        or (model_type.startswith(_OWN_CLASS_TYPES) and not describes(folder))
        or not data.get("post_processor")
        or data.get("truncation")
        or data.get("padding")
        or not set(names) <= special
        or any(t.get("content") not in special for t in settings.get("added_tokens_decoder", {}).values())
    ):
        return None
    from tokenizers import Tokenizer as FromFile

    eos = settings.get("eos_token")
    backend = FromFile.from_file(str(folder / "tokenizer.json"))
    return JsonTokenizer(backend, eos.get("content") if isinstance(eos, dict) else eos)


def require_same_tokens(target: Tokenizer, draft: Tokenizer, remedy: str = "") -> None:
    """Raises TokenizerMismatchError, with a further ``remedy``, unless both tokenizers have the same content."""
    if target.fingerprint != draft.fingerprint:
        raise TokenizerMismatchError(
            f"the draft's tokenizer differs in content from the target's: draft {draft.name!r} has "
            f"fingerprint {draft.fingerprint} ({draft.vocab_size} tokens), target {target.name!r} has "
            f"{target.fingerprint} ({target.vocab_size} tokens); choose a draft that was trained "
            f"with the target's tokenizer{remedy}"
        )
