"""Small-scale English: templates, articles, plurals, past tenses, number words.

Rule: everything random comes from the `random.Random` passed in, so a seed fixes the text.
"""

import random
import re
from collections.abc import Sequence

from scripts.train_nano import lexicon

_ALTERNATIVES = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
).split()


def expand(rng: random.Random, template: str, /, **slots: object) -> str:
    """Chooses among every `[a|b|c]`, innermost first, then fills the `{slots}`."""
    while match := _ALTERNATIVES.search(template):
        choice = rng.choice(match.group(1).split("|"))
        template = template[: match.start()] + choice + template[match.end() :]
    for name, value in slots.items():
        template = template.replace("{" + name + "}", str(value))
    return template


def one_of(rng: random.Random, template: str) -> str:
    """Like `expand` for a list of whole questions: bars outside brackets separate them."""
    parts = re.split(r"\|(?![^\[]*\])", template)
    return expand(rng, rng.choice(parts))


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def with_article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def join_and(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def number_words(n: int) -> str:
    """0 to 999 in words."""
    if n < 20:
        return _ONES[n]
    if n < 100:
        return _TENS[n // 10 - 2] + ("-" + _ONES[n % 10] if n % 10 else "")
    rest = " and " + number_words(n % 100) if n % 100 else ""
    return _ONES[n // 100] + " hundred" + rest


def plural(word: str) -> str:
    if word in lexicon.IRREGULAR_PLURALS:
        return lexicon.IRREGULAR_PLURALS[word]
    if word.endswith(("s", "x", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


def past_tense(verb: str) -> str:
    irregular = lexicon.IRREGULAR_PASTS.get(verb)
    return irregular or (verb + "d" if verb.endswith("e") else verb + "ed")


def kind_of(category: str) -> str:
    """`a fruit`, `a piece of furniture`."""
    if category in ("furniture", "clothing"):
        return "a piece of " + category
    return with_article(category)


def random_letters(rng: random.Random, low: int, high: int) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(low, high)))


def random_phrase(rng: random.Random, count: int | None = None) -> str:
    """One to six unrelated words, sometimes invented ones: something to copy."""
    count = count or rng.randint(1, 6)
    if rng.random() < 0.3:
        return " ".join(random_letters(rng, 2, 6) for _ in range(min(count, 3)))
    pools = (lexicon.NOUNS, lexicon.ADJECTIVES, lexicon.NAMES, lexicon.FOODS, lexicon.HOBBIES)
    return " ".join(rng.choice(rng.choice(pools)) for _ in range(count))
