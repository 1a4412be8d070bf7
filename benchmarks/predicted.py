"""Predicts tokens/s and first tokens on H100s from launches, products and bytes: `python benchmarks/predicted.py`.

No step of these models was measured on several GPUs. What is measured is in results/gpu-nvidia-h100-80gb-hbm3.txt: the
host's time of a step, the attention of a layer, an eager layer, and how fast the weights of an 8 B are read. Launches
of a layer are those that tests/model/parallel/test_launches.py counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.table import table

READ_BYTES_PER_S, FLOPS = 2.72e12, 6e14
"""Of products: 16.06 GB of the 8 B in 5.9 ms; what large products reach in bfloat16."""
HOST_MS = {1: 0.37, 16: 0.63, 64: 1.27, 256: 3.85}
"""Of plain decoding, by sessions; that of 256 is extrapolated."""
ATTENTION_US = {1: 14, 16: 52, 64: 177, 256: 708}
"""Of a layer of 32 query heads and a context of 1,000, by sessions; that of 256 is four times that of 64."""
LAUNCHES, REPLAYED_LAUNCH_US = 20, 1.5
"""Of a layer, at any degree; and what a launch in a graph takes in addition to the work of the kernel."""
SUM_US = 8
"""A sum of four ranks by one launch, as other engines measure such kernels; none of ours has run."""
TILE_16_FLOPS = 2.2e13
"""Of attention in tiles of 16 queries: 2,048 tokens took 1,543 us a layer."""
L2_BYTES_PER_S, TILE_64_PRODUCTS, L2_SHARE = 5e12, 64, 0.5
"""What all multiprocessors read of the cache, by others' measurements; products for each byte that tiles of 64 queries
read (tests/model/attention/test_schedule.py); and the share of that rate that they are taken to reach."""


def first_token_s(prompt: int, attention_flops: float) -> float:
    """Of an 8 B with 32 query heads of 128 numbers in 32 layers, all steps of whose prompt hide the host."""
    products = 2 * 8.03e9 * prompt
    attention = 4 * 32 * 128 * 32 * prompt**2 / 2
    return products / FLOPS + attention / attention_flops


FP8_BYTES, FP8_LAUNCHES, FP8_FLOPS = 1 + 4 / 128, 5, 3e14
"""Of a weight and its share of a scale; products of a layer whose splits are added by a launch of their own; and half
of FLOPS, as each tile of 128 tokens dequantizes its weights. The kernel has run on no device."""


@dataclass(frozen=True)
class Target:
    """A model on ``degree`` GPUs."""

    name: str
    parameters: float
    layers: int
    degree: int
    table: float = 0
    """Numbers of the embedding, and of the output layer, of a model whose other weights are FP8; 0: none is."""

    @property
    def read_bytes(self) -> float:
        """What a step reads of the weights, on all GPUs."""
        if not self.table:
            return 2 * self.parameters
        return FP8_BYTES * (self.parameters - 2 * self.table) + 2 * self.table

    def device_ms(self, sessions: int) -> float:
        """Of a recorded step."""
        read = self.read_bytes / self.degree / READ_BYTES_PER_S
        flops, num_launches = (FP8_FLOPS, LAUNCHES + FP8_LAUNCHES) if self.table else (FLOPS, LAUNCHES)
        products = max(read, 2 * self.parameters * sessions / self.degree / flops)
        attention = self.layers * ATTENTION_US[sessions] / self.degree * (2 if self.layers > 32 else 1) / 1e6
        launches = self.layers * num_launches * REPLAYED_LAUNCH_US / 1e6
        sums = 0 if self.degree == 1 else 2 * self.layers * SUM_US / 1e6
        return 1e3 * (products + attention + launches + sums)

    def ahead_ms(self, sessions: int) -> float:
        """Of a recorded step: one GPU is given the next one before this one is done, several are not."""
        device, host = self.device_ms(sessions), HOST_MS[sessions]
        return max(device, host) if self.degree == 1 else device + host


def main() -> int:
    """Three tables."""
    titles = ("target", "sessions", "floor ms", "recorded ms", "tokens/s", "ahead ms", "tokens/s", "of floor")
    rows: list[tuple[str, ...]] = [titles]
    for target in (Target("8 B", 8.03e9, 32, 1), Target("70 B, 4 GPUs", 70.6e9, 80, 4)):
        for sessions in HOST_MS:
            floor = 2e3 * target.parameters / target.degree / 3.35e12
            recorded = target.device_ms(sessions) + HOST_MS[sessions]
            ahead = target.ahead_ms(sessions)
            pairs = [(f"{ms:.1f}", f"{1e3 * sessions / ms:.0f}") for ms in (recorded, ahead)]
            rows.append((target.name, str(sessions), f"{floor:.1f}", *pairs[0], *pairs[1], f"{floor / ahead:.0%}"))
    print("\n".join(table(rows)), end="\n\n")
    rows = [("target in FP8", "sessions", "weights GB", "floor ms", "ms", "tokens/s", "in bfloat16")]
    for plain, fp8 in (
        (Target("8 B", 8.03e9, 32, 1), Target("8 B", 8.03e9, 32, 1, 128256 * 4096)),
        (Target("70 B, 2 GPUs", 70.6e9, 80, 2), Target("70 B, 2 GPUs", 70.6e9, 80, 2, 128256 * 8192)),
        (Target("70 B, 4 GPUs", 70.6e9, 80, 4), Target("70 B, 4 GPUs", 70.6e9, 80, 4, 128256 * 8192)),
    ):
        weights = (fp8.read_bytes + 2 * fp8.table) / fp8.degree  # the embedding is there, though not read
        for sessions in (1, 16, 64):
            numbers = [f"{1e3 * fp8.read_bytes / fp8.degree / 3.35e12:.1f}", f"{fp8.ahead_ms(sessions):.1f}"]
            rates = [f"{1e3 * sessions / each.ahead_ms(sessions):.0f}" for each in (fp8, plain)]
            rows.append((fp8.name, str(sessions), f"{weights / 1e9:.1f}", *numbers, *rates))
    print("\n".join(table(rows)), end="\n\n")
    speeds = TILE_16_FLOPS, L2_SHARE * TILE_64_PRODUCTS * L2_BYTES_PER_S, TILE_64_PRODUCTS * L2_BYTES_PER_S
    prompts = [("prompt of an 8 B", "tiles of 16, s", "tiles of 64, s", "at most as fast, s")]
    prompts += [(f"{k}k", *(f"{first_token_s(k << 10, rate):.1f}" for rate in speeds)) for k in (8, 32, 128)]
    print("\n".join(table(prompts)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
