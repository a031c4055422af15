"""Fields on their way into Sampling: values, limits, defaults (public cases, groups D, G and H)."""

from __future__ import annotations

from typing import Any

import pytest

from k3serve.types import MAX_LOGIT_BIAS, MAX_STOP_IDS, Sampling
from tests.api.client import Served
from tests.api.conftest import VOCAB
from tests.fakes import says

EOS_IDS = (258, 257)


def sampling_of(served: Served, **body: Any) -> Sampling:
    before = len(served.executor.submitted)
    got = served.complete(prompt="x", **body)
    assert got.status == 200, got.body
    return served.executor.submitted[before].sampling


def refused(served: Served, param: str, **body: Any) -> str:
    """The message of a 400 that names the parameter; nothing was submitted."""
    got = served.complete(**({"prompt": "x"} | body))
    assert got.status == 400, got.body
    error = got.error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert param.split("[")[0] in error["message"]
    assert not served.executor.submitted
    return error["message"]


def test_defaults(served: Served) -> None:
    made = sampling_of(served)
    assert made == Sampling(max_tokens=16, seed=made.seed, stop_token_ids=EOS_IDS)
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (1.0, 1.0, 0, 0.0)


def test_pc_78_nulls_are_absent(served: Served) -> None:
    names = (
        "max_tokens temperature top_p top_k min_p seed n stop stop_token_ids ignore_eos min_tokens "
        "logprobs echo stream stream_options presence_penalty frequency_penalty logit_bias user "
        "repetition_penalty include_stop_str_in_output skip_special_tokens best_of suffix model "
        "add_special_tokens return_token_ids guided_json metadata something_unknown"
    ).split()
    got = served.complete(prompt="x", **dict.fromkeys(names))
    assert got.status == 200
    assert got.headers["x-k3serve-ignored"] is None
    made = served.executor.submitted[0].sampling
    assert made == Sampling(max_tokens=16, seed=made.seed, stop_token_ids=EOS_IDS)


def test_pc_39_every_field_arrives_unchanged(served: Served) -> None:
    made = sampling_of(
        served,
        max_tokens=7,
        seed=9,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=1.5,
        frequency_penalty=-2,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "1999": 3.5},
        min_tokens=2,
        stop_token_ids=[70, 71],
        logprobs=4,
    )
    assert made == Sampling(
        max_tokens=7,
        seed=9,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=1.5,
        frequency_penalty=-2.0,
        repetition_penalty=1.1,
        logit_bias=((5, -100.0), (1999, 3.5)),
        min_tokens=2,
        stop_token_ids=(*EOS_IDS, 70, 71),
        top_logprobs=4,
    )


def test_pc_39_chat_takes_the_same_fields(served: Served) -> None:
    fields: dict[str, Any] = {
        "frequency_penalty": 2,
        "presence_penalty": -1,
        "repetition_penalty": 1.2,
        "temperature": 0,
        "seed": 7,
        "top_k": 3,
        "min_p": 0.5,
        "logit_bias": {"1": 1},
        "ignore_eos": True,
        "max_tokens": 5,
    }
    assert served.chat(**fields).status == 200
    assert served.executor.submitted[0].sampling == sampling_of(served, **fields)


def test_pc_36_ignore_eos_drops_the_end_tokens_only(served: Served) -> None:
    assert sampling_of(served, ignore_eos=True).stop_token_ids == ()
    assert sampling_of(served, ignore_eos=True, stop_token_ids=[65]).stop_token_ids == (65,)


