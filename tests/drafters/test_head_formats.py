"""Published heads: every format loads, computes what a plain oracle computes, and is refused when it does not fit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.drafters.head_files import FILES, SIZE, VOCAB, HeadFile, made, write_target
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.core.processors import SamplerState
from paceline.drafters.heads.load import open_head
from paceline.drafters.protocol import Fed, Leaf
from paceline.model.kv_cache import KVCache
from paceline.types import SamplingParams

DEPTHS, LENGTH = 3, 13
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Tensor]]]:
    """A written target of each family, and the tables that heads share with it."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("llama", "qwen3")}
    return {kind: (folder, write_target(folder, kind)) for kind, folder in folders.items()}


class Loaded:
    """A written checkpoint of a head, loaded for its target."""

    def __init__(self, file: HeadFile, folder: Path, targets: dict) -> None:
        self.file, self.folder = file, file.write(folder)
        target, self.tables = targets[file.target]
        source = None if file.method == "mtp" else str(folder)
        checkpoint = Checkpoint.open(str(folder if file.method == "mtp" else target))
        self.plan = open_head(file.method, source, checkpoint, num_tokens=DEPTHS)
        self.head = self.plan.load(torch.float32, CPU, num_candidates=VOCAB)
        self.width = SIZE * len(self.plan.features.boundaries)
        generator = torch.Generator().manual_seed(3)
        self.states = torch.randn(LENGTH - 1, self.width, generator=generator)
        self.tokens = torch.randint(VOCAB, (LENGTH + DEPTHS - 1,), generator=generator).tolist()

    def oracle(self) -> Tensor:
        """[depths, draft vocabulary], by the plain lines over the tensors as they were written."""
        tables = self.tables
        if self.file.method == "mtp":
            tables = {
                "embed": self.file.tensors["model.embed_tokens.weight"],
                "lm_head": self.file.tensors["lm_head.weight"],
            }
        return self.file.oracle(self.file.tensors, self.file.config, tables, self.states, self.tokens)

    def logits(self) -> Tensor:
        """[depths, draft vocabulary] of the loaded module."""
        with torch.no_grad():
            rows = self.head.module.unroll(self.states[None], torch.tensor([self.tokens]), DEPTHS)
            return torch.stack([logits[0, -1] for logits in rows])

    def served(self) -> tuple[Tensor, Tensor]:
        """Candidates of the anchor and of the nodes below it through sessions and pages, fed in chunks."""
        head, pages = self.head, [2, 0]
        head.bind(KVCache(head.layers, 3, torch.float32, CPU), 0)
        sampler = SamplerState(SamplingParams(), 1, self.tokens[:LENGTH], vocab_size=VOCAB)
        head.open("s", self.tokens[:LENGTH], sampler)
        start, random_ = 0, random.Random(2)
        while start < LENGTH - 1:
            stop = min(LENGTH - 1, start + random_.randint(1, 5))
            head.feed([Fed("s", start, tuple(self.tokens[start + 1 : stop + 1]), self.states[start:stop], pages)])
            start = stop
        drafted = self.tokens[LENGTH:]
        found = [
            head.expand([Leaf("s", depth, tuple(range(1, depth + 1)), tuple(drafted[:depth]))])
            for depth in range(DEPTHS)
        ]
        return torch.cat([f.token_ids for f in found]), torch.cat([f.log_q for f in found])


def differs(loaded: Loaded) -> float:
    """The largest difference of a logit from the oracle's."""
    return float((loaded.logits() - loaded.oracle()).abs().max())


@pytest.mark.parametrize("name", FILES)
def test_every_published_format_loads_and_computes_what_the_oracle_computes(
    name: str, tmp_path: Path, targets: dict
) -> None:
    file = made(name)
    loaded = Loaded(file, tmp_path / name, targets)
    assert sum(path.stat().st_size for path in (tmp_path / name).iterdir()) < 1_000_000
    assert loaded.plan.features.boundaries == file.boundaries
    assert loaded.plan.features.every_position == bool(loaded.plan.layers)
    oracle = loaded.oracle()
    torch.testing.assert_close(loaded.logits(), oracle, atol=1e-4, rtol=1e-4)
    ids, log_q = loaded.served()
    wanted = torch.full((DEPTHS, VOCAB), float("-inf"))
    wanted[:, file.target_ids] = oracle.log_softmax(-1)
    got = torch.full((DEPTHS, VOCAB), float("-inf")).scatter(1, ids, log_q)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
