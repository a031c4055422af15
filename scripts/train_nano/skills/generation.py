"""Free text: stories, poems, lists, instructions, one-line functions, completions, documents."""

import random

from scripts.train_nano import knowledge, lexicon
from scripts.train_nano.phrasing import (
    expand,
    join_and,
    number_words,
    with_article,
)
from scripts.train_nano.samples import Turn, single

_PLACES = "forest village garden castle valley city beach island meadow".split()
_MIDDLES = (
    'One day {n} found {ao} in the {p}. "What a [nice|lovely|strange] surprise!" said {n}.',
    "One morning {n} lost {his} {o} and looked for it everywhere in the {p}.",
    "One evening {n} heard a [strange|loud|soft] sound near the {p}. "
    "It was {ao} that had fallen down.",
    "One day it started to rain and the {p} became very wet. {n} needed a dry place to sleep.",
)
_TURNS = (
    "Then {n} met {g} and they [shared|ate] some {f} together.",
    "A friend called {g} came to help, and {he} was very happy.",
    "{n} asked {g} for help, and together they [solved the problem|found a way].",
)
_ENDS = (
    "[In the end|At last|After that], {n} [went home|fell asleep|smiled] and "
    "[felt happy|was not sad any more|had a new friend]."
)


def story(rng: random.Random, hero: str | None = None, animal: str | None = None) -> str:
    """Four sentences about an animal; a hero keeps one pronoun, decided by the name."""
    name, friend = hero or rng.choice(lexicon.NAMES), rng.choice(lexicon.NAMES)
    animal = animal or rng.choice(lexicon.CATEGORIES["animal"])
    place, thing = rng.choice(_PLACES), rng.choice(lexicon.NOUNS)
    he, his = ("she", "her") if name.endswith(("a", "e", "y")) else ("he", "his")
    slots = {
        "n": name, "g": friend, "p": place, "o": thing, "ao": with_article(thing),
        "f": rng.choice(lexicon.FOODS), "he": he, "his": his,
    }  # fmt: skip
    who = f"{with_article(rng.choice(lexicon.ADJECTIVES))} {animal} called {name}"
    start = f"Once upon a time there was {who} who lived in {with_article(place)}."
    rest = " ".join(expand(rng, rng.choice(part)) for part in (_MIDDLES, _TURNS, (_ENDS,)))
    return start + " " + expand(rng, rest, **slots)


@single("gen", 3)
def tell_story(rng: random.Random) -> Turn:
    animal, name = rng.choice(lexicon.CATEGORIES["animal"]), rng.choice(lexicon.NAMES)
    named = rng.random() < 0.5
    about = with_article(animal) + (f" called {name}" if named else "")
    prompt = expand(rng, "[Tell me|Write|Write me] a [short |]story about {a}[.|]", a=about)
    must = (animal, "Once upon a time", *([name] if named else []))
    think = f"I will write a short story about {with_article(animal)}."
    return Turn(prompt, think, story(rng, name if named else None, animal), must)


@single("gen", 1)
def poem(rng: random.Random) -> Turn:
    thing = rng.choice(lexicon.NOUNS)
    first, second = rng.sample(lexicon.ADJECTIVES, 2)
    place, ending = rng.choice(
        [
            ("day", "goes away"),
            ("night", "is full of light"),
            ("sea", "is for me"),
            ("sky", "goes by"),
            ("snow", "will go"),
        ]
    )
    prompt = expand(rng, "Write a [short |]poem about {x}[.|]", x=with_article(thing))
    text = f"A {first} {thing} in the {place},\na {second} {thing} that {ending}."
    return Turn(prompt, f"A short poem about {with_article(thing)}.", text, must=(thing,))


@single("gen", 2)
def list_n(rng: random.Random) -> Turn:
    kind, count = rng.choice(list(lexicon.CATEGORIES)), rng.randint(2, 5)
    shown = rng.choice([str(count), number_words(count)])
    name = lexicon.CATEGORY_PLURALS[kind]
    prompt = expand(rng, "[List|Name|Give me|Tell me] {n} {c}[.|]", n=shown, c=name)
    words = rng.sample(lexicon.CATEGORIES[kind], count)
    answer = "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    return Turn(prompt, f"I list {count} {name}.", answer, must=(f"{count}. ",))


