"""The byte layout of a plan and of a tick's result: fixed int32 vectors, floats by their bits.

Rule: numpy only, and the one place that knows an offset. lockstep packs plans and unpacks results
with it on the host; runtime unpacks plans and packs results with it on the device (view works on
any array with slicing and reshape).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3serve.types import MAX_LOGIT_BIAS, MAX_STOP_IDS, MAX_TOP_LOGPROBS, TickShape

MAGIC = 0x4B335356  # "K3SV"
VERSION = 3


class Fault(enum.IntEnum):
    """Why a rank refused a plan. The largest code seen on any rank reaches every host."""

    NONE = 0
    MAGIC = 1
    VERSION = 2
    TICK = 3
    CHECKSUM = 4


@dataclass(frozen=True, slots=True)
class Field:
    """A named block of a layout."""

    offset: int
    shape: tuple[int, ...]
    is_float: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Names blocks of a flat int32 vector."""

    fields: dict[str, Field]
    size: int

    @staticmethod
    def of(**shapes: tuple[str, tuple[int, ...]]) -> Layout:
        """Each keyword is (kind, shape) with kind "i" or "f"; blocks lie in keyword order."""
        fields, offset = {}, 0
        for name, (kind, shape) in shapes.items():
            fields[name] = Field(offset, shape, kind == "f")
            offset += fields[name].size
        return Layout(fields, offset)

    def view(self, vector: Any, name: str) -> Any:
        """The block as int32 bits, for numpy and JAX arrays alike."""
        f = self.fields[name]
        return vector[f.offset : f.offset + f.size].reshape(f.shape)

    def array(self, vector: np.ndarray, name: str) -> np.ndarray:
        """The block of a numpy vector with its own dtype; a view that can be written."""
        block = self.view(vector, name)
        return block.view(np.float32) if self.fields[name].is_float else block

    def zeros(self) -> np.ndarray:
        return np.zeros(self.size, np.int32)


def plan_layout(shape: TickShape) -> Layout:
    """Per-slot blocks are indexed by slot; `admit` says which count. Page blocks: in plan order."""
    s, p = shape.max_slots, shape.pages_per_tick
    return Layout.of(
        magic=("i", ()),
        version=("i", ()),
        tick=("i", ()),
        stop=("i", ()),
        decode_steps=("i", ()),
        num_pages=("i", ()),
        release=("i", (s,)),
        admit=("i", (s,)),
        prompt_len=("i", (s,)),
        seed=("i", (s, 2)),  # low word, high word
        choice=("i", (s,)),
        temperature=("f", (s,)),
        top_p=("f", (s,)),
        top_k=("i", (s,)),
        min_p=("f", (s,)),
        presence_penalty=("f", (s,)),
        frequency_penalty=("f", (s,)),
        repetition_penalty=("f", (s,)),
        max_tokens=("i", (s,)),
        min_tokens=("i", (s,)),
        want_logprobs=("i", (s,)),
        speculate=("i", (s,)),
        stop_token_ids=("i", (s, MAX_STOP_IDS)),  # padded with -1
        bias_ids=("i", (s, MAX_LOGIT_BIAS)),  # padded with -1
        bias_values=("f", (s, MAX_LOGIT_BIAS)),
        page_table=("i", (s, shape.pages_per_slot)),  # padded with 0
        restore=("i", (s,)),  # of an admit: the snapshot to start from, -1: from nothing
        page_slot=("i", (p,)),
        page_start=("i", (p,)),
        page_len=("i", (p,)),
        page_next=("i", (p,)),
        page_final=("i", (p,)),
        page_score=("i", (p,)),
        page_save=("i", (p,)),  # the snapshot that takes the state at the page's end, or -1
        page_tokens=("i", (p, shape.page_tokens)),
        checksum=("i", ()),
    )


def result_layout(shape: TickShape) -> Layout:
    s, e, k = shape.max_slots, shape.emit, MAX_TOP_LOGPROBS
    p, c, m = shape.pages_per_tick, shape.page_tokens, shape.rows - 1
    return Layout.of(
        tick=("i", ()),
        fault=("i", ()),
        stop=("i", ()),
        steps=("i", ()),
        counts=("i", (s,)),
        finish=("i", (s,)),
        tokens=("i", (s, e)),
        logprobs=("f", (s, e)),
        top_ids=("i", (s, e, k)),
        top_logprobs=("f", (s, e, k)),
        slot_steps=("i", (s,)),
        offered=("i", (s, m)),
        accepted=("i", (s, m)),
        score_logprobs=("f", (p, c)),
        score_top_ids=("i", (p, c, k)),
        score_top_logprobs=("f", (p, c, k)),
    )


def checksum(vector: Any, xp: Any = np) -> Any:
    """Position-weighted wrap-around sum of all but the last word (xp: numpy or jax.numpy).

    Adding another host's non-zero words, exchanging two words, or shifting the vector changes it.
    """
    n = vector.shape[0] - 1
    weights = xp.arange(n, dtype=xp.uint32) * xp.uint32(2654435761) + xp.uint32(1)
    words = vector[:n].astype(xp.uint32)
    return xp.sum(words * (weights | xp.uint32(1)), dtype=xp.uint32).astype(xp.int32)
