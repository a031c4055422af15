"""Facts: capitals, elements, calendar, opposites, plurals, translations, multiple choice."""

import random

from scripts.train_nano import knowledge, lexicon
from scripts.train_nano.phrasing import (
    ORDINALS,
    capitalize,
    expand,
    kind_of,
    number_words,
    past_tense,
    plural,
    with_article,
)
from scripts.train_nano.samples import Turn, single

_UNCOUNTABLE = ("grass", "snow", "coal", "milk", "blood", "mud", "chocolate")
_HAVE = ("legs", "sides", "wheels", "strings", "arms", "players")
_NO_ARTICLE = ("colour", "sport", "drink")


@single("facts", 4)
def capital(rng: random.Random) -> Turn:
    country, city = rng.choice(list(lexicon.CAPITALS.items()))
    if rng.random() < 0.7:
        question = "[What is|What's|Tell me|Name|Do you know] the capital [city of|of|of] {c}[?|?|]"
        answer = f"The capital of {country} is {city}."
        return Turn(expand(rng, question, c=country), answer, answer)
    question = (
        "[{v} is the capital of which country?|Which country has the capital {v}?|"
        "Of which country is {v} the capital?]"
    )
    answer = f"{city} is the capital of {country}."
    return Turn(expand(rng, question, v=city), answer, answer)


@single("facts", 1)
def continent(rng: random.Random) -> Turn:
    name = rng.choice(list(lexicon.CONTINENTS))
    country = rng.choice(lexicon.CONTINENTS[name])
    question = "[In which continent is|On which continent is|What continent is] {c}?"
    prompt = expand(rng, question, c=country)
    return Turn(prompt, "This is about continents.", f"{country} is in {name}.")


@single("facts", 2)
def element(rng: random.Random) -> Turn:
    name, symbol = rng.choice(list(lexicon.ELEMENTS.items()))
    think = "This is about chemical elements."
    if rng.random() < 0.6:
        prompt = expand(rng, "What is the [chemical symbol|symbol] [for|of] {e}?", e=name)
        return Turn(prompt, think, f"The symbol for {name} is {symbol}.")
    prompt = expand(rng, "Which [chemical |]element has the symbol {s}?", s=symbol)
    return Turn(prompt, think, f"{symbol} is the symbol for {name}.")


@single("facts", 2)
def calendar(rng: random.Random) -> Turn:
    names, kind = rng.choice(
        [(lexicon.MONTHS, "month"), (lexicon.DAYS, "day"), (lexicon.PLANETS, "planet")]
    )
    index, after = rng.randrange(len(names)), rng.random() < 0.5
    if kind == "planet" and index == (7 if after else 0):
        index = 3
    think = f"I go through the {kind}s in order."
    if kind == "day" or rng.random() < 0.75:
        word, other = ("after", index + 1) if after else ("before", index - 1)
        question = "[What|Which] {n} comes [right |]{w} {x}?"
        prompt = expand(rng, question, n=kind, w=word, x=names[index])
        return Turn(prompt, think, f"{names[other % len(names)]} comes {word} {names[index]}.")
    period = " of the year" if kind == "month" else ""
    prompt = expand(rng, "[What|Which] is the {o} {n}{p}?", o=ORDINALS[index], n=kind, p=period)
    return Turn(prompt, think, f"The {ORDINALS[index]} {kind} is {names[index]}.")


@single("facts", 1)
def sound(rng: random.Random) -> Turn:
    animal, noise = rng.choice(list(lexicon.SOUNDS.items()))
    question = "[What sound does {a} make|What does {a} say|Which sound does {a} make]?"
    prompt = expand(rng, question, a=with_article(animal))
    answer = f"{capitalize(with_article(animal))} says {noise}."
    return Turn(prompt, "This is about animal sounds.", answer)


@single("facts", 1)
def colour_of(rng: random.Random) -> Turn:
    thing, colour = rng.choice(list(lexicon.COLOURS.items()))
    shown = thing if thing in _UNCOUNTABLE else rng.choice(["the " + thing, with_article(thing)])
    prompt = expand(rng, "What [colour|color] is {a}?", a=shown)
    return Turn(prompt, "This is about colours.", f"The colour is {colour}.")


@single("facts", 2)
def opposite(rng: random.Random) -> Turn:
    pair = rng.choice(lexicon.OPPOSITES)
    word = rng.choice(pair)
    both = lexicon.OPPOSITES + [(b, a) for a, b in lexicon.OPPOSITES]
    found = min(b for a, b in both if a == word)
    prompt = expand(rng, 'What is the opposite of [{a}|"{a}"]?', a=word)
    return Turn(prompt, "This is about opposites.", f"The opposite of {word} is {found}.")


