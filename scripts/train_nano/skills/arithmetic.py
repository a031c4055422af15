"""Small sums with their written working, comparisons and neighbours of numbers."""

import random

from scripts.train_nano import lexicon
from scripts.train_nano.phrasing import expand, plural
from scripts.train_nano.samples import Turn, single


def add_steps(a: int, b: int) -> str:
    """Column addition, lowest digit first."""
    x, y, carry, steps = str(a)[::-1], str(b)[::-1], 0, []
    for i in range(max(len(x), len(y))):
        p, q = int(x[i]) if i < len(x) else 0, int(y[i]) if i < len(y) else 0
        total = p + q + carry
        carried = f"+{carry}" if carry else ""
        steps.append(f"{p}+{q}{carried}={total}" + (" carry 1" if total > 9 else ""))
        carry = total // 10
    return "; ".join(steps) + f". So {a} + {b} = {a + b}."


def subtract_steps(a: int, b: int) -> str:
    """Column subtraction for a >= b, lowest digit first."""
    x, y, borrow, steps = str(a)[::-1], str(b)[::-1], 0, []
    for i in range(len(x)):
        p, q = int(x[i]), int(y[i]) if i < len(y) else 0
        short = p - q - borrow < 0
        top = p + 10 * short
        borrowed = f"-{borrow}" if borrow else ""
        steps.append(f"{top}-{q}{borrowed}={top - q - borrow}" + (" borrow 1" if short else ""))
        borrow = int(short)
    return "; ".join(steps) + f". So {a} - {b} = {a - b}."


def number(rng: random.Random, digits: int) -> int:
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def _operands(rng: random.Random) -> tuple[int, int]:
    digits = rng.choice([1, 2, 2, 2, 3, 3])
    return number(rng, digits), number(rng, rng.choice([digits, max(1, digits - 1)]))


def _ask(rng: random.Random, a: int, sign: str, b: int) -> str:
    question = "[What is|What's|Calculate|Compute|Work out|How much is|] {a}{sign}{b}[?|]"
    return expand(rng, question, a=a, b=b, sign=expand(rng, sign)).strip()


@single("arith", 3)
def add(rng: random.Random) -> Turn:
    a, b = _operands(rng)
    prompt = _ask(rng, a, "[ + | + | + | plus |+]", b)
    return Turn(prompt, add_steps(a, b), f"{a} + {b} = {a + b}")


@single("arith", 3)
def sub(rng: random.Random) -> Turn:
    b, a = sorted(_operands(rng))
    prompt = _ask(rng, a, "[ - | - | - | minus |-]", b)
    return Turn(prompt, subtract_steps(a, b), f"{a} - {b} = {a - b}")


@single("arith", 2)
def mul(rng: random.Random) -> Turn:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    prompt = _ask(rng, a, "[ * | x | times | * ]", b)
    fact = f"{a} * {b} = {a * b}"
    return Turn(prompt, f"From the times table, {fact}.", fact)


@single("arith", 1)
def word_problem(rng: random.Random) -> Turn:
    name, things = rng.choice(lexicon.NAMES), plural(rng.choice(lexicon.CATEGORIES["fruit"]))
    a, b = rng.randint(5, 60), rng.randint(2, 30)
    more = rng.random() < 0.5
    if more:
        question = (
            "{n} has {a} {t} and [gets|buys|finds] {b} more. How many {t} does {n} have[ now|]?"
        )
    else:
        b, a = sorted((a, b))
        question = (
            "{n} has {a} {t} and [eats|gives away|loses] {b}. "
            "How many {t} [are left|does {n} have now]?"
        )
    prompt = expand(rng, question, n=name, a=a, b=b, t=things)
    think = (add_steps if more else subtract_steps)(a, b)
    return Turn(prompt, think, f"{name} has {a + b if more else a - b} {things}.")


@single("arith", 1)
def compare(rng: random.Random) -> Turn:
    digits = rng.choice([1, 2, 2, 3])
    a, b = number(rng, digits), number(rng, digits)
    b += a == b
    largest = rng.random() < 0.5
    asked = rng.choice(["larger", "bigger", "greater"] if largest else ["smaller", "less"])
    prompt = expand(rng, "Which [number is|is] {w}[,|:] {a} or {b}?", w=asked, a=a, b=b)
    found = (max if largest else min)(a, b)
    answer = f"{found} is {'larger' if largest else 'smaller'}."
    return Turn(prompt, f"{max(a, b)} > {min(a, b)}.", answer)


@single("arith", 1)
def parity(rng: random.Random) -> Turn:
    n = rng.randint(0, 999)
    prompt = expand(rng, "Is {n} [even or odd|odd or even]?", n=n)
    return Turn(prompt, f"The last digit is {n % 10}.", f"{n} is {'odd' if n % 2 else 'even'}.")


@single("arith", 1)
def next_num(rng: random.Random) -> Turn:
    n, after = rng.randint(1, 998), rng.random() < 0.6
    word = "after" if after else "before"
    question = "[What number comes|Which number comes|What comes] {w} {n}?"
    answer = f"{n + 1 if after else n - 1} comes {word} {n}."
    think = "Add one." if after else "Subtract one."
    return Turn(expand(rng, question, w=word, n=n), think, answer)
