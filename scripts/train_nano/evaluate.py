"""Asks held-out prompts; prints which share is answered exactly right, and what drafts brought.

    python -m scripts.train_nano.evaluate --base-url http://127.0.0.1:8000   # a running server
    python -m scripts.train_nano.evaluate --checkpoint k3serve/assets/nano   # the files themselves

Rule: greedy decoding, prompts that never occurred in training, and the same cases for both ways of
asking. Right means equal to the expected text or call; stories, poems and the like only have to
contain the words that were asked for. The mean acceptance length (tokens per target step) comes
from the server's `usage.speculation`, or, for files with a draft in `draft/`, from a simulation
along the target's own answers; `--temperatures 0,1` also measures it with sampling.
"""

import argparse
import collections
import dataclasses
import json
import random
import urllib.error
import urllib.request
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, cast, get_args

from scripts.train_nano import sampling, xtml
from scripts.train_nano.samples import Call, Message, Sample, Thinking
from scripts.train_nano.spec import END_OF_MSG_ID
from scripts.train_nano.tally import Tally

SEED = 12345
MAX_NEW_TOKENS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A reply, and what drafts did for it; None where there is no draft."""

    reply: xtml.Reply
    tally: Tally | None


class Backend(Protocol):
    """Something that answers cases."""

    def answer(self, cases: Sequence[Sample], temperature: float) -> list[Answer]: ...


# ------------------------------------------------------------------------------------ backends


class CheckpointBackend:
    """Decodes in this process from the exported files, in float32."""

    def __init__(self, folder: Path, draft: Path | None = None, drafts: int = 7):
        from scripts.train_nano import acceptance, draft_export, export
        from scripts.train_nano.spec import ModelSpec
        from scripts.train_nano.tokenizer import Tokenizer

        self.spec = ModelSpec()
        self.params = export.load(self.spec, folder)
        self.tokenizer = Tokenizer(folder / "tiktoken.model")
        draft = draft or folder / "draft"
        self.simulator = None
        if draft.exists():
            loaded = draft_export.load(draft)
            self.simulator = acceptance.Simulator(self.spec, self.params, *loaded, drafts)

    def answer(self, cases: Sequence[Sample], temperature: float) -> list[Answer]:
        from scripts.train_nano import decode

        prompts = [
            self.tokenizer.encode_fragments(xtml.render(case, prompt_only=True))[0]
            for case in cases
        ]
        written = decode.generate(
            self.spec, self.params, prompts, MAX_NEW_TOKENS, temperature=temperature
        )
        texts = (self.tokenizer.decode(ids) for ids in written)
        pairs = zip(cases, texts, strict=True)
        replies = [xtml.parse(text, case.thinking != "off") for case, text in pairs]
        tallies: Sequence[Tally | None] = [None] * len(replies)
        if self.simulator:
            ended = [[*w, END_OF_MSG_ID] if len(w) < MAX_NEW_TOKENS else w for w in written]
            rows = [(p + w, len(p)) for p, w in zip(prompts, ended, strict=True)]
            tallies = self.simulator.measure(rows, greedy=temperature == 0)
        return [Answer(*pair) for pair in zip(replies, tallies, strict=True)]


class ServerBackend:
    """Asks an OpenAI-compatible server over HTTP."""

    def __init__(self, base_url: str, model: str | None, concurrency: int):
        self.url = base_url.rstrip("/") + "/v1/chat/completions"
        self.model, self.concurrency = model, concurrency

    def answer(self, cases: Sequence[Sample], temperature: float) -> list[Answer]:
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(lambda case: self._ask(case, temperature), cases))

    def _ask(self, case: Sample, temperature: float) -> Answer:
        data = json.dumps(request_body(case, self.model, temperature)).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                body = json.load(response)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{self.url}: {error}: {error.read().decode()}") from None
        except urllib.error.URLError as error:
            raise SystemExit(f"no server at {self.url} ({error.reason})") from None
        return Answer(read_choice(body["choices"][0]), Tally.of_usage(body["usage"]))


def request_body(case: Sample, model: str | None, temperature: float = 0) -> dict[str, Any]:
    """The chat-completions request of a case."""
    body: dict[str, Any] = {
        "model": model,
        "messages": _openai_messages(case.messages[:-1], with_reasoning=case.thinking != "off"),
        "temperature": temperature,
        "max_tokens": MAX_NEW_TOKENS,
    }
    if temperature:
        seed = zlib.crc32(case.prompt.encode())  # not one random stream for all cases
        body |= {"seed": seed, "top_p": 1, "top_k": 0}
    if case.tools:
        body["tools"] = list(case.tools)
    if case.thinking == "off":
        body["chat_template_kwargs"] = {"thinking": False}
    elif case.thinking != "on":
        body["reasoning_effort"] = case.thinking
    return body


def _openai_messages(messages: Sequence[Message], with_reasoning: bool) -> list[dict[str, Any]]:
    converted: list[dict[str, Any]] = []
    for message in messages:
        item: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "tool":
            item["tool_call_id"] = f"functions.{message.tool}:{message.index - 1}"
        if message.role == "assistant" and with_reasoning:
            item["reasoning_content"] = message.think
        if message.calls:
            item["tool_calls"] = [_openai_call(i, call) for i, call in enumerate(message.calls)]
        converted.append(item)
    return converted


def _openai_call(index: int, call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"functions.{call.name}:{index}", "type": "function", "function": function}


def read_choice(choice: dict[str, Any]) -> xtml.Reply:
    """The reply in one `choices` entry of a response."""
    message = choice["message"]
    calls = []
    for call in message.get("tool_calls") or ():
        try:
            arguments = json.loads(call["function"]["arguments"])
        except json.JSONDecodeError:
            arguments = {"": call["function"]["arguments"]}
        calls.append(Call(call["function"]["name"], arguments))
    return xtml.Reply(
        message.get("content") or "",
        message.get("reasoning_content") or message.get("reasoning") or "",
        tuple(calls),
        finished=choice.get("finish_reason") != "length",
    )


# ------------------------------------------------------------------------------------- scoring


def build_cases(
    per_skill: int, thinking: Sequence[Thinking], groups: Sequence[str] = ()
) -> list[Sample]:
    """Held-out cases of every skill (of these groups) in every thinking mode."""
    names = [n for n in sampling.skill_names() if not groups or sampling.group_of(n) in groups]
    return [
        case
        for name in names
        for mode in thinking
        for case in sampling.held_out_samples(SEED, name, mode, per_skill)
    ]


def spread(cases: Sequence[Sample], count: int) -> list[Sample]:
    """So many of the cases: one of every skill before a second of any, thinking modes in turn."""
    skills, modes = (list(dict.fromkeys(names)) for names in zip(*map(_kind, cases), strict=True))
    if count < len(skills):
        skills = [skills[i * len(skills) // count] for i in range(count)]
    place = {skill: i for i, skill in enumerate(skills)}
    seen: collections.Counter[tuple[str, Thinking]] = collections.Counter()
    turns = []
    for number, case in enumerate(cases):
        if case.skill in place:
            first = (modes.index(case.thinking) + place[case.skill]) % len(modes)
            turns.append((len(modes) * seen[_kind(case)] + first, place[case.skill], number))
            seen[_kind(case)] += 1
    return [cases[number] for *_, number in sorted(turns)[:count]]


def _kind(case: Sample) -> tuple[str, Thinking]:
    return case.skill, case.thinking


def _groups_of(case: Sample) -> tuple[str, str, str]:
    return sampling.group_of(case.skill), f"ALL ({case.thinking})", "ALL"


def score(cases: Sequence[Sample], replies: Sequence[xtml.Reply]) -> dict[str, Any]:
    """Counts of right answers and of cases: per skill and mode, per group, and for all."""
    tables: dict[str, dict[str, list[bool]]] = {
        "skills": collections.defaultdict(list),
        "groups": collections.defaultdict(list),
    }
    for case, reply in zip(cases, replies, strict=True):
        right = sampling.is_right(case, reply)
        tables["skills"][f"{case.skill} ({case.thinking})"].append(right)
        for group in _groups_of(case):
            tables["groups"][group].append(right)
    return {
        name: {
            key: {"right": sum(marks), "cases": len(marks), "share": sum(marks) / len(marks)}
            for key, marks in table.items()
        }
        for name, table in tables.items()
    }


def tabulate_drafts(cases: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, Any]:
    """Steps, mean acceptance length and acceptance by position: per skill, per group, for all."""
    tables: dict[str, dict[str, list[Tally]]] = {
        "skills": collections.defaultdict(list),
        "groups": collections.defaultdict(list),
    }
    for case, answer in zip(cases, answers, strict=True):
        if answer.tally:
            tables["skills"][case.skill].append(answer.tally)
            for group in _groups_of(case):
                tables["groups"][group].append(answer.tally)
    result: dict[str, Any] = {}
    for name, table in tables.items():
        totals = {key: Tally.total(tallies) for key, tallies in table.items()}
        result[name] = {
            key: {"steps": total.steps, "length": total.length, "rates": total.rates}
            for key, total in totals.items()
        }
    return result


def _totals_last(rows: dict[str, Any]) -> list[tuple[str, Any]]:
    """The rows as they come, then those over all groups: by mode, then the sum."""
    return sorted(rows.items(), key=lambda item: (item[0].startswith("ALL"), item[0] == "ALL"))


def print_drafts(result: dict[str, Any], temperature: float) -> None:
    for title in ("skills", "groups"):
        print(f"\n{title}: tokens per target step at temperature {temperature:g}, and the share of")
        print("steps that accepted the draft at each position")
        for key, row in _totals_last(result[title]):
            rates = " ".join(f"{rate:.2f}" for rate in row["rates"])
            print(f"  {key:28s} {row['length']:5.2f}  {row['steps']:6d} steps  {rates}")


def print_table(result: dict[str, Any]) -> None:
    for title in ("skills", "groups"):
        print(f"\n{title}")
        for key, row in _totals_last(result[title]):
            print(f"  {key:28s} {row['share']:.3f}  {row['right']:4d} of {row['cases']:4d}")


def print_failures(cases: Sequence[Sample], replies: Sequence[xtml.Reply], count: int) -> None:
    pairs = [p for p in zip(cases, replies, strict=True) if not sampling.is_right(*p)]
    random.Random(1).shuffle(pairs)
    for case, reply in pairs[:count]:
        prompt = [m.content for m in case.messages if m.role == "user"][-1]
        wanted = case.must or case.answer.calls or case.answer.content
        got = reply.calls or reply.text
        print(f"\nwrong: {case.skill} ({case.thinking})  {prompt!r}")
        print(f"  wanted {wanted!r}\n  got    {got!r}  think {reply.think!r}")


def report(folder: Path, per_skill: int = 12, draft: Path | None = None) -> None:
    """Evaluates a checkpoint folder and prints the tables."""
    evaluate(CheckpointBackend(folder, draft), build_cases(per_skill, ("off", "max")), (0.0, 1.0))


def evaluate(
    backend: Backend, cases: Sequence[Sample], temperatures: Sequence[float], failures: int = 0
) -> dict[str, Any]:
    """Asks all cases at each temperature; prints and returns the tables. Only greedy answers are
    graded."""
    result: dict[str, Any] = {"acceptance": {}}
    for temperature in temperatures:
        answers = backend.answer(cases, temperature)
        if temperature == 0:
            replies = [answer.reply for answer in answers]
            result |= score(cases, replies)
            print_failures(cases, replies, failures)
            print_table(result)
        if any(answer.tally for answer in answers):
            drafts = tabulate_drafts(cases, answers)
            result["acceptance"][f"temperature {temperature:g}"] = drafts
            print_drafts(drafts, temperature)
        elif temperature:
            print(f"\nno drafts at temperature {temperature:g}: nothing to report")
    return result


def main() -> None:
    args = _parse()
    cases = build_cases(args.per_skill, args.thinking, args.groups)
    if args.base_url:
        backend: Backend = ServerBackend(args.base_url, args.model, args.concurrency)
    else:
        backend = CheckpointBackend(args.checkpoint, args.draft, args.drafts)
    result = evaluate(backend, cases, args.temperatures, args.failures)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_nano.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    groups = list(dict.fromkeys(map(sampling.group_of, sampling.skill_names())))
    add("--base-url", help="a running server, e.g. http://127.0.0.1:8000")
    add(
        "--checkpoint",
        type=Path,
        default=Path("k3serve/assets/nano"),
        help="else: this folder [%(default)s]",
    )
    add("--draft", type=Path, help="its draft [CHECKPOINT/draft, where there is one]")
    add("--drafts", type=int, default=7, help="drafts per step, for --checkpoint [7]")
    add("--model", help="model name in requests to the server [its default model]")
    add("--per-skill", type=int, default=12, help="cases per skill and thinking mode [12]")
    add("--thinking", type=_modes, default=("off", "max"), metavar="MODE,MODE",
        help="modes to test: off, on, low, high, max [off,max]")  # fmt: skip
    add("--temperatures", type=_floats, default=(0.0,), metavar="0,1", help="0 grades the answers; "
        "all report acceptance [0]")  # fmt: skip
    add("--concurrency", type=int, default=8, help="requests at a time to the server [8]")
    add("--groups", nargs="+", default=(), choices=groups, metavar="GROUP", help="only these: "
        + ", ".join(groups))  # fmt: skip
    add("--failures", type=int, default=0, help="print this many wrong answers [0]")
    add("--json", type=Path, help="write the result here")
    return parser.parse_args()


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _modes(text: str) -> tuple[Thinking, ...]:
    modes = tuple(part.strip() for part in text.split(","))
    known = get_args(Thinking)
    if unknown := [mode for mode in modes if mode not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: use {', '.join(known)}")
    return cast(tuple[Thinking, ...], modes)


if __name__ == "__main__":
    main()
