"""Conversations: remembering what was said, system prompts, follow-ups, chained sums."""

import random

from scripts.train_nano import lexicon
from scripts.train_nano.phrasing import capitalize, expand
from scripts.train_nano.samples import (
    Dialogue,
    Message,
    assistant,
    conversation,
    draw_turn,
    user,
)
from scripts.train_nano.skills.arithmetic import add_steps, number


def _personal_facts(rng: random.Random) -> list[tuple[str, str, str, str]]:
    """What a user may tell: (statement, reaction, question, answer)."""
    name, city = rng.choice(lexicon.NAMES), rng.choice(lexicon.CITIES)
    colour, food = rng.choice(lexicon.CATEGORIES["colour"]), rng.choice(lexicon.FOODS)
    age = rng.randint(5, 80)
    return [
        (
            expand(rng, "[My name is|I am called|Call me] {n}.", n=name),
            f"Nice to meet you, {name}!",
            expand(rng, "[What is my name|What's my name|Do you remember my name|Who am I]?"),
            f"Your name is {name}.",
        ),
        (
            f"My favourite colour is {colour}.",
            f"{capitalize(colour)} is a lovely colour.",
            "What is my favourite colour?",
            f"Your favourite colour is {colour}.",
        ),
        (
            f"I live in {city}.",
            f"{city} is a nice place.",
            expand(rng, "[Where do I live|In which city do I live]?"),
            f"You live in {city}.",
        ),
        (
            f"My favourite food is {food}.",
            f"{capitalize(food)} is tasty.",
            "What is my favourite food?",
            f"Your favourite food is {food}.",
        ),
        (
            f"I am {age} years old.",
            f"{age} is a good age.",
            "How old am I?",
            f"You are {age} years old.",
        ),
    ]


@conversation("memory", 4)
def memory(rng: random.Random) -> Dialogue:
    facts = rng.sample(_personal_facts(rng), rng.randint(1, 3))
    note = "I should remember this."
    messages = []
    if len(facts) > 1 and rng.random() < 0.3:
        told = " ".join(fact[0] for fact in facts)
        messages += [user(told), assistant("Thank you for telling me.", note)]
    else:
        for statement, reaction, _, _ in facts:
            messages += [user(statement), assistant(reaction, note)]
    if rng.random() < 0.35:
        messages += draw_turn(rng).messages()
    _, _, question, answer = rng.choice(facts)
    messages += [user(question), assistant(answer, "The user told me this before.")]
    return Dialogue(messages)


@conversation("long", 0.8)
def long_chat(rng: random.Random) -> Dialogue:
    """Some 500 to 1,000 tokens: facts told first, many other turns, then one of them is asked."""
    facts = rng.sample(_personal_facts(rng), rng.randint(1, 3))
    messages = []
    for statement, reaction, _, _ in facts:
        messages += [user(statement), assistant(reaction, "I should remember this.")]
    for _ in range(rng.randint(7, 13)):
        messages += draw_turn(rng).messages()
    if rng.random() < 0.4:
        last = draw_turn(rng)
        return Dialogue(messages + last.messages(), must=last.must)
    _, _, question, answer = rng.choice(facts)
    messages += [user(question), assistant(answer, "The user told me this before.")]
    return Dialogue(messages)


@conversation("system", 2)
def system(rng: random.Random) -> Dialogue:
    kind = rng.randrange(4)
    if kind == 0:
        name = rng.choice(lexicon.NAMES)
        rule = expand(
            rng,
            "[You are|Your name is] {n}[, a helpful assistant|, a friendly robot|].",
            n=name,
        )
        question = expand(rng, "[Who are you|What is your name|What's your name]?")
        answer = assistant(f"My name is {name}.", "The system message gives my name.")
        return Dialogue([Message("system", rule), user(question), answer])
    turn = draw_turn(rng, groups=("facts", "arith"))
    rule, text = (
        (
            "[Answer|Reply|Respond|Always answer] in [upper case|capital letters].",
            turn.answer.upper(),
        ),
        (
            '[You are a cat. End|End|Always end] [every|each] [answer|reply] with "Meow!"',
            turn.answer + " Meow!",
        ),
        (
            "[You are a helpful assistant.|Be helpful and brief.|Answer the user's question.|"
            "You are a friendly assistant who gives short answers.]",
            turn.answer,
        ),
    )[kind - 1]
    messages = [Message("system", expand(rng, rule)), user(turn.prompt)]
    return Dialogue([*messages, assistant(text, turn.think)], must=turn.must)


@conversation("multi", 3)
def multi(rng: random.Random) -> Dialogue:
    turns = [draw_turn(rng) for _ in range(rng.randint(2, 4))]
    messages = [message for turn in turns for message in turn.messages()]
    return Dialogue(messages, must=turns[-1].must)


@conversation("multi", 1)
def followup(rng: random.Random) -> Dialogue:
    def reply(country: str) -> Message:
        fact = f"The capital of {country} is {lexicon.CAPITALS[country]}."
        return assistant(fact, fact)

    first, second = rng.sample(list(lexicon.CAPITALS), 2)
    question = f"What is the capital of {first}?"
    more = expand(rng, "[And of|And|What about] {c}?", c=second)
    return Dialogue([user(question), reply(first), user(more), reply(second)])


@conversation("multi", 1)
def chain_math(rng: random.Random) -> Dialogue:
    def reply(a: int, b: int) -> Message:
        return assistant(f"{a} + {b} = {a + b}", add_steps(a, b))

    a, b = number(rng, 2), number(rng, 2)
    question = f"What is {a} + {b}?"
    c = number(rng, rng.choice([1, 2]))
    more = expand(rng, "[Add|Now add] {c}[ to that|].", c=c)
    return Dialogue([user(question), reply(a, b), user(more), reply(a + b, c)])
