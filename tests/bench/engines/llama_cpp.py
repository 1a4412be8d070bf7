"""The part of llama-cpp-python that a benchmark uses: sequences that count on from the last token of a prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__version__ = "0.0"
_WIDTH = 2


def llama_backend_init() -> None:
    """Nothing is to be done."""


def llama_model_default_params() -> Any:
    return SimpleNamespace()


def llama_model_load_from_file(path: bytes, params: Any) -> Any:
    assert params.n_gpu_layers == 0
    return object() if path.endswith(b".gguf") else None


def llama_context_default_params() -> Any:
    return SimpleNamespace()


def llama_init_from_model(model: Any, options: Any) -> Any:
    assert (options.n_seq_max, options.n_ctx, options.n_threads) == (2, 2048, 1)
    return SimpleNamespace(sequences={})


def llama_n_batch(context: Any) -> int:
    return _WIDTH


def llama_batch_init(width: int, embedding: int, sequences: int) -> Any:
    columns = {name: [None] * width for name in ("token", "pos", "logits", "n_seq_id")}
    return SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(width)], **columns)


def llama_sampler_init_greedy() -> Any:
    return "greedy"


def llama_sampler_free(sampler: Any) -> None:
    assert sampler == "greedy"


def llama_get_memory(context: Any) -> Any:
    return context


def llama_memory_clear(memory: Any, data: bool) -> None:
    memory.sequences.clear()


def llama_decode(context: Any, batch: Any) -> int:
    """Tokens follow one another in each sequence; a row with logits can be sampled."""
    context.rows = {}
    for row in range(batch.n_tokens):
        assert batch.n_seq_id[row] == 1
        known = context.sequences.setdefault(batch.seq_id[row][0], [])
        assert batch.pos[row] == len(known)
        known.append(batch.token[row])
        if batch.logits[row]:
            context.rows[row] = known[-1] + 1
    return 0


def llama_sampler_sample(sampler: Any, context: Any, row: int) -> int:
    token: int = context.rows[row]
    return token


def llama_print_system_info() -> bytes:
    return b"AVX512 = 1"
