"""The values of the curriculum, and the registry of skills.

Rule: a skill is a function of one `random.Random`. A single-turn skill returns a `Turn`; a
conversation skill returns a `Dialogue`, whose last message is the answer that is graded.
"""

import dataclasses
import json
import random
import zlib
from collections.abc import Callable
from typing import Any, Literal

Thinking = Literal["off", "on", "low", "high", "max"]  # "on" has no thinking-effort message


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A tool call."""

    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    think: str = ""  # assistant
    calls: tuple[Call, ...] = ()  # assistant
    tool: str = ""  # tool: the name of the tool that answers
    index: int = 0  # tool: the number of the call it answers, from 1


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer. `must` (words that have to occur) replaces exact grading."""

    prompt: str
    think: str
    answer: str
    must: tuple[str, ...] = ()

    def messages(self) -> list[Message]:
        return [user(self.prompt), assistant(self.answer, self.think)]


@dataclasses.dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation that ends with the graded answer: its text, or its calls."""

    messages: list[Message]
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    must: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One training row or evaluation case. A document has no messages, only `text`."""

    skill: str
    thinking: Thinking = "off"
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    must: tuple[str, ...] = ()
    text: str = ""

    @property
    def answer(self) -> Message:
        return self.messages[-1]

    @property
    def prompt(self) -> str:
        """All that the system and the user say."""
        return "\n".join(m.content for m in self.messages if m.role in ("system", "user"))


def user(content: str) -> Message:
    return Message("user", content)


def assistant(content: str, think: str = "", calls: tuple[Call, ...] = ()) -> Message:
    return Message("assistant", content, think, calls)


def is_held_out(sample: Sample) -> bool:
    """True for one prompt in sixteen: those are never trained on, and only they are tested.

    A prompt is all that is said before the answer, so a short question that is held out may still
    be trained on as a turn of a longer conversation or under a system prompt: else a fact that has
    only a few wordings would never be told.
    """
    return bool(sample.messages) and zlib.crc32(json.dumps(sample.prompt).encode()) % 16 == 0


# ----------------------------------------------------------------------------------- registry


@dataclasses.dataclass(frozen=True, slots=True)
class Skill:
    name: str
    group: str
    weight: float
    make: Callable[[random.Random], Any]


SINGLE: dict[str, Skill] = {}
CONVERSATION: dict[str, Skill] = {}


def single(group: str, weight: float = 1) -> Callable:
    """Registers a single-turn skill under the function's name."""
    return _register(SINGLE, group, weight)


def conversation(group: str, weight: float = 1) -> Callable:
    """Registers a conversation skill under the function's name."""
    return _register(CONVERSATION, group, weight)


def _register(table: dict[str, Skill], group: str, weight: float) -> Callable:
    def add(make: Callable[[random.Random], Any]) -> Callable[[random.Random], Any]:
        assert make.__name__ not in table, f"skill {make.__name__} is defined twice"
        table[make.__name__] = Skill(make.__name__, group, weight, make)
        return make

    return add


def draw_turn(rng: random.Random, groups: tuple[str, ...] | None = None) -> Turn:
    """A random single turn for use inside a conversation."""
    skills = [s for s in SINGLE.values() if groups is None or s.group in groups]
    return rng.choices(skills, [s.weight for s in skills])[0].make(rng)
