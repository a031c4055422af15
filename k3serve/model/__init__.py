"""The target model in plain JAX, Kimi K3 and Kimi-Linear, and its DSpark draft. Runs anywhere, and
is the oracle of the kernels.

Rule: pure functions of (config, weights, state, inputs), called inside
`jax.shard_map(..., check_vma=False)` over one mesh axis, "rank" (also with one rank).

    weights = checkpoint.load.load(path, config, mesh, dtype, expert_format="dense" | "packed")
    weight_specs(config, ranks, expert_format)          # PartitionSpecs for shard_map's in_specs
    state = init_state(config, mesh, slots=, num_pages=, page_tokens=, dtype=, rows=R)
    state_specs(config, R)                              # in_specs and out_specs; donate the state
    hidden, state = decode_rows(config, weights, state, tokens[G, R], positions[G], active[G],
                                page_table[G, MP], first)       # hidden [G, R, d]
    state = accept_rows(state, first, accepted[G], active[G])   # fewer rows than were computed
    hidden, state = prefill_page(config, weights, state, slot, tokens[C], start, length,
                                 page_table_row[MP])    # hidden [C, d]
    logits = head_logits(config, weights, hidden[N, d])             # [N, vocab] f32
    logprobs, top_ids, top_logprobs = page_scores(logits, next_tokens[C], top)

Pages have C tokens, a multiple of 16. The state is indexed by slot (KdaState) or by cache page
(MlaState) and may be copied, snapshot and donated as it is. A slot needs no reset: page 0, or a row
at position 0, begins from zeros. Inactive slots and unused pages keep their bits.

Files: target (the two programs), kda, mla, moe, attn_res (parts), ops (rounding rules), mxfp4,
collectives (the exchanges between ranks), weights and state (what lies on the devices), scoring;
draft (context rows, ring, block, heads) and draft_weights.
"""

from k3serve.model.collectives import RANK
from k3serve.model.scoring import log_probs, page_scores
from k3serve.model.state import State, accept_rows, init_state, state_specs
from k3serve.model.target import (
    Taps,
    decode_rows,
    embed,
    head_logits,
    local_head_logits,
    prefill_page,
)
from k3serve.model.weights import Weights, weight_specs

__all__ = [
    "RANK",
    "State",
    "Taps",
    "Weights",
    "accept_rows",
    "decode_rows",
    "embed",
    "head_logits",
    "init_state",
    "local_head_logits",
    "log_probs",
    "page_scores",
    "prefill_page",
    "state_specs",
    "weight_specs",
]
