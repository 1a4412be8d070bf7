"""The training of a head: random rows of cached features, all depths at once, to the target's own distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.drafters.heads.block import BlockHead, Blockwise
from paceline.drafters.training.features import OUT, FeatureCache
from paceline.drafters.training.kinds import TrainableHead
from paceline.drafters.training.options import BLOCKS, Schedule
from paceline.errors import ConfigError

_DEPTH_DECAY = 0.8
"""Weight of a depth's loss over that of the one before (EAGLE-3)."""
_GAMMA = ((16, 7.0), (10, 5.0), (0, 4.0))
"""Rows of a block at least -> its gamma (DFlash)."""
_DSPARK_GAMMA, _DSPARK_CROSS_ENTROPY, _DSPARK_DISTANCE = 4.0, 0.1, 0.9
"""Gamma of DSpark, and the weights of its loss; that of the confidence is 1 (DeepSpec)."""
_LEAST_DOUBT = 1e-6
_SAVE_STEPS = 200

CHECKPOINT = "checkpoint.pt"
"""File of an unfinished training in its folder."""


class Trainer:
    """Trains a head in place; resumes from ``checkpoint.pt`` of its folder, if there is one.

    Raises:
        ConfigError: the folder holds a training of another head, other features or another schedule.
    """

    def __init__(
        self,
        head: TrainableHead,
        teacher: Callable[[Tensor], Tensor],
        cache: FeatureCache,
        schedule: Schedule,
        folder: Path,
        *,
        bfloat16: bool = False,
    ) -> None:
        """Prepares a training.

        Args:
            head: a head with its first weights.
            teacher: [..., hidden] states after the final norm -> [..., vocabulary] logits of the target.
            cache: the features, with the head's boundaries and ``OUT``.
            schedule: steps and rates.
            folder: of its checkpoint.
            bfloat16: products in bfloat16 (autocast); weights stay float32.
        """
        self.head, self.teacher, self.cache, self.schedule, self.folder = head, teacher, cache, schedule, folder
        self.bfloat16 = bfloat16
        self.device = head.target.device
        self.optimizer = torch.optim.AdamW(
            head.parameters, lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )
        self.step, self._whole = 0, True
        self._identity = {
            "head": asdict(head.form),
            "schedule": asdict(schedule),
            "features": asdict(cache.rows),
        }
        self._resume()

    @property
    def path(self) -> Path:
        """The checkpoint's file."""
        return self.folder / CHECKPOINT

    def _resume(self) -> None:
        if not self.path.exists():
            return
        found: dict[str, Any] = torch.load(self.path, map_location=self.device, weights_only=True)
        for part, wanted in self._identity.items():
            for key, value in wanted.items():
                if _plain(found["identity"][part].get(key)) != _plain(value):
                    raise ConfigError(
                        f"{self.folder} holds a training with {key} {found['identity'][part].get(key)}, not {value}: "
                        f"name another directory, or delete its {CHECKPOINT}"
                    )
        self.head.module.load_state_dict(found["module"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.step = found["step"]

    def save(self) -> None:
        """Writes the checkpoint; an interrupted write leaves the old one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "identity": self._identity,
            "module": self.head.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        torch.save(state, self.path.with_suffix(".part"))
        self.path.with_suffix(".part").replace(self.path)

    def run(self, progress: Callable[[int, float], None] = lambda step, loss: None) -> None:
        """Trains to the last step; ``progress(steps done, loss)`` after each. Saves whatever ends it."""
        try:
            while self.step < self.schedule.steps:
                loss = self._gradients()
                self._whole = False
                self.optimizer.step()
                self.step += 1
                self._whole = True
                progress(self.step, loss)
                if self.step % _SAVE_STEPS == 0:
                    self.save()
        finally:
            if self._whole:  # interrupted within an update, it continues from the last checkpoint
                self.save()

    def _gradients(self) -> float:
        """Computes the gradients of the next update, clipped; returns the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate * self.schedule.scale(self.step)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16):
            loss = self.loss(self._batch())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.head.parameters, 1.0)
        return float(loss.detach())

    def _batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows that depend on the seed and the step alone, so that a resumed training sees what it would have seen."""
        generator = torch.Generator().manual_seed(self.schedule.seed * 1_000_003 + self.step)
        chosen = torch.randint(self.cache.rows.num_rows, (self.schedule.batch_rows,), generator=generator).tolist()
        rows = [self.cache.read(row, (*self.head.boundaries, OUT)) for row in chosen]
        token_ids = torch.stack([row.token_ids for row in rows]).to(self.device)
        both = torch.stack([row.states for row in rows]).to(self.device).float()
        size = both.shape[-1] // (len(self.head.boundaries) + 1)
        num_tokens = torch.tensor([row.num_tokens for row in rows], device=self.device)
        return token_ids, both[..., :-size], both[..., -size:], num_tokens

    def loss(self, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """Soft cross-entropy in nats, averaged over the positions and weighted by depth; of DSpark see
        ``dspark_loss``.

        The target's probabilities of a draft vocabulary are not normalized, so a position whose next token is unlikely
        to be in it weighs little.
        """
        token_ids, own, out, num_tokens = batch
        module = self.head.module
        depths = 1 if module.alike else self.head.form.depths
        num_rows = token_ids.shape[1] - depths
        anchors = torch.arange(num_rows, device=self.device)
        unrolled: Iterator[tuple[Tensor, Tensor | None]]
        if isinstance(module, Blockwise):
            anchors = self._anchors(num_rows)
        if isinstance(module, BlockHead):
            unrolled = module.judged(own[:, :num_rows], token_ids, anchors, depths)
        elif isinstance(module, Blockwise):
            unrolled = ((logits, None) for logits in module.blocks(own[:, :num_rows], token_ids, anchors, depths))
        else:
            states = own[:, : num_rows + int(module.exits)]
            unrolled = ((logits, None) for logits in module.unroll(states, token_ids, depths))
        with torch.no_grad():
            p = self.teacher(out).float().softmax(-1)
            if module.target_ids is not None:
                p = p[..., module.target_ids]
        total = torch.zeros((), device=self.device)
        for depth, (logits, confidence) in enumerate(unrolled):
            theirs = p[:, anchors + 1 + depth]
            each = -(theirs * logits.float().log_softmax(-1)).sum(-1)
            if confidence is not None:
                each = dspark_loss(each, theirs, logits, confidence)
            inside = (anchors + 1 + depth < num_tokens[:, None]).float()
            total = total + self._decay**depth * (each * inside).sum() / inside.sum().clamp(min=1.0)
        return total

    @property
    def _decay(self) -> float:
        """Weight of a depth's loss over that of the one before: EAGLE-3's, or exp(-1 / gamma) of DFlash."""
        if self.head.form.kind not in BLOCKS:
            return _DEPTH_DECAY
        if self.head.form.kind == "dspark":
            return math.exp(-1 / _DSPARK_GAMMA)
        return math.exp(-1 / next(gamma for least, gamma in _GAMMA if self.head.form.depths + 1 >= least))

    def _anchors(self, num_rows: int) -> Tensor:
        """[n] random rows whose next token is an anchor, in order; they depend on the seed and the step alone."""
        generator = torch.Generator().manual_seed(self.schedule.seed * 1_000_003 + self.step)
        chosen = torch.randperm(num_rows, generator=generator)[: self.head.form.num_anchors]
        return chosen.sort().values.to(self.device)


def dspark_loss(cross_entropy: Tensor, p: Tensor, logits: Tensor, confidence: Tensor) -> Tensor:
    """The loss ``[...]`` of DeepSpec: a tenth of the cross-entropy, nine tenths of the distance of the distributions
    (twice the probability of a rejection), and that of the confidence to the probability of acceptance.

    Args:
        cross_entropy: [...] to the target's distribution.
        p: [..., vocabulary] of the target.
        logits: [..., vocabulary] of the head.
        confidence: [...] probability of acceptance, as the head says.
    """
    distance = (logits.float().softmax(-1) - p).abs().sum(-1)
    accepted, sure = 1.0 - distance.detach() / 2, confidence.float().clamp(_LEAST_DOUBT, 1 - _LEAST_DOUBT)
    doubt = -(accepted * sure.log() + (1 - accepted) * torch.log1p(-sure))
    return _DSPARK_CROSS_ENTROPY * cross_entropy + _DSPARK_DISTANCE * distance + doubt


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
