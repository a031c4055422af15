"""Copying, upper and lower case, spelling and reversing: work on the letters of a text."""

import random

from scripts.train_nano import lexicon
from scripts.train_nano.phrasing import expand, random_letters, random_phrase
from scripts.train_nano.samples import Turn, single

_PLAIN_WORDS = lexicon.NOUNS + lexicon.ADJECTIVES


def _spelled(phrase: str) -> str:
    """`r-e-d a-p-p-l-e`."""
    return " ".join("-".join(word) for word in phrase.split())


@single("string", 3)
def echo(rng: random.Random) -> Turn:
    phrase = random_phrase(rng)
    shown = f'"{phrase}"' if rng.random() < 0.5 else phrase
    question = (
        "[Repeat|Repeat after me|Say|Echo|Copy this|Repeat this exactly|Please say|Write][:|] {p}"
    )
    return Turn(expand(rng, question, p=shown), "I repeat the text.", phrase)


@single("string", 2)
def upper(rng: random.Random) -> Turn:
    phrase = random_phrase(rng, rng.randint(1, 3)).lower()
    shown = f'"{phrase}"' if rng.random() < 0.6 else phrase
    question = (
        "[Write|Put|Convert|Turn] {p} [in|to|into] [upper case|uppercase|capital letters][.|]"
    )
    return Turn(expand(rng, question, p=shown), _spelled(phrase) + ".", phrase.upper())


@single("string", 1)
def lower(rng: random.Random) -> Turn:
    phrase = random_phrase(rng, rng.randint(1, 3)).upper()
    question = (
        '[Write|Put|Convert|Turn] "{p}" [in|to|into] [lower case|lowercase|small letters][.|]'
    )
    return Turn(expand(rng, question, p=phrase), _spelled(phrase) + ".", phrase.lower())


@single("string", 1)
def spell(rng: random.Random) -> Turn:
    word = rng.choice(_PLAIN_WORDS + lexicon.FOODS[:9])
    question = '[Spell|How do you spell|Spell the word] [{w}|"{w}"][.|?|]'
    return Turn(expand(rng, question, w=word), "One letter at a time.", "-".join(word.upper()))


@single("string", 2)
def reverse_word(rng: random.Random) -> Turn:
    word = rng.choice(_PLAIN_WORDS) if rng.random() < 0.7 else random_letters(rng, 3, 6)
    question = '[Reverse the word|Spell backwards|Write backwards|Reverse] [{w}|"{w}"][.|]'
    think = "-".join(word) + " reversed is " + "-".join(word[::-1]) + "."
    return Turn(expand(rng, question, w=word), think, word[::-1])


@single("string", 1)
def reverse_list(rng: random.Random) -> Turn:
    words = [rng.choice(lexicon.NOUNS) for _ in range(rng.randint(3, 5))]
    question = "[Reverse this list|Reverse the list|Write this list in reverse order]: {x}"
    prompt = expand(rng, question, x=", ".join(words))
    return Turn(prompt, f"I begin with {words[-1]}.", ", ".join(words[::-1]))


@single("string", 1)
def letters(rng: random.Random) -> Turn:
    word, kind = rng.choice(_PLAIN_WORDS), rng.randrange(3)
    spelled = "-".join(word)
    if kind == 0:
        prompt = expand(rng, 'How many letters are in the word [{w}|"{w}"]?', w=word)
        answer = f"The word {word} has {len(word)} letters."
        return Turn(prompt, f"{spelled} has {len(word)} letters.", answer)
    place, letter = ("first", word[0]) if kind == 1 else ("last", word[-1])
    prompt = expand(rng, "What is the {o} letter of [the word |]{w}?", o=place, w=word)
    think = f"{spelled}: the {place} is {letter}."
    return Turn(prompt, think, f"The {place} letter of {word} is {letter}.")