@single("gen", 2)
def steps(rng: random.Random) -> Turn:
    verb, table = rng.choice([("make ", knowledge.RECIPES), ("", knowledge.TASKS)])
    goal = rng.choice(list(table))
    prompt = expand(rng, "How [do I|can I|do you] {g}?", g=verb + goal)
    answer = "\n".join(f"{i}. {step}" for i, step in enumerate(table[goal], 1))
    return Turn(prompt, "I give four short steps.", answer)


@single("gen", 1)
def code(rng: random.Random) -> Turn:
    task = rng.choice(list(knowledge.FUNCTIONS))
    name, parameters, body = knowledge.FUNCTIONS[task]
    prompt = expand(rng, "Write a [Python |]function that {x}[.|]", x=task)
    answer = f"```python\ndef {name}({parameters}):\n    {body}\n```"
    return Turn(prompt, f"I write the function {name}.", answer)


@single("gen", 1)
def sentence(rng: random.Random) -> Turn:
    word = rng.choice(lexicon.NOUNS)
    question = '[Write|Make|Give me] a sentence with the word [{w}|"{w}"][.|]'
    answer = expand(
        rng,
        "[The {a} {w} is in the {p}.|{n} has {aw}.|I can see {aw} near the {p}.]",
        a=rng.choice(lexicon.ADJECTIVES),
        w=word,
        aw=with_article(word),
        n=rng.choice(lexicon.NAMES),
        p=rng.choice(["house", "garden", "park", "city", "forest"]),
    )
    return Turn(expand(rng, question, w=word), "One short sentence.", answer, must=(word,))


@single("gen", 1)
def fill_blank(rng: random.Random) -> Turn:
    kind = rng.randrange(3)
    if kind == 0:
        country, answer = rng.choice(list(lexicon.CAPITALS.items()))
        start = f"The capital of {country} is"
    elif kind == 1:
        word = rng.choice(lexicon.OPPOSITES)[0]
        answer = next(b for a, b in lexicon.OPPOSITES if a == word)
        start = f"The opposite of {word} is"
    else:
        thing, answer = rng.choice(list(lexicon.COLOURS.items()))
        start = f"The colour of {thing} is"
    return Turn(f"Complete the sentence: {start}", "One word is missing.", answer)


# ----------------------------------------------------------------------- documents (no chat)


def document(rng: random.Random) -> str:
    """A plain text, for completion without a chat around it."""
    return rng.choice([story, _country, _person, _counting, _sequence, _symbols])(rng)


def _country(rng: random.Random) -> str:
    continent = rng.choice(list(lexicon.CONTINENTS))
    country = rng.choice(lexicon.CONTINENTS[continent])
    city = lexicon.CAPITALS[country]
    return (
        f"{country} is a country in {continent}. The capital of {country} is {city}. Many people "
        f"live in {city}, and many visitors come to {country} every year."
    )


def _person(rng: random.Random) -> str:
    name, city, food = (rng.choice(x) for x in (lexicon.NAMES, lexicon.CITIES, lexicon.FOODS))
    return (
        f"{name} is {rng.randint(18, 80)} years old and lives in {city}. {name} works as "
        f"{with_article(rng.choice(lexicon.JOBS))} and enjoys {rng.choice(lexicon.HOBBIES)}. "
        f"The favourite food of {name} is {food}."
    )


def _counting(rng: random.Random) -> str:
    start = rng.choice([1, 1, 5, 10, 20])
    return " ".join(str(n) for n in range(start, start + rng.randint(5, 16)))


def _sequence(rng: random.Random) -> str:
    title, names = rng.choice(
        [
            ("months of the year", lexicon.MONTHS),
            ("days of the week", lexicon.DAYS),
            ("planets", lexicon.PLANETS),
        ]
    )
    return f"The {title} are {join_and(names)}."


def _symbols(rng: random.Random) -> str:
    names = rng.sample(list(lexicon.ELEMENTS), 4)
    return " ".join(f"The symbol for {name} is {lexicon.ELEMENTS[name]}." for name in names)
