"""The mix of requests that scripts/check_invariance.py replays: every kind that a client sends.

Rule: a pure function of (count, seed); random prompts have lengths at the borders of a page, chats
are held-out ones of K3-nano's curriculum, so that drafts are accepted and refused.

A conversation's later turns hold the answers of the earlier ones, which only the server knows: such
an item names the item it follows, and gets its messages when that one's answer is recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PAGE = 64  # tokens: the server's default
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1)
TURNS = 4  # of a conversation


@dataclass(frozen=True, slots=True)
class Item:
    kind: str
    path: str
    body: dict[str, Any]
    stream: bool = False  # read as a stream, chunk by chunk
    leaves_after: int | None = None  # chunks that a streaming client reads before it goes
    follows: int | None = None  # the item whose answer comes before this one's last message


def build(count: int, seed: int = 0) -> list[Item]:
    """So many items: the kinds in turn, a conversation's turns far apart."""
    rng = random.Random(seed)
    shared = prompt_of(rng, 3 * PAGE + 7)
    chats = iter(held_out(count))
    makers: list[Callable[[], Item]] = [
        lambda: Item("greedy", COMPLETIONS, completion(rng)),
        lambda: Item("sampled", COMPLETIONS, sampled(rng)),
        lambda: Item("scored", COMPLETIONS, scored(rng)),
        lambda: Item("chat", CHAT, next(chats)),
        lambda: Item("choices", COMPLETIONS, sampled(rng) | {"n": rng.choice([2, 3])}),
        lambda: Item("stream", COMPLETIONS, completion(rng), stream=True),
        lambda: Item("shared prefix", COMPLETIONS, scored(rng, shared)),
        lambda: Item("tools", CHAT, with_tools(rng)),
        lambda: Item("cancel", COMPLETIONS, completion(rng) | {"max_tokens": 120}, stream=True,
                     leaves_after=rng.choice([0, 1, 2, 5])),
        lambda: Item("sampled chat", CHAT, next(chats) | drawn(rng)),
    ]  # fmt: skip
    items: list[Item] = []
    previous: int | None = None
    while len(items) < count:
        for make in makers:
            items.append(make())
        turn = sum(item.kind == "conversation" for item in items) % TURNS
        follows = previous if turn else None
        previous = len(items)
        items.append(Item("conversation", CHAT, turn_of(rng, turn), follows=follows))
    return items[:count]


def prompt_of(rng: random.Random, length: int) -> list[int]:
    """Ordinary token ids of K3-nano, in no order that a draft could guess."""
    return [rng.randrange(50, 1950) for _ in range(length)]


def completion(rng: random.Random) -> dict[str, Any]:
    length = rng.choice([*LENGTHS, rng.randint(2, 5 * PAGE)])
    return {
        "prompt": prompt_of(rng, length),
        "max_tokens": rng.choice([1, 5, 20, 40]),
        "temperature": 0,
        "logprobs": rng.choice([0, 1, 3]),
        "ignore_eos": rng.random() < 0.5,
        "return_token_ids": True,
    }


def drawn(rng: random.Random) -> dict[str, Any]:
    limits = rng.choice([{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.02}])
    return {"temperature": rng.choice([0.7, 1.0]), "seed": rng.randrange(1 << 32)} | limits


def sampled(rng: random.Random) -> dict[str, Any]:
    more = rng.choice([{}, {"frequency_penalty": 0.7, "logit_bias": {"100": -100, "200": 3}}])
    return completion(rng) | drawn(rng) | more


def scored(rng: random.Random, shared: list[int] | None = None) -> dict[str, Any]:
    """An evaluator's question; with `shared`, many begin with the same pages."""
    start = [] if shared is None else shared[: rng.choice([PAGE, 2 * PAGE, len(shared)])]
    tail = prompt_of(rng, rng.choice([*LENGTHS, rng.randint(2, 200)]))
    return completion(rng) | {
        "prompt": start + tail,
        "echo": True,
        "max_tokens": rng.choice([0, 1, 1, 8]),
    }


def held_out(count: int) -> list[dict[str, Any]]:
    """So many held-out chats, of every skill and thinking mode in turn."""
    from scripts.check_drafts import bodies

    return [body | {"return_token_ids": True} for body in bodies(count)]


def with_tools(rng: random.Random) -> dict[str, Any]:
    city = rng.choice(["Paris", "Oslo", "Rome", "Madrid"])
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Gives the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    question = {"role": "user", "content": f"What is the weather in {city}?"}
    return ASKED | {"messages": [question], "tools": [weather]}


def turn_of(rng: random.Random, turn: int) -> dict[str, Any]:
    questions = [
        f"My name is {rng.choice(['Ben', 'Ana', 'Tom'])}. Tell me a story about a cat.",
        f"What is {rng.randint(2, 99)} plus {rng.randint(2, 99)}?",
        "What is my name?",
        f"How do you say {rng.choice(['milk', 'bread'])} in Spanish?",
    ]
    return ASKED | {"messages": [{"role": "user", "content": questions[turn]}]}


def after(body: dict[str, Any], before: dict[str, Any], answer: str) -> dict[str, Any]:
    """A conversation's next turn: the turn before, its answer, and the new question."""
    said = [*before["messages"], {"role": "assistant", "content": answer}]
    return body | {"messages": said + body["messages"]}


ASKED: dict[str, Any] = {
    "max_tokens": 60,
    "temperature": 0,
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
    "chat_template_kwargs": {"thinking": False},
}
