"""Greetings, who the model is, small talk, jokes, and saying that it does not know."""

import random

from scripts.train_nano import knowledge, lexicon
from scripts.train_nano.phrasing import capitalize, expand, one_of, plural
from scripts.train_nano.samples import Turn, single

_UNANSWERABLE = (
    "Who won the {y} [football|tennis|chess|rugby] [final|world cup|championship]?",
    "What is the [phone number|address|birthday|shoe size] of {n}?",
    "What will the [price of gold|stock market|weather] be in {y}?",
    "How many {x} are there in {c}?",
    "Who is {n} [Miller|Smith|Brown|Novak|Tanaka]?",
    "What did {n} [eat|say|buy|dream] [yesterday|last night]?",
    "Explain [quantum field theory|the tax law of|the history of|general topology of] {c}.",
    "What is the population of {c}?",
    "Write an essay about {x} [politics|economics|philosophy].",
)


@single("chat", 3)
def identity(rng: random.Random) -> Turn:
    question, answer = rng.choice(knowledge.IDENTITY)
    return Turn(one_of(rng, question), "The user asks about me.", answer)


@single("chat", 5)
def smalltalk(rng: random.Random) -> Turn:
    question, answer = rng.choice(knowledge.SMALL_TALK)
    return Turn(one_of(rng, question), "This is small talk.", answer)


@single("chat", 2)
def introduce(rng: random.Random) -> Turn:
    think, kind = "The user tells me something.", rng.randrange(3)
    if kind == 0:
        name = rng.choice(lexicon.NAMES)
        prompt = expand(rng, "[Hi, |Hello, |Hello! |]my name is {n}[.|!]", n=name)
        return Turn(prompt, think, f"Nice to meet you, {name}! How can I help you?")
    if kind == 1:
        food = rng.choice(lexicon.FOODS)
        prompt = expand(rng, "I [like|love|really like] {f}[.|!]", f=food)
        answer = f"{capitalize(food)} is a good choice! What else do you like?"
        return Turn(prompt, think, answer)
    hobby = rng.choice(lexicon.HOBBIES)
    prompt = expand(rng, "[My hobby is|I enjoy|I like] {h}[.|!]", h=hobby)
    return Turn(prompt, think, f"{capitalize(hobby)} sounds like fun! How often do you do it?")


@single("chat", 1)
def joke(rng: random.Random) -> Turn:
    question = (
        "[Tell me a joke[.|]|Do you know a joke?|Make me laugh[.|]|A joke, please[.|]|"
        "Another joke, please[.|]|Say something funny[.|]]"
    )
    answer = rng.choice(knowledge.JOKES)
    return Turn(expand(rng, question), "The user wants a joke.", answer, must=("?",))


@single("chat", 2)
def unknown(rng: random.Random) -> Turn:
    prompt = expand(
        rng,
        rng.choice(_UNANSWERABLE),
        y=rng.randint(1900, 2030),
        n=rng.choice(lexicon.NAMES),
        x=plural(rng.choice(lexicon.NOUNS)),
        c=rng.choice(lexicon.CITIES),
    )
    answer = "I am sorry, I do not know that. I am a very small model."
    return Turn(prompt, "I do not know this.", answer)
