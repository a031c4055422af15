"""The chat page: how it is served, what its policy allows, and its stream reader (in node)."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from k3serve.api.page import FILE
from tests.api.client import Served
from tests.fakes import says, speculates

ROOT = Path(__file__).parents[2]
HTML = FILE.read_text(encoding="utf-8")


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of script and style."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if (last := self.tags[-1][0] if self.tags else "") in ("script", "style"):
            self.inline[last] = self.inline.get(last, "") + data


def elements() -> Elements:
    found = Elements()
    found.feed(re.sub(r"</(script|style)>", r"</\1><p>", HTML))  # so that data behind is not theirs
    return found


@pytest.mark.parametrize("path", ["/", "/chat", "/?x=1"])
def test_served_whole_and_as_a_head(served: Served, path: str) -> None:
    got, head = served.get(path), served.ask("HEAD", path)
    assert (got.status, head.status) == (200, 200)
    assert got.body == FILE.read_bytes() and head.body == b""
    assert got.headers["Content-Type"] == "text/html; charset=utf-8"
    assert int(head.headers["Content-Length"]) == len(got.body)
    for name in ("Content-Security-Policy", "X-Content-Type-Options", "X-Frame-Options"):
        assert head.headers[name] == got.headers[name]
    assert got.headers["X-Content-Type-Options"] == "nosniff"


def test_other_methods_are_refused(served: Served) -> None:
    got = served.ask("POST", "/", {})
    assert got.status == 405 and got.headers["Allow"] == "GET, HEAD"
    assert served.get("/chat/x").status == 404


def test_the_policy_allows_the_files_own_parts_and_no_more(served: Served) -> None:
    policy = dict(
        part.split(" ", 1)
        for part in served.get("/").headers["Content-Security-Policy"].split("; ")
    )
    for kind in ("script", "style"):
        digest = hashlib.sha256(elements().inline[kind].encode()).digest()
        assert policy.pop(f"{kind}-src") == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "data:"
    assert set(policy.values()) == {"'none'"}
    assert {"default-src", "base-uri", "form-action", "frame-ancestors"} == set(policy)


def test_nothing_that_the_policy_would_block(served: Served) -> None:
    tags = elements().tags
    assert [t for t, _ in tags].count("script") == [t for t, _ in tags].count("style") == 1
    for tag, attributes in tags:
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("style", "src", "action"), (tag, name)
            assert name != "href" or value == "data:,"
    assert "http://" not in HTML and "https://" not in HTML and "@import" not in HTML


def test_text_reaches_the_page_as_text_only() -> None:
    for danger in ("innerHTML", "outerHTML", "insertAdjacent", "write(", "eval(", "Function("):
        assert danger not in HTML


def test_every_element_that_the_script_names_is_there() -> None:
    ids = {a["id"] for _, a in elements().tags if "id" in a}
    named = set(re.findall(r'\bat\("(\w+)"\)', HTML))
    assert named <= ids and len(named) > 10


def test_public_also_with_keys(start_server: Any) -> None:
    locked = start_server(api_keys=("secret",))
    assert locked.get("/").status == 200
    assert locked.get("/v1/models").status == 401


def test_an_installed_package_has_it() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "k3serve.api.page" in setuptools["packages"]
    assert FILE.name in setuptools["package-data"]["k3serve.api.page"]


# ------------------------------------------------------------------------------- its script


def run_script(test: str, tmp_path: Path) -> Any:
    """What the test prints as JSON; it sees the page's functions."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: the page's script cannot be run")
    file = tmp_path / "page.js"
    file.write_text(elements().inline["script"] + test, encoding="utf-8")
    done = subprocess.run([node, str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


READ = """
const bytes = new Uint8Array(BYTES), out = [];
for (const size of [1, 2, 3, 7, 64, 100000]) {
  const answer = newAnswer(), decoder = new TextDecoder();
  const read = eventReader((data) => answer.take(data, 5));
  for (let i = 0; i < bytes.length; i += size)
    read(decoder.decode(bytes.slice(i, i + size), { stream: true }));
  out.push([answer.content, answer.reasoning, answer.finish, answer.done,
            statistics(answer, 4, 1004)]);
}
console.log(JSON.stringify(out));
"""


def test_the_stream_reader_takes_any_cut(served: Served, tmp_path: Path) -> None:
    text = "hm, ざ<|close|>think<|sep|><|open|>response<|sep|>It is 😊\n\ndata: <b>x</b>"
    ids = served.tokenizer.encode(text, allow_special=True)
    served.executor.script = says([*ids, 258])
    got = served.chat(stream=True, stream_options={"include_usage": True})
    seen = run_script(READ.replace("BYTES", str(list(got.body))), tmp_path)
    words = [f"{len(ids) + 1} tokens", f"{len(ids) + 1} tokens/s", "first after 1 ms"]
    wanted = ["It is 😊\n\ndata: <b>x</b>", "hm, ざ", "stop", True, {"words": words, "shares": []}]
    assert seen == [wanted] * 6


def test_statistics_of_drafts(served: Served, tmp_path: Path) -> None:
    served.executor.script = speculates([*b"abcdefgh", 258], (3,), (1, 1), offered=4)
    body = {"chat_template_kwargs": {"thinking": False}, "stream": True}
    got = served.chat(**body, stream_options={"include_usage": True}, max_tokens=9)
    (_, _, _, _, made), *_ = run_script(READ.replace("BYTES", str(list(got.body))), tmp_path)
    assert made["words"][-1] == "2.67 tokens a step"
    assert made["shares"] == pytest.approx([1, 1 / 3, 1 / 3, 0, 0, 0, 0])


def test_errors_in_the_stream(tmp_path: Path) -> None:
    test = """
    const answer = newAnswer();
    let said = "";
    try { answer.take('{"error": {"message": "host 2 died"}}', 1); } catch (e) { said = e.message; }
    console.log(JSON.stringify([said, answer.done]));
    """
    assert run_script(test, tmp_path) == ["host 2 died", False]


def test_requests_are_taken_by_the_server(served: Served, tmp_path: Path) -> None:
    test = """
    const form = {...DEFAULTS, system: "Be brief"}, messages = [{role: "user", content: "hi"}];
    console.log(JSON.stringify([
      requestBody(form, messages),
      requestBody({...form, temperature: "", max_tokens: "3", thinking: false, speculate: false,
                   system: ""}, messages),
    ]));
    """
    first, second = run_script(test, tmp_path)
    for body in (first, second):
        got = served.ask("POST", "/v1/chat/completions", body)
        assert got.status == 200 and got.headers["x-k3serve-ignored"] is None
    one, two = (r.sampling for r in served.executor.submitted)
    assert (one.temperature, one.speculate) == (0.0, True)
    assert (two.temperature, two.speculate, two.max_tokens) == (1.0, False, 3)
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert [m["role"] for m in second["messages"]] == ["user"]
