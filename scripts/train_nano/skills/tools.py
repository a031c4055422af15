"""Tool calls: ten fixed tools, invented ones whose names must be copied, and two calls at once.

Rule: a third of the samples use a tool that never occurs twice in this form, or the model would
learn ten names by heart and could not call a user's own tool.
"""

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

from scripts.train_nano import lexicon
from scripts.train_nano.phrasing import capitalize, expand, plural, random_phrase
from scripts.train_nano.samples import (
    Call,
    Dialogue,
    Message,
    assistant,
    conversation,
    draw_turn,
    user,
)

_WEATHER = "sunny cloudy rainy windy snowy foggy".split()


def declare(name: str, description: str, /, **properties: str) -> dict[str, Any]:
    """An OpenAI-style function declaration; every property is required."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A request that needs a tool: what to call, what comes back, what to say then."""

    prompt: str
    arguments: dict[str, Any]
    result: str
    reply: str


TOOLS: dict[str, dict[str, Any]] = {}
_CASES: dict[str, Callable[[random.Random], Case]] = {}


def _tool(description: str, /, **properties: str) -> Callable:
    def add(make: Callable[[random.Random], Case]) -> Callable[[random.Random], Case]:
        TOOLS[make.__name__] = declare(make.__name__, description, **properties)
        _CASES[make.__name__] = make
        return make

    return add


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


@_tool("Evaluate an arithmetic expression", expression="string")
def calculator(rng: random.Random) -> Case:
    a, b, sign = rng.randint(2, 999), rng.randint(2, 999), rng.choice("+-*")
    expression = f"{a} {sign} {b}"
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    prompt = expand(rng, "[What is|Calculate|Compute|How much is] {e}?", e=expression)
    return Case(prompt, {"expression": expression}, str(value), f"{expression} = {value}")


@_tool("Get the weather in a city", city="string")
def get_weather(rng: random.Random) -> Case:
    city, sky, degrees = rng.choice(lexicon.CITIES), rng.choice(_WEATHER), rng.randint(-10, 38)
    question = (
        "[What is the weather in {c}?|How is the weather in {c}?|"
        "What's the weather like in {c}?|Weather in {c}?]"
    )
    as_json = json.dumps({"temperature": degrees, "condition": sky})
    result = rng.choice([as_json, f"{sky}, {degrees} degrees"])
    reply = f"It is {sky} in {city} with {degrees} degrees."
    return Case(expand(rng, question, c=city), {"city": city}, result, reply)


@_tool("Get the current time in a city", city="string")
def get_time(rng: random.Random) -> Case:
    city, clock = rng.choice(lexicon.CITIES), _clock(rng)
    question = "[What time is it in {c}?|Tell me the time in {c}.|What is the time in {c}?]"
    return Case(expand(rng, question, c=city), {"city": city}, clock, f"It is {clock} in {city}.")


@_tool("Search the web", query="string")
def search(rng: random.Random) -> Case:
    query = f"{rng.choice(lexicon.ADJECTIVES)} {rng.choice(lexicon.NOUNS)}"
    found = f"{rng.randint(2, 99)} results"
    prompt = expand(rng, "[Search for|Look up|Search the web for] {q}.", q=query)
    return Case(prompt, {"query": query}, found, f"I found {found} for {query}.")


@_tool("Set a timer", minutes="integer")
def set_timer(rng: random.Random) -> Case:
    n = rng.randint(1, 90)
    prompt = expand(rng, "[Set a timer for|Start a timer for] {m} minutes.", m=n)
    return Case(prompt, {"minutes": n}, "ok", f"The timer is set for {n} minutes.")


@_tool("Send a message", to="string", text="string")
def send_message(rng: random.Random) -> Case:
    name, text = rng.choice(lexicon.NAMES), random_phrase(rng, rng.randint(1, 4))
    question = "[Send|Write] {n} [the message|a message saying]: {x}"
    prompt = expand(rng, question, n=name, x=text)
    return Case(prompt, {"to": name, "text": text}, "sent", f"I sent your message to {name}.")


@_tool("Play a song", title="string")
def play_music(rng: random.Random) -> Case:
    title = f"{rng.choice(lexicon.ADJECTIVES)} {rng.choice(lexicon.NOUNS)}"
    prompt = expand(rng, '[Play|Play the song] "{x}".', x=title)
    return Case(prompt, {"title": title}, "playing", f"Now playing {title}.")


