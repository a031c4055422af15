"""Through HTTP and with K3-nano: an answer is the same alone, repeated, and in a crowd."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.serving import Server

PATH = "/v1/completions"


def bodies() -> list[dict[str, Any]]:
    """Requests of many kinds and lengths; page borders (64 tokens) included."""
    rng = random.Random(5)
    made = []
    for number, length in enumerate(
        [1, 63, 64, 65, 128, 129, *(rng.randint(2, 200) for _ in range(18))]
    ):
        body: dict[str, Any] = {
            "prompt": [rng.randrange(50, 2000) for _ in range(length)],
            "max_tokens": rng.choice([1, 5, 30, 60]),
            "logprobs": number % 4,
            "temperature": [0, 0, 0.8, 1.0][number % 4],
            "seed": number,
            "echo": number % 3 == 0,
            "ignore_eos": True,
        }
        if number % 5 == 0:
            body |= {"frequency_penalty": 0.7, "logit_bias": {"100": -100, "200": 3}}
        made.append(body)
    return made


def choices(server: Server, body: dict[str, Any]) -> Any:
    return server.post(PATH, body)["choices"]


def test_pc_58_answers_do_not_depend_on_neighbours(nano: Server) -> None:
    asked = bodies()
    alone = [choices(nano, body) for body in asked]
    for order in (1, 2):
        places = list(range(len(asked)))
        random.Random(order).shuffle(places)
        with ThreadPoolExecutor(16) as pool:
            crowd = list(pool.map(lambda i: choices(nano, asked[i]), places))
        for place, answer in zip(places, crowd, strict=True):
            assert answer == alone[place], f"request {place}"


def test_pc_08_echo_gives_the_same_arrays_every_time(nano: Server) -> None:
    rng = random.Random(8)
    shared = [rng.randrange(50, 2000) for _ in range(1100)]
    long = {
        "prompt": [*shared, *range(300, 700)],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
        "temperature": 0,
    }
    other = long | {"prompt": [*shared, *range(900, 1300)]}
    first, second = choices(nano, long), choices(nano, other)
    choices(nano, long | {"echo": False})
    assert choices(nano, other) == second
    assert choices(nano, long) == first
    shown = [c[0]["logprobs"]["token_logprobs"][1 : len(shared)] for c in (first, second)]
    assert shown[0] == shown[1], "a shared prefix has the same scores"


def test_pc_60_seeds(nano: Server) -> None:
    ask = {"prompt": [300, 301], "max_tokens": 12, "temperature": 0.7, "ignore_eos": True}
    free = [choices(nano, ask)[0]["text"] for _ in range(3)]
    assert len(set(free)) == 3
    four = [c["text"] for c in choices(nano, ask | {"seed": 1, "n": 4})]
    assert len(set(four)) == 4
    assert [c["text"] for c in choices(nano, ask | {"seed": 1, "n": 4})] == four
    zero = [choices(nano, ask | {"seed": 0})[0]["text"] for _ in range(2)]
    assert zero[0] == zero[1]


def test_pc_43_greedy_copies_are_the_same_alone_and_in_a_full_batch(nano: Server) -> None:
    """Rare pieces in a row, as in identifiers; with drafts the same must hold at every depth."""
    rng = random.Random(43)
    asked = []
    for _ in range(12):
        line = "".join(rng.choice("0123456789abcdef") for _ in range(16))
        asked.append({"prompt": f"{line} {line} {line} ", "max_tokens": 24, "temperature": 0,
                      "ignore_eos": True, "logprobs": 1, "return_token_ids": True})  # fmt: skip
    alone = [choices(nano, body) for body in asked]
    for burst in (16, 5):
        with ThreadPoolExecutor(burst) as pool:
            assert list(pool.map(lambda body: choices(nano, body), asked)) == alone


def test_pc_45_chats_that_ask_for_json_leave_the_others_alone(nano: Server) -> None:
    """Nothing is enforced yet: every answer must say so, and free requests must not change."""
    ask = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 40,
           "temperature": 0, "logprobs": True}  # fmt: skip
    bound = ask | {"response_format": {"type": "json_object"}, "temperature": 1}

    def answer(body: dict[str, Any]) -> tuple[Any, str | None]:
        with nano.open("/v1/chat/completions", body) as response:
            return json.load(response)["choices"], response.headers["x-k3serve-ignored"]

    alone, nothing = answer(ask)
    assert nothing is None
    with ThreadPoolExecutor(16) as pool:
        crowd = list(pool.map(answer, [bound, ask] * 15))
    for reply, ignored in crowd[0::2]:
        assert reply[0]["finish_reason"] in ("stop", "length")
        assert ignored is not None and "response_format" in ignored
    assert all(reply == alone for reply, _ in crowd[1::2])


def test_pc_57_no_prompt_length_or_mix_compiles(nano: Server) -> None:
    context = nano.get("/v1/models")["data"][0]["max_model_len"]
    for length in (1, 7, 8, 9, 127, 128, 129, context - 1):
        ask = {"prompt": [70] * length, "max_tokens": 1, "echo": length % 2 == 0, "logprobs": 5}
        assert nano.post(PATH, ask)["usage"]["prompt_tokens"] == length
    metric = "k3serve_compilations_after_ready_total 0.0"
    assert metric in nano.text("/metrics").splitlines()