@single("facts", 2)
def plural_of(rng: random.Random) -> Turn:
    word = rng.choice(lexicon.NOUNS + list(lexicon.IRREGULAR_PLURALS) * 2)
    prompt = expand(rng, 'What is the plural of [{w}|"{w}"]?', w=word)
    return Turn(prompt, "More than one.", f"The plural of {word} is {plural(word)}.")


@single("facts", 1)
def past_of(rng: random.Random) -> Turn:
    verb = rng.choice(list(lexicon.IRREGULAR_PASTS) + lexicon.REGULAR_VERBS)
    prompt = expand(rng, 'What is the past tense of [{v}|"{v}"]?', v=verb)
    return Turn(prompt, "Yesterday.", f"The past tense of {verb} is {past_tense(verb)}.")


@single("facts", 2)
def translate(rng: random.Random) -> Turn:
    language = rng.choice(list(lexicon.FOREIGN_WORDS))
    word, foreign = rng.choice(list(lexicon.FOREIGN_WORDS[language].items()))
    question = '[How do you say|What is|Translate] [{w}|"{w}"] [in|into] {l}[?|]'
    answer = f'"{capitalize(word)}" in {language} is "{foreign}".'
    prompt = expand(rng, question, w=word, l=language)
    return Turn(prompt, f"I translate into {language}.", answer)


@single("facts", 1)
def how_many(rng: random.Random) -> Turn:
    things, whole, count = rng.choice(knowledge.HOW_MANY)
    question = (
        "How many {t} does {w} have?" if things in _HAVE else "How many {t} are [there in|in] {w}?"
    )
    prompt = expand(rng, question, t=things, w=whole)
    return Turn(prompt, "I know this number.", f"{capitalize(whole)} has {count} {things}.")


@single("facts", 2)
def misc(rng: random.Random) -> Turn:
    question, answer = rng.choice(knowledge.GENERAL_KNOWLEDGE)
    return Turn(expand(rng, question), "This is general knowledge.", answer)


@single("facts", 1)
def category(rng: random.Random) -> Turn:
    true_kind = rng.choice(list(lexicon.CATEGORIES))
    word, yes = rng.choice(lexicon.CATEGORIES[true_kind]), rng.random() < 0.5
    others = [k for k, words in lexicon.CATEGORIES.items() if word not in words]
    asked = true_kind if yes else rng.choice(others)
    shown = word if true_kind in _NO_ARTICLE else with_article(word)
    prompt = f"Is {shown} {kind_of(asked)}?"
    answer = f"{'Yes' if yes else 'No'}, {word} is {kind_of(true_kind)}."
    think = f"Asked: {asked}. {capitalize(word)}: {true_kind}."
    return Turn(prompt, think, answer)


@single("facts", 1)
def numbers_in_words(rng: random.Random) -> Turn:
    n = rng.choice([rng.randint(0, 20), rng.randint(0, 99), rng.randint(100, 999)])
    think = "This is about writing numbers."
    if rng.random() < 0.6:
        prompt = expand(rng, "[Write|Spell] [the number |]{n} in words[.|]", n=n)
        return Turn(prompt, think, number_words(n))
    prompt = expand(rng, 'Write "{n}" [as a number|in digits][.|]', n=number_words(n))
    return Turn(prompt, think, str(n))


@single("facts", 2)
def multiple_choice(rng: random.Random) -> Turn:
    if rng.random() < 0.3:
        country, right = rng.choice(list(lexicon.CAPITALS.items()))
        wrong = rng.sample([c for c in lexicon.CAPITALS.values() if c != right], 3)
        question = f"What is the capital of {country}?"
        think = f"The capital of {country} is {right}."
    else:
        kind = rng.choice(list(lexicon.CATEGORIES))
        right = rng.choice(lexicon.CATEGORIES[kind])
        pool = [
            word
            for other in lexicon.CATEGORIES
            if other != kind
            for word in lexicon.CATEGORIES[other]
            if word not in lexicon.CATEGORIES[kind]
        ]
        wrong = rng.sample(pool, 3)
        question = expand(rng, "Which [of these|one] is {k}?", k=kind_of(kind))
        think = f"{capitalize(right)} is {kind_of(kind)}."
    options = [*wrong, right]
    rng.shuffle(options)
    lines = [f"{letter}) {option}" for letter, option in zip("ABCD", options, strict=True)]
    chosen = lines[options.index(right)]
    return Turn("\n".join([question, *lines]), f"{think} That is {chosen[0]}.", chosen)
