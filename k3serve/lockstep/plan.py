"""Plans and results as int32 vectors, on the host's side: pack, unpack, and what a request must
satisfy.

Rule: offsets come from `wire`; a plan that packs is a plan that every rank can read. Conventions
beside the layout's own: ticks count modulo 2**32 (`wire_tick`); want_logprobs is 0 for none and
N+1 for the N best; a slot's prompt_logprobs do not travel, each page says itself whether it is
scored; a page table's length is TickShape.pages_for(prompt_len + max_tokens).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from k3serve import wire
from k3serve.errors import HostFailure, RequestError
from k3serve.types import (
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    MAX_TOP_LOGPROBS,
    Admit,
    PageWork,
    Plan,
    Request,
    Sampling,
    TickResult,
    TickShape,
)

_INT_FIELDS = ("choice", "top_k", "max_tokens", "min_tokens")
_FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)

plan_layout = lru_cache(wire.plan_layout)
result_layout = lru_cache(wire.result_layout)


def wire_tick(tick: int) -> int:
    """The tick number as the vectors carry it: wrapped to int32, as the device's own counter
    wraps.
    """
    return (tick + 2**31) % 2**32 - 2**31


# -------------------------------------------------------------------------------------- a request


def check_request(request: Request, shape: TickShape) -> None:
    """Raises RequestError for what no plan could carry, so that packing a plan never fails.

    The API checks more, and says it better; this is what keeps one request from ending the server.
    """
    sampling = request.sampling
    if not request.prompt:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if len(request.prompt) > shape.max_context:
        raise RequestError(
            f"the prompt has {len(request.prompt)} tokens, the context holds {shape.max_context}",
            param="prompt",
            code="context_length_exceeded",
        )
    _check_range("prompt", min(request.prompt), 0, _INT32_MAX)
    _check_range("prompt", max(request.prompt), 0, _INT32_MAX)
    for name in _INT_FIELDS:
        _check_range(name, getattr(sampling, name), 0, _INT32_MAX)
    _check_range("seed", sampling.seed, 0, 2**64 - 1)
    for name in _FLOAT_FIELDS:
        _check_range(name, getattr(sampling, name), -_FLOAT32_MAX, _FLOAT32_MAX)
    for name in ("top_logprobs", "prompt_logprobs"):
        _check_range(name, getattr(sampling, name) or 0, 0, MAX_TOP_LOGPROBS)
    _check_range("stop_token_ids (how many)", len(sampling.stop_token_ids), 0, MAX_STOP_IDS)
    _check_range("logit_bias (how many)", len(sampling.logit_bias), 0, MAX_LOGIT_BIAS)
    for token in sampling.stop_token_ids:
        _check_range("stop_token_ids", token, 0, _INT32_MAX)
    for token, bias in sampling.logit_bias:
        _check_range("logit_bias", token, 0, _INT32_MAX)
        _check_range("logit_bias", bias, -_FLOAT32_MAX, _FLOAT32_MAX)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        raise RequestError(
            f"{name} is {value}; allowed is {low} to {high}", param=name.split(" ")[0]
        )


# ----------------------------------------------------------------------------------------- a plan


def pack(plan: Plan, shape: TickShape) -> np.ndarray:
    """The plan as one int32 vector of plan_layout(shape).size words."""
    layout = plan_layout(shape)
    vector = layout.zeros()

    def put(name: str, value: int) -> None:
        layout.array(vector, name)[...] = value

    put("magic", wire.MAGIC)
    put("version", wire.VERSION)
    put("tick", wire_tick(plan.tick))
    put("stop", plan.stop)
    put("decode_steps", plan.decode_steps)
    put("num_pages", len(plan.pages))
    layout.array(vector, "release")[list(plan.releases)] = 1
    layout.array(vector, "stop_token_ids")[...] = -1
    layout.array(vector, "bias_ids")[...] = -1
    layout.array(vector, "restore")[...] = -1
    layout.array(vector, "page_save")[...] = -1
    for admit in plan.admits:
        _put_admit(layout, vector, admit, shape)
    for index, page in enumerate(plan.pages):
        _put_page(layout, vector, index, page)
    put("checksum", int(wire.checksum(vector)))
    return vector


def _put_admit(layout: wire.Layout, vector: np.ndarray, admit: Admit, shape: TickShape) -> None:
    sampling, slot = admit.sampling, admit.slot
    assert len(admit.pages) == shape.pages_for(admit.prompt_len + sampling.max_tokens), admit

    def put(name: str, value: float) -> None:
        layout.array(vector, name)[slot] = value

    put("admit", 1)
    put("prompt_len", admit.prompt_len)
    put("speculate", sampling.speculate)
    put("want_logprobs", 0 if sampling.top_logprobs is None else sampling.top_logprobs + 1)
    for name in _INT_FIELDS + _FLOAT_FIELDS:
        put(name, getattr(sampling, name))
    words = np.array([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32], np.uint32)
    layout.array(vector, "seed")[slot] = words.view(np.int32)
    stops, bias = sampling.stop_token_ids, sampling.logit_bias
    layout.array(vector, "stop_token_ids")[slot, : len(stops)] = stops
    layout.array(vector, "bias_ids")[slot, : len(bias)] = [token for token, _ in bias]
    layout.array(vector, "bias_values")[slot, : len(bias)] = [value for _, value in bias]
    layout.array(vector, "page_table")[slot, : len(admit.pages)] = admit.pages
    if admit.restore is not None:
        put("restore", admit.restore)


def _put_page(layout: wire.Layout, vector: np.ndarray, index: int, page: PageWork) -> None:
    def put(name: str, value: int) -> None:
        layout.array(vector, name)[index] = value

    put("page_slot", page.slot)
    put("page_start", page.start)
    put("page_len", len(page.tokens))
    put("page_next", page.next_token)
    put("page_final", page.final)
    put("page_score", page.score)
    if page.save is not None:
        put("page_save", page.save)
    layout.array(vector, "page_tokens")[index, : len(page.tokens)] = page.tokens


def unpack(vector: np.ndarray, shape: TickShape, *, tick: int | None = None) -> Plan:
    """The plan in a vector. Raises HostFailure when it is no plan, of another version, not that of
    `tick` (where given; its number then stands in the plan unwrapped), or damaged."""
    layout = plan_layout(shape)
    _check("LENGTH", layout.size, vector.size)
    _check("MAGIC", wire.MAGIC, int(layout.view(vector, "magic")))
    _check("VERSION", wire.VERSION, int(layout.view(vector, "version")))
    found = int(layout.view(vector, "tick"))
    if tick is not None:
        _check("TICK", wire_tick(tick), found)
    _check("CHECKSUM", int(wire.checksum(vector)), int(layout.view(vector, "checksum")))
    return Plan(
        tick=found if tick is None else tick,
        releases=_flagged(layout.view(vector, "release")),
        admits=tuple(
            _get_admit(layout, vector, slot, shape)
            for slot in _flagged(layout.view(vector, "admit"))
        ),
        pages=tuple(
            _get_page(layout, vector, index)
            for index in range(int(layout.view(vector, "num_pages")))
        ),
        decode_steps=int(layout.view(vector, "decode_steps")),
        stop=bool(layout.view(vector, "stop")),
    )


def _check(name: str, expected: int, found: int) -> None:
    if expected != found:
        raise HostFailure(
            f"plan check {name} failed: expected {expected}, found {found}; "
            "all hosts must run the same version with the same settings"
        )


def _flagged(flags: np.ndarray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(flags).tolist())


def _get_admit(layout: wire.Layout, vector: np.ndarray, slot: int, shape: TickShape) -> Admit:
    def row(name: str) -> np.ndarray:
        return layout.array(vector, name)[slot]

    low, high = row("seed").view(np.uint32).tolist()
    want = int(row("want_logprobs"))
    biases = zip(row("bias_ids").tolist(), row("bias_values").tolist(), strict=True)
    numbers: dict[str, Any] = {name: int(row(name)) for name in _INT_FIELDS}
    numbers |= {name: float(row(name)) for name in _FLOAT_FIELDS}
    sampling = Sampling(
        seed=high << 32 | low,
        logit_bias=tuple((token, value) for token, value in biases if token >= 0),
        stop_token_ids=tuple(token for token in row("stop_token_ids").tolist() if token >= 0),
        top_logprobs=want - 1 if want else None,
        speculate=bool(row("speculate")),
        **numbers,
    )
    prompt_len = int(row("prompt_len"))
    pages = shape.pages_for(prompt_len + sampling.max_tokens)
    return Admit(
        slot,
        prompt_len,
        sampling,
        tuple(row("page_table")[:pages].tolist()),
        restore=_index(row("restore")),
    )


def _get_page(layout: wire.Layout, vector: np.ndarray, index: int) -> PageWork:
    def number(name: str) -> int:
        return int(layout.view(vector, name)[index])

    return PageWork(
        slot=number("page_slot"),
        start=number("page_start"),
        tokens=tuple(layout.view(vector, "page_tokens")[index, : number("page_len")].tolist()),
        next_token=number("page_next"),
        final=bool(number("page_final")),
        score=bool(number("page_score")),
        save=_index(number("page_save")),
    )


def _index(value: Any) -> int | None:
    """A pool's index, of which -1 stands for none."""
    return None if value < 0 else int(value)