@pytest.mark.parametrize("at", range(1, 8))
def test_pc_36_end_in_the_middle_of_an_event(served: Served, at: int) -> None:
    """An end token, a stop id and a stop string at each place of a block of eight."""
    block = list(b"abcdefg")
    block.insert(at, 258)
    served.executor.script = says(block, per_event=8)
    got = served.complete(prompt="x", max_tokens=50).json
    assert got["choices"][0]["text"] == "abcdefg"[:at]
    assert got["usage"]["completion_tokens"] == at + 1
    stop_id = block[at - 1]
    got = served.complete(prompt="x", max_tokens=50, stop_token_ids=[stop_id]).json
    assert got["choices"][0]["text"] == "abcdefg"[: at - 1]
    assert got["choices"][0]["stop_reason"] == stop_id
    got = served.complete(prompt="x", max_tokens=50, stop=chr(stop_id)).json
    assert got["choices"][0]["text"] == "abcdefg"[: at - 1]
    assert got["usage"]["completion_tokens"] == at


def test_pc_38_same_seed_same_request(served: Served) -> None:
    for _ in range(5):
        assert served.chat(temperature=1, seed=7, max_tokens=64).status == 200
    assert len({r.sampling for r in served.executor.submitted}) == 1
    assert served.executor.submitted[0].sampling.seed == 7


@pytest.mark.parametrize("per_event", [1, 3, 8])
def test_pc_46_usage_and_metrics_count_what_was_sent(start_server: Any, per_event: int) -> None:
    served = start_server()
    served.executor.script = says(list(b"abSTOPcdef"), per_event=per_event)
    usage = served.complete(prompt="x", max_tokens=10, stop="STOP").json["usage"]
    assert usage["completion_tokens"] == 6
    assert b'vllm:generation_tokens_total{engine="0",model_name="k3-nano"} 6.0' in (
        served.get("/metrics").body
    )


@pytest.mark.parametrize("per_event", [1, 3, 8])
def test_pc_41_logprobs_do_not_depend_on_the_event_size(served: Served, per_event: int) -> None:
    served.executor.script = says(list(b"abcdefgh"))
    one = served.complete(prompt="x", max_tokens=8, logprobs=2).json["choices"]
    served.executor.script = says(list(b"abcdefgh"), per_event=per_event)
    assert served.complete(prompt="x", max_tokens=8, logprobs=2).json["choices"] == one
    assert 0.0 not in one[0]["logprobs"]["token_logprobs"]


# ------------------------------------------------------------------------------ seeds


def test_pc_60_seeds(served: Served) -> None:
    drawn = {sampling_of(served).seed for _ in range(3)}
    assert len(drawn) == 3
    assert len({sampling_of(served, seed=-1).seed for _ in range(3)}) == 3
    assert sampling_of(served, seed=0).seed == 0
    assert sampling_of(served, seed=2**63 - 1).seed == 2**63 - 1


def test_pc_60_choices_share_the_seed_and_differ_in_number(served: Served) -> None:
    assert served.complete(prompt="x", seed=1, n=4).status == 200
    made = [r.sampling for r in served.executor.submitted]
    assert [(s.seed, s.choice) for s in made] == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_pc_60_equal_prompts_without_seed_differ(served: Served) -> None:
    assert served.complete(prompt=["x", "x"]).status == 200
    one, two = (r.sampling.seed for r in served.executor.submitted)
    assert one != two


@pytest.mark.parametrize(
    "seed", [2**63, 2**64, -(2**63) - 1, 10**20, -2, "100", 1.5, 1.0, True, [1]]
)
def test_pc_66_seed_outside_the_range(served: Served, seed: Any) -> None:
    assert "9223372036854775807" in refused(served, "seed", seed=seed)


# ------------------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("prompt", "budget", "fits"),
    [(9, 1, True), (10, 0, True), (9, 2, False), (10, 1, False), (11, 1, False), (11, 0, False)],
)
@pytest.mark.parametrize("echo", [False, True])
def test_pc_61_context_arithmetic(
    start_server: Any, prompt: int, budget: int, fits: bool, echo: bool
) -> None:
    served = start_server()
    served.executor.limits["max_context"] = 10
    got = served.complete(prompt=[65] * prompt, max_tokens=budget, echo=echo)
    assert (got.status == 200) == fits, got.body
    if not fits:
        error = got.error
        assert error["code"] == "context_length_exceeded"
        for number in (prompt, budget, 10, prompt + budget):
            assert f"{number} " in error["message"], error


