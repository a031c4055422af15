"""Command line. `python -m k3serve` serves K3-nano; `... VERB --help` teaches the rest.

Rule: only parsing and dispatch here; JAX is imported by the verbs, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    VERSION = metadata.version("k3serve")
    from k3serve.errors import CheckpointError, ConfigError, HostFailure, RequestError
    from k3serve.settings import ACCEPTANCE, DTYPES, EXPERT_FORMATS, FRONTS, NANO, ServeConfig
except ModuleNotFoundError as error:
    print(
        f"k3serve: {sys.executable} lacks what k3serve needs ({error}): write `sh launch/local.sh` "
        "in place of `python -m k3serve`, or first `pip install -e '.[serve]'`",
        file=sys.stderr,
    )
    sys.exit(2)

VERBS = ("serve", "score", "chat")
API_KEYS = "K3SERVE_API_KEYS"  # the environment variable

SERVE_HELP = """\
Serves one model over an OpenAI-compatible HTTP API.

  python -m k3serve                                 K3-nano on http://127.0.0.1:8000
  python -m k3serve --checkpoint DIR --port 9000    a checkpoint in the Hugging Face layout
  python -m k3serve --hosts 2                       two hosts in lockstep on this machine

On a TPU pod run the same command on every host: the hosts find each other. Elsewhere start each
with --coordinator HOST0:PORT --num-hosts N --host-id I. Host 0 speaks HTTP; stop it with Ctrl-C or
SIGTERM: it finishes what runs (--drain-timeout), then every host ends.
"""

SCORE_HELP = """\
Scores token sequences offline: for each line of --input, {"tokens": [...]} or {"text": "..."},
the log-probability of every token given those before it (entry 0 is NaN) and the best next token.
In texts a special string such as [EOS] is its single token, as in prompts of /v1/completions.

Writes an .npz with logprobs_<i> [len] f32 and greedy_<i> [len] i32 per line; with --logits also
logits_<i> [len, vocab] f32, with --top N top_ids_<i> and top_logprobs_<i> [len, N].
"""

CHAT_HELP = """\
Talks to a running server. With a PROMPT it prints the answer and ends; without, it converses.

  python -m k3serve chat                                 a conversation; /help lists its commands
  python -m k3serve chat "What is the capital of France?"
  python -m k3serve chat --no-think "Tell me a joke" > joke.txt       only the answer is piped

