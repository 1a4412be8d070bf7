"""Grow a checkpoint without changing what it computes: `python benchmarks/grow.py SOURCE DESTINATION 8B`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from paceline_bench.grow import grow_checkpoint, parse_size


def main() -> None:
    parser = argparse.ArgumentParser(description="grow a checkpoint to a given cost")
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("size", type=parse_size, help="number of parameters, e.g. 150M, 1.5B")
    parser.add_argument("--layers", type=int, help="default: what models of that size have")
    parser.add_argument("--hidden-size", type=int, help="default: the checkpoint's; that times 4, 16, ..")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where it is made")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    options = parser.parse_args()
    dtype: torch.dtype = getattr(torch, options.dtype)
    size = grow_checkpoint(
        options.source,
        options.destination,
        options.size,
        dtype,
        options.layers,
        options.hidden_size,
        options.device,
    )
    print(f"{options.destination}: {size / 1e6:.1f} M parameters, {options.dtype}")


if __name__ == "__main__":
    main()
