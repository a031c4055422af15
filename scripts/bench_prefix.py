"""What prefix reuse saves: time to the first token of each turn of a growing chat, with the cache
and without, through HTTP, in one run.

    python scripts/bench_prefix.py [--base-url URL] [--turns 5] [--first-tokens 1408] [--rounds 5]

Without --base-url it starts its own server. Each round is a chat of its own, about a long text
that comes with the first turn: every turn repeats all before it, answer included, and asks on. The
cold time is that of as many other tokens, which no chat has seen. Run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from scripts.bench_serve import Client, running_server

ANSWER_TOKENS = 64
_fresh = itertools.count()


def tokens(count: int) -> list[int]:
    """Random ordinary token ids that no earlier call gave."""
    rng = random.Random(next(_fresh))
    return [rng.randrange(50, 1500) for _ in range(count)]


def one_chat(
    client: Client, turns: int, first_tokens: int, turn_tokens: int
) -> list[tuple[float, float]]:
    """(warm, cold) seconds to the first token of each turn."""
    chat = tokens(first_tokens)
    times = []
    for _ in range(turns):
        chat += tokens(turn_tokens - ANSWER_TOKENS)
        _, cold = client.stream(tokens(len(chat)), 1)
        _, warm = client.stream(chat, ANSWER_TOKENS)
        times.append((warm, cold))
        chat += tokens(ANSWER_TOKENS)  # stands for the answer: its pages are not known either
    return times


def report(chats: list[list[tuple[float, float]]], first_tokens: int, turn_tokens: int) -> None:
    print("turn  prompt tokens  first token, cold  warm     cold / warm")
    for turn, times in enumerate(zip(*chats, strict=True), 1):
        warm, cold = (statistics.median(column) for column in zip(*times, strict=True))
        length = first_tokens + turn * turn_tokens - ANSWER_TOKENS
        cells = f"{cold * 1e3:14.1f} ms  {warm * 1e3:5.1f} ms  {cold / warm:8.1f}"
        print(f"{turn:4}  {length:13}  {cells}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="a running server; default: one of its own")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--first-tokens", type=int, default=1408, help="the text it is about")
    parser.add_argument("--turn-tokens", type=int, default=96, help="question and answer")
    parser.add_argument("--rounds", type=int, default=5, help="chats; medians are compared")
    args = parser.parse_args()
    if args.turn_tokens <= ANSWER_TOKENS:
        parser.error(f"--turn-tokens {args.turn_tokens}: must be more than {ANSWER_TOKENS}")

    def run(url: str) -> None:
        client = Client(url)
        client.stream(tokens(100), 8)
        sizes = (args.first_tokens, args.turn_tokens)
        chats = [one_chat(client, args.turns, *sizes) for _ in range(args.rounds)]
        report(chats, *sizes)

    if args.base_url:
        run(args.base_url)
        return
    with running_server() as url:
        run(url)


if __name__ == "__main__":
    main()
