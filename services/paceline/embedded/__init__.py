"""The embedded pair: a 14M-parameter target and a 1.6M-parameter draft that are part of the package.

With them a service, a test or a benchmark works without fetching anything. Both are Llama-shaped Hugging Face
checkpoints in bfloat16 with one byte-level BPE of 4,096 tokens, and both complete Python source.

Provenance: trained from random weights by `benchmarks/train_embedded.py` on the `.py` files of the CPython
3.11 standard library and on nothing else; the draft was then distilled from the target, and the heads were trained on
the target's states. The files listed in
`held_out.json` were not trained on: prompts and measurements use these. `README.md` is the model
card. The training text is under the PSF licence, reproduced in `LICENSE-PSF.txt`; see `NOTICE`.
"""

from __future__ import annotations

import json
from pathlib import Path

_HERE = Path(__file__).resolve().parent

TARGET_DIR = _HERE / "target"
DRAFT_DIR = _HERE / "draft"
HEAD_DIRS = {method: _HERE / "heads" / method for method in ("mtp", "medusa", "eagle3")}
"""Method -> directory of a head for the target, trained by ``paceline train-head``."""
CORPORA = {"smollm2": _HERE / "smollm2" / "corpus.jsonl"}
"""Short name of another model -> texts that it wrote, by ``paceline write-corpus``."""


def held_out_files() -> list[str]:
    """Paths, relative to the standard library's folder, of the files that neither model was trained on."""
    names: list[str] = json.loads((_HERE / "held_out.json").read_text(encoding="utf-8"))["held_out"]
    return names
