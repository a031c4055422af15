"""Draws samples: which skill, which thinking mode, how many earlier turns; and grades answers.

Rule: training and evaluation split by prompt (`samples.is_held_out`), and both are endless
deterministic streams of a seed.

Try it: `python -m scripts.train_nano.sampling 5` prints five samples as the model sees them.
"""

import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from scripts.train_nano import skills, xtml
from scripts.train_nano.phrasing import expand
from scripts.train_nano.samples import (
    CONVERSATION,
    SINGLE,
    Dialogue,
    Message,
    Sample,
    Skill,
    Thinking,
    Turn,
    draw_turn,
    is_held_out,
)

assert skills  # imported for what it registers

THINKING_MODES: tuple[Thinking, ...] = get_args(Thinking)
_SYSTEM_PROMPT = (
    "[You are a helpful assistant.|You are K3-nano.|You are a friendly assistant.|Be helpful.]"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Mix:
    """Shares of a training stage. The rest of the samples are plain documents."""

    single: float
    conversation: float
    tools: bool  # whether conversations with tools are among them
    thinking: tuple[float, ...]  # weights of THINKING_MODES
    # Factors on the weights of skills, by the name of a skill or of a group.
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def weight(self, skill: Skill) -> float:
        by_group = self.factors.get(skill.group, 1.0)
        return skill.weight * by_group * self.factors.get(skill.name, 1.0)


_NOT_YET = {"long": 0.0}
# What the stages before left weakest (docs/nano-model.md) comes more often in the last one.
_HARDER = {
    "string": 2.4, "lists": 2.0, "arith": 1.4, "multiple_choice": 2.5, "category": 2.5,
    "numbers_in_words": 2.5, "fill_blank": 2.0, "word_problem": 2.0, "lower": 1.6, "spell": 1.6,
}  # fmt: skip

MIXES = {
    "chat": Mix(0.72, 0.22, tools=False, thinking=(0.50, 0.36, 0.02, 0.02, 0.10), factors=_NOT_YET),
    "full": Mix(0.56, 0.38, tools=True, thinking=(0.42, 0.34, 0.04, 0.04, 0.16), factors=_NOT_YET),
    "final": Mix(0.64, 0.32, tools=True, thinking=(0.44, 0.22, 0.04, 0.04, 0.26), factors=_HARDER),
}


def draw(rng: random.Random, mix: Mix) -> Sample:
    """One sample of a training mix, held out or not."""
    kind = rng.random()
    if kind >= mix.single + mix.conversation:
        return Sample("document", text=skills.generation.document(rng))
    thinking = rng.choices(THINKING_MODES, mix.thinking)[0]
    if kind < mix.single:
        pool = list(SINGLE.values())
    else:
        pool = [s for s in CONVERSATION.values() if mix.tools or s.group != "tools"]
    skill = rng.choices(pool, [mix.weight(s) for s in pool])[0]
    earlier = rng.randint(1, 2) if rng.random() < 0.3 else 0
    return make_sample(rng, skill.name, thinking, earlier, system_prompts=True)


def make_sample(
    rng: random.Random,
    skill: str,
    thinking: Thinking,
    earlier_turns: int = 0,
    system_prompts: bool = False,
) -> Sample:
    """One sample of a skill. Single-turn skills may get unrelated earlier turns before them, and
    now and then a system prompt."""
    if skill in CONVERSATION:
        dialogue = CONVERSATION[skill].make(rng)
        return _conversation_sample(skill, thinking, dialogue)
    turn: Turn = SINGLE[skill].make(rng)
    messages = turn.messages()
    for _ in range(earlier_turns):
        messages = draw_turn(rng).messages() + messages
    if system_prompts and rng.random() < 0.1:
        messages.insert(0, Message("system", expand(rng, _SYSTEM_PROMPT)))
    return Sample(skill, thinking, tuple(messages), must=turn.must)


def _conversation_sample(skill: str, thinking: Thinking, dialogue: Dialogue) -> Sample:
    return Sample(skill, thinking, tuple(dialogue.messages), tuple(dialogue.tools), dialogue.must)


class SampleStream:
    """Endless training samples of one mix; none of them is held out."""

    def __init__(self, seed: int, mix: Mix):
        self.rng = random.Random(seed)
        self.mix = mix

    def __iter__(self) -> Iterator[Sample]:
        return self

    def __next__(self) -> Sample:
        while True:
            sample = draw(self.rng, self.mix)
            if not is_held_out(sample):
                return sample

    def state(self) -> list[Any]:
        version, words, gauss = self.rng.getstate()
        return [version, list(words), gauss]

    def restore(self, state: list[Any]) -> None:
        version, words, gauss = state
        self.rng.setstate((version, tuple(words), gauss))


def held_out_samples(seed: int, skill: str, thinking: Thinking, count: int) -> list[Sample]:
    """Up to `count` different held-out samples; fewer where a skill has fewer prompts."""
    rng = random.Random(f"{seed}/{skill}")
    found: dict[str, Sample] = {}
    for _ in range(400 * count):
        sample = make_sample(rng, skill, thinking)
        if is_held_out(sample):
            found.setdefault(xtml.text_of(xtml.render(sample, prompt_only=True)), sample)
        if len(found) == count:
            break
    return list(found.values())


def is_right(sample: Sample, reply: xtml.Reply) -> bool:
    """Exact text; or the exact first call; or, for free text, the words that have to occur."""
    answer = sample.answer
    if answer.calls:
        return reply.calls[:1] == answer.calls[:1]
    if sample.must:
        text = reply.text.lower()
        return reply.finished and all(word.lower() in text for word in sample.must)
    return reply.finished and reply.text == answer.content


def group_of(skill: str) -> str:
    return (SINGLE.get(skill) or CONVERSATION[skill]).group


def skill_names() -> list[str]:
    return [*SINGLE, *CONVERSATION]


if __name__ == "__main__":
    stream = SampleStream(0, MIXES["full"])
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 10):
        sample = next(stream)
        print(f"--- {sample.skill}, thinking {sample.thinking}")
        print(xtml.text_of(xtml.render(sample)))
