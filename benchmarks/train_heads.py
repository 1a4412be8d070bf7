"""Trains a small head of every kind that the package does not ship for the embedded target, to be measured.

    python benchmarks/train_heads.py heads
    python benchmarks/train_heads.py heads --kind eagle --kind dspark
    paceline bench compare benchmarks/specs/methods.yaml --set heads=heads

Each is a run of `paceline train-head` on the standard library's files, without the held-out ones that the prompts of
`paceline bench compare` are from. Its folder has the name of its kind, and in it `report.json` has the held-out
figures. Features are made once for all. Updates are few, so that each takes a minute or two of one core: the heads are
there to be exercised, not to be fast. An interrupted run continues where it was; a head that is there stays.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

from paceline.cli.main import main as paceline
from paceline_bench.prompts import held_out_texts
from train_embedded import library_files

FLAGS = {
    "mlp_speculator": ("--steps", "300"),
    "eagle": ("--steps", "200"),
    "peagle": ("--steps", "250", "--draft-vocab-size", "1024"),
    "dflash": ("--steps", "250"),
    "dspark": ("--steps", "250"),
    "jetspec": ("--steps", "250"),
    "early_exit": ("--boundary", "6", "--steps", "150"),
    "speculative_streaming": ("--boundary", "6", "--steps", "150"),
}
"""Kind -> what its run of ``paceline train-head`` has beside text and features."""
FEATURES = ("--tokens", "24576", "--temperatures", "as-is", "--held-out-rows", "16")
"""The library's own text: that of the target would make better heads, and takes minutes to be written."""


def write_texts(folder: Path) -> None:
    """``train.jsonl`` and ``held_out.jsonl`` in a folder, as ``paceline train-head`` reads them."""
    library, held_out = Path(sysconfig.get_paths()["stdlib"]), held_out_texts()
    names = [name for name in library_files(library) if name not in held_out]
    texts = [(library / name).read_text(encoding="utf-8") for name in names]
    for part, found in (("train", texts), ("held_out", [*held_out.values()])):
        lines = [json.dumps({"text": text}) + "\n" for text in found]
        (folder / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Trains one head after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of texts, features and heads")
    parser.add_argument("--kind", action="append", default=[], choices=FLAGS, help="only this one (may be repeated)")
    args = parser.parse_args()
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder)
    given = ["--data", str(folder / "train.jsonl"), "--held-out", str(folder / "held_out.jsonl")]
    given += ["--cache", str(folder / "features"), *FEATURES]
    for kind in args.kind or FLAGS:
        if (folder / kind / "report.json").exists():
            continue
        started = time.perf_counter()
        if code := paceline(["train-head", kind, "--out", str(folder / kind), *given, *FLAGS[kind]]):
            raise SystemExit(code)
        print(f"{kind}: {time.perf_counter() - started:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