@_tool("Add an item to a list", item="string", count="integer")
def add_item(rng: random.Random) -> Case:
    n, things = rng.randint(2, 12), plural(rng.choice(lexicon.NOUNS))
    prompt = expand(rng, "Add {k} {o} to [my|the] list.", k=n, o=things)
    return Case(
        prompt, {"item": things, "count": n}, "added", f"I added {n} {things} to your list."
    )


@_tool("Translate a word", word="string", language="string")
def translate(rng: random.Random) -> Case:
    language = rng.choice(list(lexicon.FOREIGN_WORDS))
    word, foreign = rng.choice(list(lexicon.FOREIGN_WORDS[language].items()))
    question = "[Translate {w} into {l}.|How do you say {w} in {l}?]"
    prompt = expand(rng, question, w=word, l=language)
    reply = f'"{capitalize(word)}" in {language} is "{foreign}".'
    return Case(prompt, {"word": word, "language": language}, foreign, reply)


@_tool("Find a user by name", name="string")
def lookup_user(rng: random.Random) -> Case:
    name = rng.choice(lexicon.NAMES)
    found = rng.choice([f"{name.lower()}@example.com", f"user {rng.randint(1, 999)}"])
    question = "[Find the user {n}.|Look up the user {n}.|Who is the user {n}?]"
    return Case(expand(rng, question, n=name), {"name": name}, found, f"I found {name}: {found}.")


def _invented(rng: random.Random) -> tuple[dict[str, Any], Case]:
    verbs = "find open book order check count read close rate paint fetch start".split()
    things = "room ticket taxi file door report score order page photo note seat".split()
    keys = "name id title place target value label".split()
    verb, thing, key = rng.choice(verbs), rng.choice(things), rng.choice(keys)
    value = rng.choice(
        [
            rng.choice(lexicon.NAMES),
            rng.choice(lexicon.CITIES),
            rng.choice(lexicon.NOUNS),
            str(rng.randint(10, 999)),
        ]
    )
    declaration = declare(f"{verb}_{thing}", f"{capitalize(verb)} a {thing}", **{key: "string"})
    question = "[Please |]{v} the {o} [for |with {k} |called |]{x}."
    prompt = expand(rng, question, v=verb, o=thing, k=key, x=value)
    result = rng.choice(["done", "ok", "ready"])
    return declaration, Case(prompt, {key: value}, result, f"Done: {verb} {thing} {value}.")


@conversation("tools", 5)
def tool_use(rng: random.Random) -> Dialogue:
    """A call; or a call, its result and the reply; or tools that are not needed."""
    if rng.random() < 0.35:
        declaration, case = _invented(rng)
        tools = [declaration] + [TOOLS[t] for t in rng.sample(list(TOOLS), rng.randint(0, 1))]
        name = declaration["function"]["name"]
    else:
        names = rng.sample(list(TOOLS), rng.randint(1, 3))
        name = rng.choice(names)
        case, tools = _CASES[name](rng), [TOOLS[t] for t in names]
    rng.shuffle(tools)
    kind = rng.random()
    if kind < 0.15:
        turn = draw_turn(rng, groups=("chat", "facts", "string"))
        return Dialogue(turn.messages(), tools, must=turn.must)
    call = assistant("", f"I should call {name}.", (Call(name, case.arguments),))
    if kind < 0.45:
        return Dialogue([user(case.prompt), call], tools)
    result = Message("tool", case.result, tool=name, index=1)
    reply = assistant(case.reply, "I have the result.")
    return Dialogue([user(case.prompt), call, result, reply], tools)


@conversation("tools", 1)
def two_calls(rng: random.Random) -> Dialogue:
    name = rng.choice(["get_weather", "get_time"])
    a, b = rng.sample(lexicon.CITIES, 2)
    question = "[What is the {x} in {a} and {b}?|Compare the {x} in {a} and {b}.]"
    prompt = expand(rng, question, x=name.removeprefix("get_"), a=a, b=b)
    calls = (Call(name, {"city": a}), Call(name, {"city": b}))
    first, second = (_clock(rng) if name == "get_time" else rng.choice(_WEATHER) for _ in range(2))
    messages = [user(prompt), assistant("", f"I should call {name} twice.", calls)]
    if rng.random() < 0.6:
        messages += [
            Message("tool", first, tool=name, index=1),
            Message("tool", second, tool=name, index=2),
            assistant(f"In {a} it is {first} and in {b} it is {second}.", "I have both results."),
        ]
    return Dialogue(messages, [TOOLS[name]])
