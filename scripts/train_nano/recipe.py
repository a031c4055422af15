"""What is trained, on what, for how long: the one value a run depends on.

Rule: everything is counted in optimizer steps, never in seconds, so the same recipe gives the same
weights on a slow and on a fast machine.
"""

import dataclasses

from scripts.train_nano.optimizer import OptimizerSpec
from scripts.train_nano.spec import ModelSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of steps on one kind of data."""

    name: str  # "recall" (random rows to copy from) or a mix of sampling.py
    steps: int
    row_lengths: tuple[int, ...]  # a row is padded to the shortest of these that holds it
    target_share: float  # targets per position that a batch has room for


RECALL = Stage("recall", 2500, (144,), 0.55)
CHAT = Stage("chat", 4000, (48, 80, 112, 160, 208, 272), 0.5)
FULL = Stage("full", 5500, (56, 96, 144, 192, 256, 368), 0.5)
FINAL = Stage("final", 12000, (56, 96, 144, 192, 256, 368, 640, 1024), 0.5)


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    stages: tuple[Stage, ...] = (RECALL, CHAT, FULL, FINAL)
    model: ModelSpec = dataclasses.field(default_factory=ModelSpec)
    optimizer: OptimizerSpec = dataclasses.field(default_factory=OptimizerSpec)
    seed: int = 1
    tokens_per_step: int = 3072
    warmup_steps: int = 30
    quantize_share: float = 0.12  # the last share of steps sees the experts as MXFP4
    router_bias_rate: float = 0.01
    tokenizer_samples: int = 30_000
    checkpoint_every: int = 500
    log_every: int = 50

    @property
    def total_steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def quantize_from(self) -> int:
        return round(self.total_steps * (1 - self.quantize_share))

    def stage_at(self, step: int) -> Stage:
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise ValueError("the step lies beyond the last stage")

    def learning_rate(self, step: int) -> float:
        """Adam's rate at a 0-based step: warm-up, constant, in the last stage linear to zero."""
        left = (self.total_steps - step) / self.stages[-1].steps
        return self.optimizer.adam_lr * min(1.0, (step + 1) / self.warmup_steps, left)