# --------------------------------------------------------------------------------------- a result


def unpack_result(vector: np.ndarray, shape: TickShape) -> TickResult:
    """The result in a vector, as read-only views of it. Raises HostFailure on another length."""
    layout = result_layout(shape)
    if vector.shape != (layout.size,):
        raise HostFailure(
            f"a tick's result has shape {vector.shape}, expected ({layout.size},); "
            "runtime and scheduler were given different shapes"
        )
    vector = np.ascontiguousarray(vector, np.int32)

    def array(name: str) -> np.ndarray:
        block = layout.array(vector, name)
        block.flags.writeable = False
        return block

    return TickResult(
        tick=int(array("tick")),
        fault=int(array("fault")),
        stopped=bool(array("stop")),
        steps=int(array("steps")),
        counts=array("counts"),
        tokens=array("tokens"),
        logprobs=array("logprobs"),
        top_ids=array("top_ids"),
        top_logprobs=array("top_logprobs"),
        finish=array("finish"),
        slot_steps=array("slot_steps"),
        offered=array("offered"),
        accepted=array("accepted"),
        score_logprobs=array("score_logprobs"),
        score_top_ids=array("score_top_ids"),
        score_top_logprobs=array("score_top_logprobs"),
    )


def check_result(vector: np.ndarray, shape: TickShape, tick: int) -> bool:
    """Whether the run stops after this tick. Raises HostFailure on a fault or another tick's echo.

    All that a follower ever asks of a result.
    """
    layout = result_layout(shape)
    fault = int(layout.view(vector, "fault"))
    if fault:
        known = {code.value: code.name for code in wire.Fault}
        raise HostFailure(
            f"tick {tick}: a host refused the plan, check {known.get(fault, 'UNKNOWN')} ({fault}) "
            "failed; "
            "all hosts must run the same version with the same settings"
        )
    echo = int(layout.view(vector, "tick"))
    if echo != wire_tick(tick):
        raise HostFailure(f"tick {tick}: the device answered for tick {echo}; the hosts lost step")
    return bool(layout.view(vector, "stop"))
