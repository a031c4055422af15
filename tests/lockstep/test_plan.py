"""The codec: whatever a scheduler may plan survives the wire, and nothing damaged passes for a
plan.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3serve import wire
from k3serve.errors import HostFailure, RequestError
from k3serve.lockstep.plan import (
    check_request,
    check_result,
    pack,
    plan_layout,
    result_layout,
    unpack,
    unpack_result,
    wire_tick,
)
from k3serve.types import (
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    Admit,
    PageWork,
    Plan,
    Request,
    Sampling,
    TickShape,
)
from tests.lockstep.conftest import SHAPE

INT = st.integers(0, 2**31 - 1)
FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)
SHAPES = st.builds(
    TickShape,
    max_slots=st.integers(1, 5),
    page_tokens=st.integers(1, 6),
    pages_per_tick=st.integers(1, 4),
    steps_per_tick=st.integers(1, 8),
    rows=st.integers(1, 8),
    pages_per_slot=st.integers(1, 6),
    num_pages=st.just(40),
)
SAMPLING = st.builds(
    Sampling,
    max_tokens=INT,
    seed=st.integers(0, 2**64 - 1),
    choice=INT,
    temperature=FLOAT,
    top_p=FLOAT,
    top_k=INT,
    min_p=FLOAT,
    presence_penalty=FLOAT,
    frequency_penalty=FLOAT,
    repetition_penalty=FLOAT,
    logit_bias=st.lists(st.tuples(INT, FLOAT), max_size=5).map(tuple)
    | st.just(tuple((i, i / 4) for i in range(MAX_LOGIT_BIAS))),
    min_tokens=INT,
    stop_token_ids=st.lists(INT, max_size=MAX_STOP_IDS).map(tuple),
    top_logprobs=st.none() | st.integers(0, 20),
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, TickShape]:
    shape = draw(SHAPES)
    slots = st.lists(st.integers(0, shape.max_slots - 1), unique=True).map(sorted)
    admits = []
    for slot in draw(slots):
        sampling, length = draw(SAMPLING), draw(st.integers(1, shape.max_context))
        count = shape.pages_for(length + sampling.max_tokens)
        numbers = st.lists(st.integers(0, 39), min_size=count, max_size=count)
        admits.append(Admit(slot, length, sampling, tuple(draw(numbers))))
    page = st.builds(
        PageWork,
        slot=st.integers(0, shape.max_slots - 1),
        start=INT,
        tokens=st.lists(INT, min_size=1, max_size=shape.page_tokens).map(tuple),
        next_token=st.integers(-1, 2**31 - 1),
        final=st.booleans(),
        score=st.booleans(),
    )
    plan = Plan(
        tick=draw(st.integers(0, 2**40)),
        releases=tuple(draw(slots)),
        admits=tuple(admits),
        pages=tuple(draw(st.lists(page, max_size=shape.pages_per_tick))),
        decode_steps=draw(st.integers(0, shape.steps_per_tick)),
        stop=draw(st.booleans()),
    )
    return plan, shape


@settings(max_examples=200, deadline=None)
@given(plans())
def test_a_plan_survives_the_wire(case):
    plan, shape = case
    vector = pack(plan, shape)
    assert vector.dtype == np.int32 and vector.shape == (wire.plan_layout(shape).size,)
    assert unpack(vector, shape, tick=plan.tick) == plan


@settings(max_examples=200, deadline=None)
@given(plans(), st.data())
def test_any_changed_word_is_noticed(case, data):
    plan, shape = case
    vector = pack(plan, shape)
    at = data.draw(st.integers(0, vector.size - 1))
    vector[at] ^= data.draw(st.integers(1, 2**31 - 1))
    with pytest.raises(HostFailure, match=r"plan check (MAGIC|VERSION|TICK|CHECKSUM) failed"):
        unpack(vector, shape, tick=plan.tick)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("magic", 7, f"MAGIC failed: expected {wire.MAGIC}, found 7"),
        ("version", 99, f"VERSION failed: expected {wire.VERSION}, found 99"),
        ("tick", 4, "TICK failed: expected 5, found 4"),
        ("checksum", 3, r"CHECKSUM failed: expected -?\d+, found 3"),
    ],
)
def test_a_failed_check_names_itself_and_both_values(name, value, message):
    vector = pack(Plan(5), SHAPE)
    plan_layout(SHAPE).array(vector, name)[...] = value
    with pytest.raises(HostFailure, match=message):
        unpack(vector, SHAPE, tick=5)


def test_a_vector_of_another_shape_is_refused():
    vector = pack(Plan(5), SHAPE)
    with pytest.raises(HostFailure, match="LENGTH failed"):
        unpack(vector, replace(SHAPE, max_slots=4))
    with pytest.raises(HostFailure, match=r"result has shape \(7,\)"):
        unpack_result(np.zeros(7, np.int32), SHAPE)


def test_two_leaders_at_once_are_noticed():
    both = pack(Plan(5), SHAPE) + pack(Plan(5, decode_steps=1), SHAPE)
    with pytest.raises(HostFailure, match="plan check"):
        unpack(both, SHAPE, tick=5)


def test_ticks_wrap_as_the_device_counts():
    assert [wire_tick(t) for t in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32)] == [
        0,
        2**31 - 1,
        -(2**31),
        -1,
        0,
    ]


def test_a_result_is_read_only_views_of_its_vector():
    layout = result_layout(SHAPE)
    vector = np.arange(layout.size, dtype=np.int32)
    layout.array(vector, "logprobs")[...] = -0.5
    result = unpack_result(vector, SHAPE)
    assert (result.tick, result.fault, result.stopped, result.steps) == (0, 1, True, 3)
    assert result.counts.tolist() == [4, 5, 6] and result.finish.tolist() == [7, 8, 9]
    assert result.logprobs.dtype == np.float32 and (result.logprobs == -0.5).all()
    assert result.score_top_ids.shape == (2, 4, 20)
    assert np.shares_memory(result.tokens, vector)
    with pytest.raises(ValueError, match="read-only"):
        result.tokens[0, 0] = 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fault": wire.Fault.TICK}, r"tick 8: a host refused the plan, check TICK \(3\) failed"),
        ({"fault": 77}, r"check UNKNOWN \(77\) failed"),
        ({"tick": 7}, "tick 8: the device answered for tick 7"),
    ],
)
def test_a_result_with_a_fault_or_another_tick_ends_the_run(values, message):
    layout = result_layout(SHAPE)
    vector = layout.zeros()
    for name, value in {"tick": 8, **values}.items():
        layout.array(vector, name)[...] = value
    with pytest.raises(HostFailure, match=message):
        check_result(vector, SHAPE, 8)


GOOD = Request(1, (1, 2), Sampling(3))


@pytest.mark.parametrize(
    ("param", "bad"),
    [
        ("prompt", replace(GOOD, prompt=())),
        ("prompt", replace(GOOD, prompt=(1,) * 33)),
        ("prompt", replace(GOOD, prompt=(1, -1))),
        ("prompt", replace(GOOD, prompt=(1, 2**31))),
        *(
            (name, replace(GOOD, sampling=replace(GOOD.sampling, **{name: value})))
            for name, value in [
                ("max_tokens", -1),
                ("max_tokens", 2**31),
                ("seed", 2**64),
                ("seed", -1),
                ("top_k", 2**31),
                ("temperature", float("nan")),
                ("top_p", float("inf")),
                ("presence_penalty", 1e39),
                ("top_logprobs", 21),
                ("prompt_logprobs", -1),
                ("stop_token_ids", (1,) * 17),
                ("stop_token_ids", (-1,)),
                ("logit_bias", ((1, 0.0),) * 301),
                ("logit_bias", ((-1, 0.0),)),
                ("logit_bias", ((1, float("nan")),)),
            ]
        ),
    ],
)
def test_what_no_plan_can_carry_is_the_requests_own_error(param, bad):
    check_request(GOOD, SHAPE)
    with pytest.raises(RequestError) as caught:
        check_request(bad, SHAPE)
    assert caught.value.status == 400 and caught.value.param == param
