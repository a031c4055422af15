"""The dimensions of K3-nano, and its place in the id space of the tokenizer.

Rule: every structural feature of Kimi K3 in miniature, with sizes that divide over 1, 2 and 4
ranks and MXFP4 groups of 32 input columns.
"""

import dataclasses

N_RANKS = 2048  # mergeable BPE pieces
N_SPECIALS = 256
VOCAB_SIZE = N_RANKS + N_SPECIALS
MAX_POSITIONS = 2048

# The 16 named specials of K3, by offset from the first special id.
NAMED_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
# K3 flags these three as not special, so that a detokeniser that skips specials keeps them.
KEPT_IN_TEXT = ("<|open|>", "<|close|>", "<|sep|>")

BOS_ID, EOS_ID, END_OF_MSG_ID = N_RANKS, N_RANKS + 1, N_RANKS + 2
MEDIA_PAD_ID, PAD_ID = N_RANKS + 21, N_RANKS + 255


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of one K3-shaped decoder."""

    vocab: int = VOCAB_SIZE
    hidden: int = 128
    layers: int = 4
    mla_layers: tuple[int, ...] = (3,)  # 0-based; the others are KDA
    block_size: int = 2  # layers per attention-residual block
    # KDA
    kda_heads: int = 4
    kda_dim: int = 32
    conv_width: int = 4
    gate_lower_bound: float = -5.0
    # MLA
    mla_heads: int = 4
    q_lora: int = 64
    kv_lora: int = 48
    nope_dim: int = 32
    rope_dim: int = 16  # a shared key part; never rotated
    v_dim: int = 32
    # MLP
    dense: int = 384  # layer 0
    experts: int = 8
    top_k: int = 2
    latent: int = 64
    expert_dim: int = 32
    shared_experts: int = 4
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    eps: float = 1e-5

    @property
    def kda_width(self) -> int:
        return self.kda_heads * self.kda_dim

    @property
    def shared_dim(self) -> int:
        return self.shared_experts * self.expert_dim
