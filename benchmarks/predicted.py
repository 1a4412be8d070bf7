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
        """Of a recorded step: GPUs are given the next one before this one is done."""
        return max(self.device_ms(sessions), HOST_MS[sessions])


H200, EXPERT_LAUNCHES, ATTENTION_BYTES_PER_S = 4.8 / 3.35, 15, 1.5e12
"""What an H200 reads, by what an H100 does; launches of a layer's router and experts beyond a dense one's; and the rate
at which attention reads keys and values, 268 MB in 177 us. The grouped kernel has run on no device."""
ISSUED_PER_S = 2.83e13
"""Instructions that an H100 or H200 issues in a second."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts on ``degree`` GPUs."""

    name: str
    layers: int
    with_experts: int
    experts: int
    chosen: int
    numbers: float
    """Of one expert."""
    bits: int
    instructions: float
    """For each number, of the kernel as it is compiled for tiles of 16 tokens."""
    scale_bytes: float
    """For each number of an expert."""
    rest_bytes: float
    """All other weights."""
    table: float
    """Numbers of the embedding, which is held and not read."""
    kv_bytes: float
    """Of a session's context of 1,000 that a rank reads."""
    degree: int
    speed: float = 1.0
    """Of the memory, by an H100's."""

    @property
    def rank_gib(self) -> float:
        """Weights that a rank holds."""
        experts = self.with_experts * self.experts * self.numbers * (self.bits / 8 + self.scale_bytes)
        return (experts + self.rest_bytes) / self.degree / 2**30

    def step_ms(self, sessions: int) -> float:
        """Of a recorded step that is launched before the one in front is done."""
        rate = READ_BYTES_PER_S * self.speed
        used = self.experts * (1 - (1 - self.chosen / self.experts) ** sessions)
        numbers = self.with_experts * used * self.numbers / self.degree
        experts = max(numbers * (self.bits / 8 + self.scale_bytes) / rate, numbers * self.instructions / ISSUED_PER_S)
        rest = (self.rest_bytes - 2 * self.table) / self.degree / rate
        attention = sessions * self.kv_bytes / ATTENTION_BYTES_PER_S / self.speed
        launches = self.layers * (LAUNCHES + FP8_LAUNCHES + EXPERT_LAUNCHES) * REPLAYED_LAUNCH_US / 1e6
        sums = 0 if self.degree == 1 else 2 * self.layers * SUM_US / 1e6
        return max(1e3 * (experts + rest + attention + launches + sums), HOST_MS[sessions])


DEEPSEEK = 61, 58, 256, 8, 3 * 7168 * 2048, 8, 7.8, 4 / 128, 1.03125 * 14.2e9 + 2 * 2.87e9, 129280 * 7168, 61 * 1152e3
KIMI = 61, 60, 384, 8, 3 * 7168 * 2048, 4, 6.4, 2 / 32, 2 * 11.7e9, 163840 * 7168, 61 * 1152e3
GPT_OSS = 36, 36, 128, 4, 3 * 2944 * 2880, 4, 7.4, 1 / 32, 2 * 2.2e9, 201088 * 2880, 18 * 2048 * 1128
MIXTURES = [
    Mixture("DeepSeek V3 FP8, 8 H200", *DEEPSEEK, 8, H200),
    Mixture("Kimi-K2 INT4, 8 H100", *KIMI, 8),
    Mixture("Kimi-K2 INT4, 8 H200", *KIMI, 8, H200),
    Mixture("gpt-oss-120b, 1 H100", *GPT_OSS, 1),
    Mixture("gpt-oss-120b, 1 H200", *GPT_OSS, 1, H200),
]
"""Rows of gpt-oss' experts are filled up from 2,880 to 2,944."""


def main() -> int:
    """Four tables."""
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
    rows = [("experts as stored", "GiB a rank", "sessions", "ms", "tokens/s")]
    for mixture in MIXTURES:
        for sessions in (1, 64):
            ms = mixture.step_ms(sessions)
            rows.append(
                (mixture.name, f"{mixture.rank_gib:.0f}", str(sessions), f"{ms:.1f}", f"{1e3 * sessions / ms:.0f}")
            )
    print("\n".join(table(rows)), end="\n\n")
    speeds = TILE_16_FLOPS, L2_SHARE * TILE_64_PRODUCTS * L2_BYTES_PER_S, TILE_64_PRODUCTS * L2_BYTES_PER_S
    prompts = [("prompt of an 8 B", "tiles of 16, s", "tiles of 64, s", "at most as fast, s")]
    prompts += [(f"{k}k", *(f"{first_token_s(k << 10, rate):.1f}" for rate in speeds)) for k in (8, 32, 128)]
    print("\n".join(table(prompts)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
