"""The dimensions of K3-nano's DSpark draft, and how it is trained: the values a run depends on.

Rule: everything is counted in steps and samples, never in seconds, so the same recipe gives the
same draft on a slow and on a fast machine.
"""

import dataclasses

from scripts.train_nano.optimizer import OptimizerSpec
from scripts.train_nano.recipe import FINAL
from scripts.train_nano.spec import N_RANKS, VOCAB_SIZE

# A reserved id that no text contains, at the place where the published K3 draft has its mask.
MASK_ID = N_RANKS + 253


@dataclasses.dataclass(frozen=True, slots=True)
class DraftSpec:
    """Sizes of a DSpark draft in the published form: Qwen3 layers and a vanilla Markov head."""

    aux_layers: tuple[int, ...] = (0, 1, 2, 3)  # the running sum as it enters these target layers
    vocab: int = VOCAB_SIZE
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 256
    window: int = 256  # context tokens before the anchor that a block sees
    block: int = 8  # the anchor and seven masks; slot k predicts the token k + 1 after the anchor
    markov_rank: int = 32
    mask_id: int = MASK_ID
    rope_theta: float = 10_000.0
    eps: float = 1e-5


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRecipe:
    """Two stages: corpus chats first, then answers that the target wrote itself."""

    spec: DraftSpec = dataclasses.field(default_factory=DraftSpec)
    corpus_steps: int = 1500
    answer_steps: int = 2500
    optimizer: OptimizerSpec = dataclasses.field(default_factory=OptimizerSpec)
    seed: int = 1
    # Data
    mix: str = FINAL.name
    row_lengths: tuple[int, ...] = FINAL.row_lengths
    tokens_per_step: int = 3072
    anchors_per_step: int = 384
    slots_per_step: int = 2048  # supervised slots that a step has room for
    answers: int = 6144  # written by the target, once, and then read again and again
    answers_per_shard: int = 1536
    sampled_share: float = 1 / 3  # of the answers: drawn at temperature 1; the others are greedy
    longest_prompt: int = 512  # of an answer; longer ones cost too much time to decode
    longest_answer: int = 200
    # Loss (section 6.6)
    ce_weight: float = 0.1
    tv_weight: float = 0.9
    decay_slots: float = 4.0  # slot k counts exp(-k / decay_slots)
    # Run
    warmup_steps: int = 30
    cooldown_share: float = 0.4  # the last share of all steps, in which the rate falls to zero
    checkpoint_every: int = 500
    log_every: int = 50

    @property
    def total_steps(self) -> int:
        return self.corpus_steps + self.answer_steps

    def stage_at(self, step: int) -> str:
        """ "corpus" or "answers", at a 0-based step."""
        return "corpus" if step < self.corpus_steps else "answers"

    def learning_rate(self, step: int) -> float:
        """Adam's rate at a 0-based step: warm-up, constant, linear to zero."""
        left = (self.total_steps - step) / max(1.0, self.cooldown_share * self.total_steps)
        return self.optimizer.adam_lr * min(1.0, (step + 1) / self.warmup_steps, left)
