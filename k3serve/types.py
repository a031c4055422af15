"""One value per hop on a request's way: Request -> Plan -> TickResult -> TokenEvent.

Rule: frozen values only, no behaviour beyond trivial derived properties; standard library, numpy.
The words (slot, tick, plan, page, ...) are those of the README.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

MAX_TOP_LOGPROBS = 20
MAX_STOP_IDS = 16
MAX_LOGIT_BIAS = 300
# Beside the ends of prompts and the places where they part, every so many pages get a snapshot: a
# prompt that was cut off, or parts elsewhere, computes at most so many pages again.
SNAPSHOT_EVERY = 8
GREEDY_BELOW = 1e-5  # a temperature under this takes the best token: dividing would only overflow


class Finish(enum.IntEnum):
    """Why a request ended. The device reports NONE, STOP or LENGTH; the leader adds the others."""

    NONE = 0
    STOP = 1  # a stop token was produced; it is the last token of the last event
    LENGTH = 2  # the token budget or the context is used up
    CANCELLED = 3  # the client left, a stop string was seen, or the server drained
    ERROR = 4  # the server failed; TokenEvent.error says how


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are chosen. The device honours every field.

    Stop strings are not here: the HTTP thread watches for them and turns one into a cancel.
    """

    max_tokens: int  # >= 0; 0 scores the prompt only
    seed: int = 0  # 0 <= seed < 2**64; the API draws one where the client gave none
    choice: int = 0  # index of this choice among the n of its prompt: gives each its own stream
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 means off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # at most MAX_LOGIT_BIAS pairs (token id, bias)
    min_tokens: int = 0  # stop ids are masked until so many tokens were produced
    stop_token_ids: tuple[int, ...] = ()  # at most MAX_STOP_IDS; holds the end token unless ignored
    top_logprobs: int | None = None  # None: no logprobs; N: the chosen token's and the N best ones
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens (echo)
    speculate: bool = True  # False: no drafts for this request; only its speed may change


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to run: a prompt, and how to continue it (n choices of m prompts: n*m)."""

    id: int
    prompt: tuple[int, ...]  # token ids, at least one
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this request any more."""

    request_id: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of prompt positions start .. start+len-1, as they come in page by page.

    Row i speaks of the prompt token at position start+i, given all before it. Position 0 has no
    score, so the first chunk starts at 1. The best token is top_ids[i, 0]. The token's own value is
    bit-equal to its value in top_logprobs when it is among them.
    """

    start: int
    logprobs: np.ndarray  # [len] f32
    top_ids: np.ndarray  # [len, MAX_TOP_LOGPROBS] i32, best first
    top_logprobs: np.ndarray  # [len, MAX_TOP_LOGPROBS] f32


@dataclass(frozen=True, slots=True)
class DraftStats:
    """What drafting did for one request in some stretch of decode steps. Counts add up.

    Only drafts whose tokens were emitted count as accepted: none after a stop token or the budget.
    """

    steps: int  # decode steps of the target; each emits one token more than it accepted
    offered: tuple[int, ...]  # drafts verified at each position of a block
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one tick brought to one request. Its last event has a finish other than NONE."""

    request_id: int
    tokens: tuple[int, ...] = ()  # a stop token is the last one here
    logprobs: tuple[float, ...] = ()  # per token, where asked for; of the model's own distribution
    top_ids: tuple[tuple[int, ...], ...] = ()  # per token, top_logprobs entries, best first
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    prompt_scores: PromptScores | None = None
    drafts: DraftStats | None = None  # where decode steps ran and the server has a draft
    cached_tokens: int = 0  # on the first event: prompt tokens that were not computed again
    finish: Finish = Finish.NONE
    error: str | None = None  # with Finish.ERROR


class Outbox(Protocol):
    """Where a request's HTTP thread waits for its events."""

    def get(self, timeout_s: float | None = None) -> TokenEvent | None:
        """The next event; None when timeout_s passed without one."""
        ...

    def waiting(self) -> int:
        """How many events nobody has taken yet, at least about."""
        ...


class State(enum.Enum):
    """What an operator and a load balancer want to know of a server."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # a host failed; the front waits for the next engine
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Capacity:
    """A server's fixed limits and its present load."""

    max_slots: int
    max_context: int  # prompt plus generated tokens of one request
    max_queue: int
    running: int = 0
    waiting: int = 0


class Executor(Protocol):
    """Everything above the engine talks to this: the leader of a pod, or a scripted fake in tests.

    Thread-safe. submit() never blocks: it queues the request or raises Overloaded.
    """

    def submit(self, request: Request) -> Outbox: ...

    def cancel(self, request_id: int) -> None:
        """Frees the request's slot one tick later; unknown and finished ids are ignored.

        Whether a last event follows is open: the caller already knows that it cancelled.
        """
        ...

    def state(self) -> State: ...

    def capacity(self) -> Capacity: ...