def test_pc_61_unset_is_what_is_left(served: Served) -> None:
    served.executor.limits["max_context"] = 100
    try:
        assert served.chat().status == 200
        request = served.executor.submitted[0]
        assert request.sampling.max_tokens == 100 - len(request.prompt)
        assert served.complete(prompt=[65] * 90).status == 200
        assert served.executor.submitted[1].sampling.max_tokens == 10  # not 16
        assert served.complete(prompt=[65] * 99).status == 200
        assert served.executor.submitted[2].sampling.max_tokens == 1
        for length in (100, 101):
            got = served.complete(prompt=[65] * length)
            assert got.status == 400 and got.error["code"] == "context_length_exceeded"
            assert "100 tokens" in got.error["message"]
        assert served.chat(messages=[{"role": "user", "content": "x" * 200}]).status == 400
    finally:
        served.executor.limits["max_context"] = 4096


@pytest.mark.parametrize("value", [-1, 1.5, 1.0, "5", True, [], 1e8, 2**64, 10**4000])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_pc_62_bad_max_tokens(served: Served, name: str, value: Any) -> None:
    got = served.chat(**{name: value})
    assert got.status == 400 and got.error["param"] == name
    assert "an integer, 0 or more" in got.error["message"]


@pytest.mark.parametrize("value", [10**8, 2**63])
def test_pc_62_huge_max_tokens(served: Served, value: int) -> None:
    got = served.chat(max_completion_tokens=value)
    assert got.status == 400 and got.error["code"] == "context_length_exceeded"
    assert str(value) in got.error["message"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 8}, 8),
        ({"max_completion_tokens": 9}, 9),
        ({"max_tokens": 8, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 8, "max_completion_tokens": None}, 8),
    ],
)
def test_pc_62_both_names(served: Served, body: dict[str, Any], expected: int) -> None:
    assert served.chat(**body).status == 200
    assert served.executor.submitted[0].sampling.max_tokens == expected


@pytest.mark.parametrize(
    "token", [VOCAB, -1, 2**31, 5279552648203111001, 1.0, True, None, "x", [1]]
)
def test_pc_63_bad_token_ids(served: Served, token: Any) -> None:
    got = served.complete(prompt=[[1, 2], [3, token]])
    assert got.status == 400
    assert got.error["param"] == "prompt[1][1]"
    assert str(VOCAB - 1) in got.error["message"]
    got = served.complete(prompt=[token])
    if not isinstance(token, str | list):  # those make other, valid shapes
        assert got.status == 400 and got.error["param"] == "prompt[0]"


def test_pc_63_padded_id_is_a_token_without_text(served: Served) -> None:
    got = served.complete(prompt=[65, VOCAB - 1], echo=True, logprobs=1, max_tokens=1)
    choice = got.json["choices"][0]
    assert choice["text"] == "Ah"
    assert choice["logprobs"]["tokens"][1] == f"token_id:{VOCAB - 1}"


@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ({"191222": -100}, "logit_bias"),
        ({" You": 6}, "logit_bias"),
        ({"-1": 1}, "logit_bias"),
        ({"007": 1}, "logit_bias"),
        ({"": 1}, "logit_bias"),
        ({"1.0": 1}, "logit_bias"),
        ({"٣": 1}, "logit_bias"),
        ({"5": 1000}, "logit_bias.5"),
        ({"5": -100.5}, "logit_bias.5"),
        ({"5": None}, "logit_bias.5"),
        ({"5": "1"}, "logit_bias.5"),
        ({"5": True}, "logit_bias.5"),
        ({"5": 10**400}, "logit_bias.5"),
        ([], "logit_bias"),
        ("x", "logit_bias"),
        ({str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}, "logit_bias"),
    ],
)
def test_pc_65_bad_logit_bias(served: Served, bias: Any, param: str) -> None:
    refused(served, param, logit_bias=bias)