After each answer it says how many tokens came, how fast (all tokens by the whole time), and, where
the server drafts, the mean tokens of a decode step and how many drafts were accepted by position.
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in (*VERBS, "-h", "--help", "--version"):
        arguments.insert(0, "serve")
    try:
        options = _parse(arguments)
        verb = options.pop("verb")
        return {"serve": _serve, "score": _score, "chat": _chat}[verb](options)
    except (ConfigError, CheckpointError, RequestError) as error:
        print(f"k3serve: {error}", file=sys.stderr)
        return 2
    except HostFailure as error:
        print(f"k3serve: host failure: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _serve(options: dict[str, Any]) -> int:
    options["api_keys"] = options["api_keys"] or _names_of(os.environ.get(API_KEYS, ""))
    config = ServeConfig(**options)
    from k3serve.local_hosts import is_child, run_hosts

    local = config.hosts or 1
    if local > 1:
        from k3serve.api.server import check_address

        check_address(config.host, config.port)
    if config.has_front() and not is_child():
        from k3serve.front.run import run

        return run(config, _own_flags())
    if local > 1:
        return run_hosts(local, _own_flags())
    from k3serve.app import serve

    return serve(config)


def serve_config(flags: Sequence[str]) -> ServeConfig:
    """The settings of `serve` with these flags, for what measures the engine without serving."""
    options = _parse(["serve", *flags])
    del options["verb"]
    return ServeConfig(**options)


def _own_flags() -> list[str]:
    """This process's flags without --hosts, for the hosts it starts."""
    flags, skip = [], False
    for word in sys.argv[1:]:
        if skip or word.startswith("--hosts="):
            skip = False
        elif word == "--hosts":
            skip = True
        else:
            flags.append(word)
    return flags


def _score(options: dict[str, Any]) -> int:
    from k3serve.score_command import score

    return score(**options)


def _chat(options: dict[str, Any]) -> int:
    from k3serve.chat_command import ChatSettings, chat

    keys = _names_of(os.environ.get(API_KEYS, ""))
    options["api_key"] = options["api_key"] or (keys[0] if keys else None)
    return chat(options.pop("prompt"), ChatSettings(**options))


def _parse(arguments: list[str]) -> dict[str, Any]:
    parsed, unknown = _parser().parse_known_args(arguments)
    options = vars(parsed)
    usage = options.pop("usage")()
    if unknown:
        word = unknown[0].partition("=")[0]
        close = get_close_matches(word, [*VERBS, *re.findall(r"--[a-z-]+", usage)], n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"{word}: {options['verb']} knows no such flag or word; {meant}"
            f"`python -m k3serve {options['verb']} --help` lists all"
        )
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m k3serve",
        description="Serve, score or chat with a Kimi K3 family model. Without a VERB: serve.",
        epilog="The flags of a verb: python -m k3serve VERB --help",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_serve(verbs)
    _add_score(verbs)
    _add_chat(verbs)
    return parser


def _add_serve(verbs: Any) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    serve = verbs.add_parser(
        "serve", help="serve a model (the default)", description=SERVE_HELP, formatter_class=raw
    )
    serve.set_defaults(usage=serve.format_usage)
    d = ServeConfig()

    def add(group: Any, name: str, kind: Any, metavar: str, text: str, **more: Any) -> None:
        key = more.pop("dest", name.replace("-", "_"))
        default = getattr(d, key)
        shown = "" if default is None or default == () else f" [{default}]"
        group.add_argument(
            f"--{name}", dest=key, type=kind, metavar=metavar, default=default, help=text + shown,
            **more,
        )  # fmt: skip

    serve.add_argument(
        "--checkpoint", type=Path, default=NANO, metavar="DIR",
        help="folder in the Hugging Face layout [the built-in K3-nano]",
    )  # fmt: skip
    http = serve.add_argument_group("HTTP (host 0)")
    add(http, "host", str, "ADDR", "address to listen on; 0.0.0.0 for all")
    add(http, "port", int, "N", "port to listen on; 0 picks a free one")
    add(http, "served-model-name", _names, "A[,B]", "names clients may use; the first is reported",
        dest="served_model_names", action=_Collect)  # fmt: skip
    add(http, "api-key", _names, "K[,L]",
        f"keys clients must send; better put in {API_KEYS}, which ps does not show",
        dest="api_keys", action=_Collect)  # fmt: skip
    add(http, "allowed-origin", _names, "O[,P]", "CORS origins allowed (off without)",
        dest="allowed_origins", action=_Collect)  # fmt: skip
    add(http, "max-body-mib", int, "N", "largest request body")
    add(http, "body-memory-mib", int, "N", "memory for all bodies together, estimated; beyond, 503")
    add(http, "max-connections", int, "N", "connections open at once; beyond, idle ones are closed")
    add(http, "request-timeout", float, "S", "most time of a request, from the queue to its last "
        "token; 0: no limit", dest="request_timeout_s")  # fmt: skip

    add(http, "front", str, "FORM", "process: HTTP outlives the engine and is off its interpreter; "
        "thread: both in one process", choices=FRONTS)  # fmt: skip
    http.add_argument("--restart", action="store_true",
                      help="start the hosts again when one failed; HTTP answers 503 meanwhile. "
                      "Say so on every host")  # fmt: skip
    http.add_argument("--resume", action="store_true",
                      help="with --restart: open requests go on where they stopped")  # fmt: skip

    engine = serve.add_argument_group("engine (equal on all hosts)")
    add(engine, "max-slots", int, "N", "sequences that run at once")
    add(engine, "context", int, "N", "most tokens of prompt plus answer [the model's, up to 8192]")
    add(engine, "page-tokens", int, "C", "tokens of a prefill page")
    add(engine, "pages-per-tick", int, "P", "prefill pages in one tick")
    add(engine, "steps-per-tick", int, "T", "decode steps in one tick")
    add(engine, "max-queue", int, "N", "requests that may wait; more get 429")
    add(
        engine,
        "prefix-cache-mib",
        int,
        "MIB",
        "memory on each rank for prompts that begin alike "
        "(64 on CPU, else 1024); 0: compute every prompt anew",
    )
    add(engine, "dtype", str, "TYPE", f"{', '.join(DTYPES)}; auto: float32 on CPU", choices=DTYPES)
    add(engine, "experts", str, "FORM", "dense, packed (MXFP4 in memory), auto: dense on CPU",
        choices=EXPERT_FORMATS)  # fmt: skip
    add(engine, "tick-timeout", float, "S", "a tick slower than this is a host failure",
        dest="tick_timeout_s")  # fmt: skip
    add(engine, "drain-timeout", float, "S", "time for running requests when asked to stop",
        dest="drain_timeout_s")  # fmt: skip
    engine.add_argument("--allow-reserved", action="store_true",
                        help="let unnamed reserved tokens be sampled")  # fmt: skip
    engine.add_argument("--sync", action="store_true",
                        help="plan, run, read without overlap: for debugging")  # fmt: skip

    drafting = serve.add_argument_group("drafts (equal on all hosts)")
    add(drafting, "draft", str, "DIR", "folder of a DSpark draft in the speculators layout; none: "
        "no drafts; auto: the checkpoint's folder draft, if there")  # fmt: skip
    add(drafting, "rows", int, "R", "rows that a step verifies at most, anchor included; 1 builds "
        "a server for models without a draft [8 with a draft, else 1]")  # fmt: skip
    add(drafting, "acceptance", str, "RULE", "how drawn tokens accept drafts, by the model's own "
        "distribution: coupled gives the very tokens of decoding without drafts; block and token "
        "let the draft draw, too; onehot takes its best token", choices=ACCEPTANCE)  # fmt: skip
    add(drafting, "markov-top", int, "M",
        "let the Markov head correct the M best draft logits only [all]")  # fmt: skip
    add(drafting, "tile-slots", int, "G", "slots computed in one go [all; on CPU 2]")

    hosts = serve.add_argument_group("hosts and ranks")
    add(hosts, "hosts", int, "N", "start N hosts on this machine")
    add(hosts, "ranks", int, "N", "devices a host uses [all; on CPU 1]")
    add(hosts, "coordinator", str, "HOST:PORT", "where host 0 meets the others")
    add(hosts, "num-hosts", int, "N", "how many hosts take part")
    add(hosts, "host-id", int, "I", "which of them this is, from 0")
    add(hosts, "connect-timeout", int, "S", "how long a start may wait for another host",
        dest="connect_timeout_s")  # fmt: skip


def _add_score(verbs: Any) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    score = verbs.add_parser(
        "score", help="score sequences offline", description=SCORE_HELP, formatter_class=raw
    )
    score.set_defaults(usage=score.format_usage)
    score.add_argument("--checkpoint", type=Path, default=NANO, metavar="DIR",
                       help="folder in the Hugging Face layout [the built-in K3-nano]")  # fmt: skip
    score.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl")
    score.add_argument("--output", type=Path, required=True, metavar="FILE.npz")
    score.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: float32 on CPU")
    score.add_argument("--logits", action="store_true", help="write whole rows of logits")
    score.add_argument("--top", type=int, default=0, metavar="N", help="best N tokens per position")
    score.add_argument("--ranks", type=int, default=None, metavar="N", help="devices to use")


def _add_chat(verbs: Any) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    chat = verbs.add_parser(
        "chat", help="talk to a running server", description=CHAT_HELP, formatter_class=raw
    )
    chat.set_defaults(usage=chat.format_usage)
    chat.add_argument("prompt", nargs="*", metavar="PROMPT", help="ask this, print the answer, end")
    here = "http://127.0.0.1:8000"
    chat.add_argument("--url", default=here, metavar="URL", help="where it is [%(default)s]")
    chat.add_argument("--model", metavar="NAME", help="[the server's first]")
    chat.add_argument("--temperature", type=float, default=0.0, metavar="T",
                      help="0 to 2; 0 takes the likeliest tokens [%(default)s]")  # fmt: skip
    chat.add_argument("--max-tokens", type=int, metavar="N", help="[what the context leaves]")
    chat.add_argument("--system", metavar="TEXT", help="a system message before all else")
    chat.add_argument("--no-think", dest="thinking", action="store_false",
                      help="answer without reasoning first")  # fmt: skip
    chat.add_argument("--no-speculate", dest="speculate", action="store_false",
                      help="answer without drafts; only the speed may differ")  # fmt: skip
    chat.add_argument("--api-key", metavar="KEY",
                      help=f"better put in {API_KEYS}, which ps does not show")  # fmt: skip


class _Collect(argparse.Action):
    """Names of a flag that may be given several times: none of them is lost."""

    def __call__(
        self, parser: object, namespace: Any, values: Any, option_string: object = None
    ) -> None:
        given = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (*given, *(v for v in values if v not in given)))


def _names_of(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _names(text: str) -> tuple[str, ...]:
    names = _names_of(text)
    if not names:
        raise argparse.ArgumentTypeError("must hold at least one name")
    return names


if __name__ == "__main__":
    sys.exit(main())