# -------------------------------------------------------------------------------- one tick


@dataclass(frozen=True, slots=True)
class Admit:
    """A request enters a slot: its settings, and the cache pages that hold its positions. Those of
    whole prompt pages may be shared with other slots; the slot only rewrites what they hold.
    """

    slot: int
    prompt_len: int
    sampling: Sampling
    pages: tuple[int, ...]  # cache page numbers, in order of position; covers prompt + max_tokens
    restore: int | None = None  # snapshot of the state before its first computed page; None: zeros


@dataclass(frozen=True, slots=True)
class PageWork:
    """One page of a prompt to compute. Pages of one slot appear in order, also within one plan."""

    slot: int
    start: int  # absolute position of tokens[0], a multiple of the page size
    tokens: tuple[int, ...]  # at most page_tokens; shorter only on the prompt's last page
    next_token: int  # the prompt token after the page, or -1 on the last page
    final: bool  # the prompt ends here: sample the first token (if max_tokens > 0), then decode
    score: bool  # return scores for this page's positions
    save: int | None = None  # snapshot that takes the slot's state at this page's end


@dataclass(frozen=True, slots=True)
class Plan:
    """What one tick does on every host, in this order: release, admit, pages, decode steps."""

    tick: int
    releases: tuple[int, ...] = ()  # slots
    admits: tuple[Admit, ...] = ()
    pages: tuple[PageWork, ...] = ()
    decode_steps: int = 0  # at most steps_per_tick
    stop: bool = False  # the run ends after this tick, on every host


@dataclass(frozen=True, slots=True)
class TickResult:
    """What a tick produced, unpacked from wire.result_layout. Arrays are read-only views."""

    tick: int
    fault: int  # 0, or a wire.Fault code raised on any rank
    stopped: bool  # the plan asked all hosts to end
    steps: int  # decode steps run
    counts: np.ndarray  # [slots] i32: tokens emitted by each slot in this tick
    tokens: np.ndarray  # [slots, emit] i32
    logprobs: np.ndarray  # [slots, emit] f32
    top_ids: np.ndarray  # [slots, emit, MAX_TOP_LOGPROBS] i32
    top_logprobs: np.ndarray  # [slots, emit, MAX_TOP_LOGPROBS] f32
    finish: np.ndarray  # [slots] i32: Finish NONE, STOP or LENGTH, in the tick where it happened
    slot_steps: np.ndarray  # [slots] i32: decode steps in which the slot took part
    offered: np.ndarray  # [slots, rows-1] i32: drafts verified, by position in the block
    accepted: np.ndarray  # [slots, rows-1] i32: of these, accepted and emitted
    score_logprobs: np.ndarray  # [pages, page_tokens] f32: row i scores the token after position i
    score_top_ids: np.ndarray  # [pages, page_tokens, MAX_TOP_LOGPROBS] i32
    score_top_logprobs: np.ndarray  # [pages, page_tokens, MAX_TOP_LOGPROBS] f32


@dataclass(frozen=True, slots=True)
class TickShape:
    """The fixed sizes of plan and result, equal on all hosts. No shape depends on the load."""

    max_slots: int  # S
    page_tokens: int  # C
    pages_per_tick: int  # P: pages of any prompts computed in one tick, in plan order
    steps_per_tick: int  # T: decode steps in one tick
    rows: int  # R: rows a slot decodes at once: the anchor and R-1 drafts
    pages_per_slot: int  # length of a slot's page table: max_context / C
    num_pages: int = field(default=0)  # size of the cache pool; page 0 .. num_pages-1
    num_snapshots: int = field(default=0)  # size of the snapshot pool; 0: no prefix is reused
    tile_slots: int = field(default=0)  # slots of one decode tile, a divisor of max_slots; 0: all

    @property
    def max_context(self) -> int:
        return self.pages_per_slot * self.page_tokens

    @property
    def tile(self) -> int:
        """Slots that a decode step computes in one go; tiles without work cost nothing."""
        return self.tile_slots or self.max_slots

    @property
    def emit(self) -> int:
        """Most tokens a slot emits in a tick: the first after a prompt, then T steps of R rows."""
        return 1 + self.steps_per_tick * self.rows

    def pages_for(self, tokens: int) -> int:
        """Cache pages that hold so many positions of one slot; no more than its page table has."""
        return min(-(-tokens // self.page_tokens), self.pages_per_slot)


@dataclass(frozen=True, slots=True)
class TickTimes:
    """Seconds of the engine thread by phase while there is work, and of the device without a
    tick to run meanwhile.
    """

    plan: float = 0.0  # messages taken, plan made and packed
    dispatch: float = 0.0
    wait: float = 0.0  # for the device: what overlap leaves of its time
    commit: float = 0.0  # result checked, unpacked and turned into events
    deliver: float = 0.0  # events handed out, metrics counted
    device_idle: float = 0.0