@pytest.mark.parametrize("bias", [{}, None, {"0": 0}, {str(i): 1 for i in range(MAX_LOGIT_BIAS)}])
def test_pc_65_good_logit_bias(served: Served, bias: Any) -> None:
    assert len(sampling_of(served, logit_bias=bias).logit_bias) == len(bias or {})


def test_pc_65_banning_the_end_token_is_allowed(served: Served) -> None:
    assert sampling_of(served, logit_bias={"258": -100}).logit_bias == ((258, -100.0),)


@pytest.mark.parametrize("value", [-1, 2.1, 1e308, "0.5", True, -1e-9])
def test_pc_67_bad_temperature(served: Served, value: Any) -> None:
    assert "from 0 to 2" in refused(served, "temperature", temperature=value)


@pytest.mark.parametrize("value", [1e-12, 5e-324, -0.0, 0, 0.0])
def test_pc_67_tiny_temperature_is_greedy(served: Served, value: float) -> None:
    made = sampling_of(served, temperature=value).temperature
    assert made == 0.0 and str(made) == "0.0"


def test_pc_67_small_temperatures_are_kept(served: Served) -> None:
    assert sampling_of(served, temperature=1e-4).temperature == 1e-4


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("top_p", [1, 1.0, 1e-9, 0.5], [0, -0.1, 1.0001, "1", True]),
        ("top_k", [0, -1, 1, 10**9, VOCAB + 1], [-2, 2**31, 1.5, "1", True]),
        ("min_p", [0, 1, 0.5], [-0.1, 1.1, "0", False]),
        ("presence_penalty", [-2, 2, 0.0], [-2.1, 2.1, "0", True]),
        ("frequency_penalty", [-2, 2, 0.0], [-2.1, 2.1, "0", True]),
        ("repetition_penalty", [0.01, 1, 10], [0, -1, 10.5, 1e-30, "1", True]),
        ("n", [1, 2], [0, -1, 129, 1.0, "1", True]),
        ("min_tokens", [0, 16], [-1, 17, 1.0, "1", True]),
        ("ignore_eos", [True, False], [0, 1, "true"]),
        ("echo", [True, False], [0, 1, "true"]),
        ("stream", [False], [0, 1, "true"]),
        ("skip_special_tokens", [True, False], [0, "true"]),
        ("add_special_tokens", [True, False], [0, "true"]),
        ("return_token_ids", [True, False], [0, "true"]),
        ("model", ["k3-nano", ""], [5, True, ["k3-nano"]]),
        ("stop_token_ids", [[], [1, 2]], [5, "1", ["1"], [1.0], [True], [None], [VOCAB], [-1]]),
    ],
)
def test_pc_68_edges_of_every_field(
    served: Served, name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        got = served.complete(prompt="x", **{name: value})
        assert got.status == 200, (value, got.body)
    for value in bad:
        got = served.complete(prompt="x", **{name: value})
        assert got.status == 400, (value, got.body)
        assert got.error["param"].startswith(name), (value, got.error)


def test_pc_68_top_k_off(served: Served) -> None:
    assert sampling_of(served, top_k=-1).top_k == 0
    assert sampling_of(served, top_k=0).top_k == 0
    assert sampling_of(served, top_k=10**9).top_k == 10**9


def test_too_many_stop_token_ids(served: Served) -> None:
    most = MAX_STOP_IDS - len(EOS_IDS)
    assert len(sampling_of(served, stop_token_ids=list(range(most))).stop_token_ids) == MAX_STOP_IDS
    got = served.complete(prompt="x", stop_token_ids=list(range(most + 1)))
    assert got.status == 400 and str(most) in got.error["message"]
    got = served.complete(prompt="x", stop_token_ids=list(range(16)), ignore_eos=True)
    assert got.status == 200


@pytest.mark.parametrize(
    "stop", ["", [""], ["", "x"], [None], [5], 5, {}, ["x"] * 17, "y" * 100_000, True]
)
def test_pc_69_bad_stops(served: Served, stop: Any) -> None:
    got = served.complete(prompt="x", stop=stop)
    assert got.status == 400 and got.error["param"].startswith("stop")


@pytest.mark.parametrize("stop", [None, [], "\u0000", list("abcdfgij"), ["\n\n", "Q:"]])
def test_pc_69_good_stops(served: Served, stop: Any) -> None:
    got = served.complete(prompt="x", stop=stop, max_tokens=2)
    assert got.status == 200
    assert got.json["choices"][0]["text"] == "he"


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], None, {}, 5, True])
def test_pc_70_empty_prompt(served: Served, prompt: Any) -> None:
    for extra in ({}, {"echo": True, "logprobs": 1}):
        got = served.complete(prompt=prompt, **extra)
        assert got.status == 400 and got.error["param"].startswith("prompt")
    assert served.complete().status == 400
    served.alive()


