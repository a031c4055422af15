"""Greedy speculative decoding as the traces record it: drafts, accepted counts and tokens of every
cycle, all traces side by side in the slots of one tile.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from k3serve.model import decode_rows, head_logits
from k3serve.model.draft import features
from tests.model.draft_harness import ROWS, Draft, ints
from tests.model.harness import DATA, SLOTS, worst

TRACES = json.loads((DATA / "k3_tiny_dspark" / "spec_traces.json").read_text())


class Loop:
    """The plain loop: draft, verify by one pass over anchor and drafts, and say how many of its
    rows have happened.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft, self.target = draft, draft.target
        self.verify = self.target.jit(self._rows, 4, rows=ROWS)
        self.state, self.ring = self.target.state(ROWS), draft.ring()
        self.anchors, self.positions = np.zeros(SLOTS, np.int32), np.zeros(SLOTS, np.int32)

    def _rows(self, weights, state, tokens, positions, counts, table):
        taps = {}
        config = self.target.config
        hidden, state = decode_rows(
            config, weights, state, tokens, positions, counts, table, taps=taps
        )
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = head_logits(config, weights, flat).reshape(*hidden.shape[:2], -1)
        return (logits, features(self.draft.config, taps).reshape(SLOTS, ROWS, -1)), state

    def admit(self, slot, prompt):
        out, self.state = self.target.prefill(self.state, slot, prompt)
        streams = [out[f"entering_{layer}"] for layer in self.draft.config.aux_layers]
        self.ring = self.draft.fill(self.ring, slot, np.concatenate(streams, axis=-1))
        self.anchors[slot], self.positions[slot] = out["logits"][-1].argmax(), len(prompt)

    def cycle(self, offered):
        """One cycle of every slot with so many drafts each [S]; -1: none, the slot rests. Returns
        drafts [S, 8], confidences, accepted counts and the target's greedy row [S, R].
        """
        drafts, _, sure = self.draft.draft(self.ring, self.anchors, self.positions)
        tokens = np.concatenate([self.anchors[:, None], drafts], axis=1)
        inputs = (self.target.weights, self.state, tokens, self.positions.copy())
        (logits, feats), self.state = self.verify(*inputs, ints(offered + 1), self.target.table)
        best = np.asarray(logits).argmax(-1)
        same = (drafts == best[:, :-1]) & (np.arange(8) < offered[:, None])
        accepted = np.cumprod(same, axis=1).sum(axis=1)
        kept = ints(np.where(offered >= 0, accepted + 1, 0))
        self.state = self.target.accept(self.state, kept, kept > 0)
        slots = np.arange(SLOTS, dtype=np.int32)
        self.ring = self.draft.rows(self.ring, slots, feats, self.positions.copy(), kept)
        self.anchors = np.where(offered >= 0, best[slots, accepted], self.anchors).astype(np.int32)
        self.positions = self.positions + kept
        return drafts, sure, accepted, best


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_cycle_of_the_traces(model, ranks):
    loop = Loop(Draft(model("k3_tiny", ranks)))
    for slot, trace in enumerate(TRACES):
        loop.admit(slot, trace["prompt"])
        assert loop.anchors[slot] == trace["tokens"][0]
    counts = set()
    for n in range(max(len(trace["cycles"]) for trace in TRACES)):
        running = [s for s, trace in enumerate(TRACES) if n < len(trace["cycles"])]
        offered = np.full(SLOTS, -1)
        for s in running:
            cycle = TRACES[s]["cycles"][n]
            assert (loop.positions[s], loop.anchors[s]) == (cycle["position"], cycle["anchor"])
            offered[s] = TRACES[s]["num_drafts"]
        drafts, sure, accepted, best = loop.cycle(offered)
        for s in running:
            cycle, m = TRACES[s]["cycles"][n], offered[s]
            assert drafts[s, :m].tolist() == cycle["drafts"], (s, n)
            assert worst(sure[s, :m], cycle["confidence"]) < 1e-5
            assert accepted[s] == cycle["accepted"], (s, n)
            emitted = [*drafts[s, : accepted[s]], best[s, accepted[s]]]
            assert emitted == cycle["emitted"]
            counts.add(int(accepted[s]))
    assert counts == set(range(9))
