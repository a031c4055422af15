"""JSON from sentences, and questions about a short text given in the prompt."""

import json
import random

from scripts.train_nano import lexicon
from scripts.train_nano.phrasing import expand, join_and, with_article
from scripts.train_nano.samples import Turn, single

_ROOMS = "kitchen garden bedroom office park school shop library station".split()


@single("json", 2)
def extract_json(rng: random.Random) -> Turn:
    name, age = rng.choice(lexicon.NAMES), rng.randint(3, 90)
    city, job, food = (rng.choice(x) for x in (lexicon.CITIES, lexicon.JOBS, lexicon.FOODS))
    facts = {
        "age": (age, f"is {age} years old"),
        "city": (city, f"lives in {city}"),
        "job": (job, f"works as {with_article(job)}"),
        "food": (food, f"likes {food}"),
    }
    chosen = rng.sample(list(facts), rng.randint(1, 3))
    sentence = name + " " + join_and([facts[key][1] for key in chosen]) + "."
    keys = [key for key in facts if key in chosen]  # asked in a fixed order
    question = "Extract the {k} as JSON[: |:\n| from this text: ]{s}"
    prompt = expand(rng, question, k=join_and(["name", *keys]), s=sentence)
    answer = {"name": name} | {key: facts[key][0] for key in keys}
    return Turn(prompt, "I copy the values.", json.dumps(answer))


@single("json", 1)
def make_json(rng: random.Random) -> Turn:
    numbers = ("price", "count", "id", "size")
    words = {
        "name": lexicon.NAMES,
        "city": lexicon.CITIES,
        "color": lexicon.CATEGORIES["colour"],
        "title": lexicon.NOUNS,
        "animal": lexicon.CATEGORIES["animal"],
    }
    keys = rng.sample([*numbers, *words], rng.randint(1, 3))
    values = {k: rng.randint(1, 99) if k in numbers else rng.choice(words[k]) for k in keys}
    listed = join_and([f"{key} {value}" for key, value in values.items()])
    question = "[Make|Write|Create|Give me] a JSON object with {x}[.|]"
    return Turn(expand(rng, question, x=listed), "I copy the values.", json.dumps(values))


@single("context", 2)
def read_ctx(rng: random.Random) -> Turn:
    names, things = rng.sample(lexicon.NAMES, 3), rng.sample(lexicon.NOUNS, 3)
    rooms = rng.sample(_ROOMS, 3)
    lines = [
        f"{name} has {with_article(thing)} and is in the {room}."
        for name, thing, room in zip(names, things, rooms, strict=True)
    ]
    i = rng.randrange(3)
    name, thing, room = names[i], things[i], rooms[i]
    question, answer = rng.choice(
        [
            (f"Where is {name}?", f"{name} is in the {room}."),
            (f"What does {name} have?", f"{name} has {with_article(thing)}."),
            (f"Who has the {thing}?", f"{name} has the {thing}."),
        ]
    )
    text = " ".join(lines[: rng.randint(i + 1, 3)])
    return Turn(f"{text} {question}", lines[i], answer)


@single("context", 1)
def summarise_who(rng: random.Random) -> Turn:
    name, job = rng.choice(lexicon.NAMES), rng.choice(lexicon.JOBS)
    city, hobby = rng.choice(lexicon.CITIES), rng.choice(lexicon.HOBBIES)
    text = f"{name} is {with_article(job)} from {city} who enjoys {hobby}."
    question, answer = rng.choice(
        [
            (f"What is {name}'s job?", f"{name} is {with_article(job)}."),
            (f"Where is {name} from?", f"{name} is from {city}."),
            (f"What does {name} enjoy?", f"{name} enjoys {hobby}."),
        ]
    )
    return Turn(f"{text} {question}", text, answer)