# ------------------------------------------------------------------------------ policy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "end"),
        ("best_of", 3),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("structured_outputs", {"json": {}}),
        ("use_beam_search", True),
        ("prompt_logprobs", 1),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("truncate_prompt_tokens", 5),
        ("priority", 1),
        ("max_new_tokens", 5),
    ],
)
def test_pc_78_unsupported_fields_are_refused(served: Served, name: str, value: Any) -> None:
    refused(served, name, **{name: value})


@pytest.mark.parametrize(
    "body",
    [
        {"suffix": ""},
        {"best_of": 2, "n": 2},
        {"best_of": 1},
        {"use_beam_search": False},
        {"length_penalty": 1.0},
        {"allowed_token_ids": []},
        {"priority": 0},
    ],
)
def test_pc_78_values_that_ask_for_nothing_are_fine(served: Served, body: Any) -> None:
    assert served.complete(prompt="x", **body).status == 200


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("top-p", "top_p"),
        ("stops", "stop"),
        ("logprob", "logprobs"),
        ("frequency_penality", "frequency_penalty"),
    ],
)
def test_pc_78_typos(served: Served, typo: str, meant: str) -> None:
    assert meant in refused(served, typo, **{typo: 1})


def test_pc_78_harmless_and_unknown_fields_are_listed(served: Served) -> None:
    got = served.complete(prompt="x", user="u", metadata={"a": "b"}, store=True, zebra=1)
    assert got.status == 200
    assert got.headers["x-k3serve-ignored"] == "user, metadata, store, zebra"
    got = served.complete(prompt="x", zebra=1, stream=True)
    assert got.headers["x-k3serve-ignored"] == "zebra"
    got = served.complete(prompt="x", **{f"q{i}\r\nSet-Cookie: é": i for i in range(100)})
    assert got.status == 200
    assert got.headers["x-k3serve-ignored"].endswith(", +80 more")
    assert got.headers["Set-Cookie"] is None


def test_unknown_stream_options_are_listed(served: Served) -> None:
    got = served.complete(prompt="x", stream=True, stream_options={"zebra": 1})
    assert got.status == 200
    assert got.headers["x-k3serve-ignored"] == "stream_options.zebra"
    assert served.complete(prompt="x", stream=True, stream_options=[]).status == 400


def test_unknown_model(served: Served) -> None:
    got = served.complete(prompt="x", model="gpt-4")
    assert got.status == 404
    assert got.error["code"] == "model_not_found" and got.error["param"] == "model"


def test_served_model_names(start_server: Any) -> None:
    served = start_server(served_model_names=("moonshotai/Kimi-K3", "k3"))
    assert [m["id"] for m in served.get("/v1/models").json["data"]] == ["moonshotai/Kimi-K3", "k3"]
    assert served.get("/v1/models/moonshotai/Kimi-K3").json["id"] == "moonshotai/Kimi-K3"
    assert served.get("/v1/models/moonshotai%2FKimi-K3").status == 200
    assert served.get("/v1/models/other").error["code"] == "model_not_found"
    assert served.complete(prompt="x").json["model"] == "moonshotai/Kimi-K3"
    assert served.complete(prompt="x", model="k3").json["model"] == "k3"
