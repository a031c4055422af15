"""Models, health, version, metrics, tokenizer endpoints."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from k3serve.api.routes import ROUTES
from k3serve.metrics import Metrics
from k3serve.text.chat import encode_chat, render
from k3serve.types import State
from tests.api.client import Served
from tests.fakes import says


@pytest.mark.parametrize("path", ["/health", "/ping"])
@pytest.mark.parametrize("state", list(State))
def test_health_follows_the_state(served: Served, path: str, state: State) -> None:
    served.executor.now = state
    got = served.get(path)
    if state is State.READY:
        assert (got.status, got.body) == (200, b"")
        return
    assert got.status == 503
    assert state.value in got.error["message"] and got.headers["Retry-After"]


def test_ping_takes_post(served: Served) -> None:
    assert served.ask("POST", "/ping", b"").status == 200


def test_version(served: Served) -> None:
    assert served.get("/version").json == {"version": "1.2.3"}


def test_models(served: Served) -> None:
    got = served.get("/v1/models").json
    assert got["object"] == "list"
    (card,) = got["data"]
    assert card["id"] == card["root"] == "k3-nano"
    assert card["object"] == "model" and isinstance(card["created"], int)
    assert card["max_model_len"] == 4096 and card["owned_by"] == "k3serve"
    assert served.get("/v1/models/k3-nano").json == card


def test_tokenize_maps_special_strings(served: Served) -> None:
    got = served.ask("POST", "/tokenize", {"prompt": "a[EOS]", "add_special_tokens": False})
    assert got.json == {"count": 2, "max_model_len": 4096, "tokens": [97, 257], "token_strs": None}
    got = served.ask("POST", "/tokenize", {"prompt": "aé", "return_token_strs": True})
    assert got.json["token_strs"] == ["a", "�", "�"]
    assert served.ask("POST", "/tokenize", {"prompt": ""}).json["tokens"] == []


def test_tokenize_equals_what_completions_submits(served: Served) -> None:
    text = "explain [EOS] é <|open|>"
    ids = served.ask("POST", "/tokenize", {"prompt": text}).json["tokens"]
    served.complete(prompt=text)
    assert served.executor.submitted[0].prompt == tuple(ids)


def test_tokenize_messages_equals_what_chat_submits(served: Served) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "reasoning_effort": "low",
    }
    ids = served.ask("POST", "/tokenize", body).json["tokens"]
    assert served.chat(**body).status == 200
    assert served.executor.submitted[0].prompt == tuple(ids)
    body = {"messages": body["messages"], "add_generation_prompt": False}
    ids = served.ask("POST", "/tokenize", body).json["tokens"]
    fragments = render(body["messages"], add_generation_prompt=False)
    assert ids == encode_chat(served.tokenizer, fragments)


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "a", "messages": []}, {"prompt": ["a"]}, {"prompt": [{"role": "user"}]}],
)
def test_bad_tokenize(served: Served, body: dict[str, Any]) -> None:
    got = served.ask("POST", "/tokenize", body)
    assert got.status == 400 and got.error["param"] == "prompt"


def test_detokenize(served: Served) -> None:
    got = served.ask("POST", "/detokenize", {"tokens": [104, 105, 257]})
    assert got.json == {"prompt": "hi[EOS]"}
    assert served.ask("POST", "/detokenize", {"tokens": []}).json == {"prompt": ""}


@pytest.mark.parametrize("tokens", [None, "x", [1.5], [-1], [10**20], [True], [[1]]])
def test_bad_detokenize(served: Served, tokens: Any) -> None:
    got = served.ask("POST", "/detokenize", {"tokens": tokens})
    assert got.status == 400 and got.error["param"].startswith("tokens")


def test_tokenizer_info(served: Served) -> None:
    got = served.get("/tokenizer_info").json
    assert got["eos_token"] == "[EOS]" and got["chat_template"] is None


def metrics_of(served: Served) -> dict[str, float]:
    got = served.get("/metrics")
    assert got.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name
        + "".join(f"|{v}" for k, v in sample.labels.items() if k == "finished_reason"): sample.value
        for family in text_string_to_metric_families(got.body.decode())
        for sample in family.samples
    }


def test_metrics_count(start_server: Any) -> None:
    served = start_server()
    served.executor.script = says([*list(b"abc"), 258], per_event=2)
    served.complete(prompt=[1, 2, 3], max_tokens=9)
    served.complete(prompt=[1, 2, 3], max_tokens=2, stream=True)
    served.chat(stop="b", chat_template_kwargs={"thinking": False})
    served.executor.refuse_after = 0
    served.complete(prompt="x")
    seen = metrics_of(served)
    prompts = sum(len(r.prompt) for r in served.executor.submitted)
    assert seen["vllm:prompt_tokens_total"] == prompts
    assert seen["vllm:generation_tokens_total"] == 4 + 2 + 2
    assert seen["vllm:request_success_total|stop"] == 2
    assert seen["vllm:request_success_total|length"] == 1
    assert seen["vllm:time_to_first_token_seconds_count"] == 3
    assert seen["vllm:inter_token_latency_seconds_count"] == 1
    assert seen["vllm:e2e_request_latency_seconds_count"] == 3
    assert seen["vllm:request_time_per_output_token_seconds_count"] == 3
    assert seen["vllm:request_params_n_sum"] == 3
    budgets = sum(r.sampling.max_tokens for r in served.executor.submitted)
    assert seen["vllm:request_params_max_tokens_sum"] == budgets
    assert seen["vllm:admission_rejections_total"] == 1
    assert seen["k3serve_compilations_after_ready_total"] == 0
    assert seen["vllm:num_requests_running"] == 0
    assert "vllm:num_requests_waiting" in seen


def test_two_metrics_objects_do_not_share_counts() -> None:
    one, two = Metrics("a"), Metrics("b")
    one.compilations_after_ready.inc()
    assert b"k3serve_compilations_after_ready_total 1.0" in one.render()[1]
    assert b"k3serve_compilations_after_ready_total 0.0" in two.render()[1]


def test_the_server_needs_no_jax() -> None:
    code = "import sys, k3serve.api.server; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_route_answers_something(served: Served) -> None:
    for path, route in ROUTES.items():
        for method in route.methods:
            body = b"{}" if method == "POST" else None
            got = served.ask(method, path + ("k3-nano" if route.open_end else ""), body)
            assert got.status in (200, 400), (method, path, got.body)
