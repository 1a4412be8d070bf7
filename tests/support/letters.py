"""A tokenizer whose token ids are letters, for routers and pipelines without a model."""

from collections.abc import Sequence

from paceline.checkpoint.token_text import Detokenizer, WindowDetokenizer


class Letters:
    """Token ids are the bytes of ASCII text."""

    vocab_size = 128
    max_token_bytes = 1
    eos_token_ids = ()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode()

    def detokenizer(self, prompt_token_ids: Sequence[int] = (), special: bool = False) -> Detokenizer:
        return WindowDetokenizer(self.decode, prompt_token_ids)
