"""How a tick is shared between prompts and decoding: which pages run, and how many decode steps.

Rules, each with a test:
- Pages go round-robin over the prompts in slots, one page a turn. A prompt in a slot waits for at
  most max_slots - 1 others between two of its pages, so it gets its next page within
  ceil(max_slots / pages_per_tick) plans, counted from the plan that admits it. When fewer prompts
  than pages_per_tick wait, one prompt gets several pages of the tick.
- While a page runs in the tick or is left over, or a request waits for a slot, decoding slots get
  BUSY_STEPS steps; otherwise steps_per_tick. Steps are 0 only where no slot can be decoding. So
  prompts never stop a stream, and a stream never holds up a prompt by more than BUSY_STEPS a tick.
"""

from __future__ import annotations

from collections import deque

from k3serve.scheduler.slots import Sequence
from k3serve.types import PageWork, TickShape

# Short ticks while somebody waits: a finish is learnt, and its slot passed on, that much sooner.
# More than 4 cost tokens/s and waits, 1 gains nothing (scripts/bench_busy.py; docs/LOG.md).
BUSY_STEPS = 2


def next_page(sequence: Sequence, page_tokens: int) -> PageWork:
    """The sequence's next prompt page; it counts as planned from here on."""
    assert sequence.slot is not None, "only a sequence in a slot has pages to run"
    prompt, start = sequence.request.prompt, sequence.planned_prompt
    end = min(start + page_tokens, len(prompt))
    final = end == len(prompt)
    sequence.planned_prompt = end
    return PageWork(
        slot=sequence.slot,
        start=start,
        tokens=prompt[start:end],
        next_token=-1 if final else prompt[end],
        final=final,
        score=sequence.scored,
    )


def take_pages(prefilling: deque[Sequence], shape: TickShape) -> tuple[PageWork, ...]:
    """This tick's pages, taken in turn; sequences whose prompt is planned leave the queue."""
    pages: list[PageWork] = []
    while prefilling and len(pages) < shape.pages_per_tick:
        sequence = prefilling.popleft()
        pages.append(next_page(sequence, shape.page_tokens))
        if not sequence.prompt_planned:
            prefilling.append(sequence)
    return tuple(pages)


def decode_steps(shape: TickShape, *, can_decode: bool, somebody_waits: bool) -> int:
    if not can_decode:
        return 0
    return min(BUSY_STEPS, shape.steps_per_tick) if somebody_waits else shape.steps_per_tick
