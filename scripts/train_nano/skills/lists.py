"""Counting, sorting and picking from lists of numbers and words."""

import random

from scripts.train_nano import lexicon
from scripts.train_nano.phrasing import ORDINALS, expand, join_and
from scripts.train_nano.samples import Turn, single


def _numbered(words: list[str]) -> str:
    return ", ".join(f"{i} {word}" for i, word in enumerate(words, 1)) + "."


@single("lists", 1)
def count_to(rng: random.Random) -> Turn:
    start = rng.choice([1, 1, 1, 0, 5, 10, rng.randint(2, 40)])
    numbers = list(range(start, start + rng.randint(4, 13)))
    down = rng.random() < 0.25
    if down:
        numbers.reverse()
    a, n = numbers[0], numbers[-1]
    prompt = expand(
        rng, "Count {way} {a} to {n}[.|]", way="down from" if down else "from", a=a, n=n
    )
    return Turn(prompt, f"Start at {a} and stop at {n}.", ", ".join(map(str, numbers)))


@single("lists", 1)
def continue_seq(rng: random.Random) -> Turn:
    start, step = rng.randint(1, 20), rng.choice([1, 2, 3, 5, 10])
    numbers = [start + step * i for i in range(4)]
    question = "[Continue the sequence|What comes next|Which number comes next]: {x}"
    prompt = expand(rng, question, x=", ".join(map(str, numbers)))
    return Turn(prompt, f"The step is {step}.", f"{numbers[-1] + step}")


@single("lists", 2)
def sort_nums(rng: random.Random) -> Turn:
    numbers = rng.sample(range(1, 100), rng.randint(3, 6))
    down = rng.random() < 0.3
    order = "from largest to smallest"
    if not down:
        order = rng.choice(["from smallest to largest", "in ascending order", ""])
    question = "[Sort|Order|Arrange] [these numbers|the numbers|] {o}: {x}"
    prompt = expand(rng, question, o=order, x=", ".join(map(str, numbers)))
    ranked = sorted(numbers, reverse=down)
    think = f"The {'largest' if down else 'smallest'} is {ranked[0]}."
    return Turn(prompt.replace("  ", " ").replace(" :", ":"), think, ", ".join(map(str, ranked)))


@single("lists", 2)
def sort_words(rng: random.Random) -> Turn:
    words = rng.sample(lexicon.NOUNS, rng.randint(3, 5))
    question = (
        "[Sort|Order|Put] [these words|the words] [alphabetically|in alphabetical order]: {x}"
    )
    ranked = sorted(words)
    initials = ", ".join(word[0] for word in ranked)
    prompt = expand(rng, question, x=", ".join(words))
    return Turn(prompt, f"By first letter: {initials}.", ", ".join(ranked))


@single("lists", 1)
def minmax(rng: random.Random) -> Turn:
    numbers = rng.sample(range(1, 200), rng.randint(3, 5))
    largest = rng.random() < 0.5
    words = ["largest", "maximum", "biggest"] if largest else ["smallest", "minimum"]
    prompt = f"What is the {rng.choice(words)} of {join_and([str(n) for n in numbers])}?"
    best = max if largest else min
    so_far = ", ".join(str(best(numbers[: i + 1])) for i in range(len(numbers)))
    return Turn(prompt, f"One by one: {so_far}.", str(best(numbers)))


@single("lists", 1)
def nth(rng: random.Random) -> Turn:
    words = rng.sample(lexicon.NOUNS, rng.randint(3, 6))
    index = rng.randrange(-1, min(4, len(words)))
    question = "What is the {o} [word|item] in this list: {x}"
    order = "last" if index < 0 else ORDINALS[index]
    prompt = expand(rng, question, o=order, x=", ".join(words))
    return Turn(prompt, _numbered(words), words[index])


@single("lists", 1)
def count_items(rng: random.Random) -> Turn:
    words = [rng.choice(lexicon.NOUNS) for _ in range(rng.randint(2, 8))]
    prompt = expand(rng, "How many [words|items] are in this list: {x}", x=", ".join(words))
    return Turn(prompt, _numbered(words), f"There are {len(words)} words.")
