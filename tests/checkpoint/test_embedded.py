"""The embedded pair loads without a warning, round-trips text, fits its size limit and agrees with itself."""

import sysconfig
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM

from paceline.embedded import DRAFT_DIR, TARGET_DIR, held_out_files

TEXTS = [
    "def f(x):\n\treturn x  # tab , comma ' quote\r\n",
    "  two  spaces , and ' s n't . . .\n\n\n    indented\n",
    "naïve café – 数 \N{SNAKE} \x00\x7f",
    "",
]


@pytest.mark.parametrize("directory", [TARGET_DIR, DRAFT_DIR], ids=["target", "draft"])
def test_tokenizer_loads_quietly_and_round_trips(directory, caplog, capfd) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = AutoTokenizer.from_pretrained(directory)
    assert not caplog.records
    assert capfd.readouterr().err == ""
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 4096
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer.encode("<|endoftext|>") == [tokenizer.eos_token_id] == [0]


def test_both_checkpoints_share_one_tokenizer() -> None:
    names = {path.name for path in TARGET_DIR.glob("tokenizer*")}
    assert "tokenizer.json" in names
    for name in names:
        assert (TARGET_DIR / name).read_bytes() == (DRAFT_DIR / name).read_bytes()


def test_size_and_dtype() -> None:
    files = [path for folder in (TARGET_DIR, DRAFT_DIR) for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) <= 40e6
    for path in (path for path in files if path.suffix == ".safetensors"):
        with safe_open(path, framework="pt") as weights:
            assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def held_out_texts() -> list[str]:
    """The starts of the six largest held-out files that this interpreter's library still has."""
    library = Path(sysconfig.get_paths()["stdlib"])
    present = [library / name for name in held_out_files() if (library / name).exists()]
    present.sort(key=lambda path: path.stat().st_size)
    return [path.read_text(encoding="utf-8")[:4000] for path in present[-6:]]


@torch.no_grad()
def test_the_pair_agrees_on_held_out_text() -> None:
    """Looser than the model card's figures: catches swapped or broken files, not a worse training."""
    texts = held_out_texts()
    if len(texts) < 6:
        pytest.skip("the held-out files of the standard library are not installed")
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    rows = torch.tensor([tokenizer.encode(text)[:256] for text in texts])
    pair = [LlamaForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (TARGET_DIR, DRAFT_DIR)]
    target, draft = (model(input_ids=rows, labels=rows) for model in pair)
    assert float((target.logits.argmax(-1) == draft.logits.argmax(-1)).float().mean()) >= 0.4
    assert float(target.loss) <= 3.6
    assert float(target.loss) < float(draft.loss) <= 4.2
    assert pair[1].num_parameters() * 5 <= pair[0].num_parameters()
    for model in pair:
        assert model.config.eos_token_id == model.generation_config.eos_token_id == 0
