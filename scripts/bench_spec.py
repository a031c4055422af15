"""What drafts gain: tokens/s of K3-nano with drafts, without them in the same program, and on a
server built for one row; acceptance by position, rows verified, and the cost of a step's parts.

    python scripts/bench_spec.py [--prompts 96] [--rounds 3] [--json FILE] [--plot docs/spec.svg]

The work is answering held-out chats of K3-nano's curriculum, one at a time and eight at a time, by
the scheduler and the tick program without HTTP. Decoding is timed: the ticks without a page of a
prompt, from plan to result. Each round measures every form, one after the other in this process;
medians of the rounds are compared. Run it when nothing else runs.
Rule: all forms answer the same prompts and must give the same tokens, which is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MAX_TOKENS = 192
STREAMS = (1, 8)
PART_STEPS = 200


@dataclass
class Form:
    """A way to decode: a server's loop, and whether requests ask for drafts."""

    name: str
    loop: Any
    speculate: bool


def build(**changes: Any) -> Any:
    from k3serve.lockstep.bare import BareLoop
    from k3serve.settings import ServeConfig
    from k3serve.startup import build_engine

    engine = build_engine(ServeConfig(**changes))
    return BareLoop(engine, engine.shape)


def chats(count: int) -> list[tuple[int, ...]]:
    """Held-out prompts, from every skill and thinking mode in turn."""
    from k3serve.settings import NANO
    from scripts.train_nano import evaluate, xtml
    from scripts.train_nano.tokenizer import Tokenizer

    tokens = Tokenizer(NANO / "tiktoken.model")
    cases = evaluate.build_cases(max(1, count // 40), ("off", "max"))
    return [
        tuple(tokens.encode_fragments(xtml.render(case, prompt_only=True))[0])
        for case in evaluate.spread(cases, count)
    ]


# --------------------------------------------------------------------------------- throughput


def run(form: Form, prompts: list[tuple[int, ...]], streams: int, **sampling: Any) -> Any:
    """Answers the prompts, so many at a time: (tokens/s of the ticks that only decode, tokens by
    prompt, drafts of all)."""
    from k3serve.settings import NANO
    from k3serve.text.tokenizer import Tokenizer
    from k3serve.types import Request, Sampling

    ends = Tokenizer.load(NANO).eos_ids
    settings = Sampling(**({"max_tokens": MAX_TOKENS, "temperature": 0.0} | sampling),
                        stop_token_ids=ends, speculate=form.speculate)  # fmt: skip
    requests = [Request(i, p, settings) for i, p in enumerate(prompts)]
    tokens: dict[int, list[int]] = {r.id: [] for r in requests}
    drafts, seconds, decoded = [], 0.0, 0
    for start in range(0, len(requests), streams):
        for tick_s, in_pages, events in ticks(form.loop, requests[start : start + streams]):
            for event in events:
                tokens[event.request_id] += event.tokens
                drafts += [event.drafts] if event.drafts is not None else []
            if not in_pages:
                seconds += tick_s
                decoded += sum(len(event.tokens) for event in events)
    return decoded / seconds, tokens, drafts


def ticks(loop: Any, requests: list[Any]) -> Iterator[tuple[float, bool, list[Any]]]:
    """(seconds, whether pages ran, events) of each tick, one after the other."""
    from k3serve.lockstep.plan import pack, unpack_result
    from k3serve.scheduler.scheduler import Scheduler

    device = loop._device
    scheduler = Scheduler(device.shape, len(requests))
    for request in requests:
        scheduler.add(request)
    while not scheduler.idle:
        started = time.perf_counter()
        plan = scheduler.plan(loop.tick)
        loop.tick += 1
        vector = device.read(device.dispatch(pack(plan, device.shape)))
        events = scheduler.commit(plan, unpack_result(vector, device.shape))
        yield time.perf_counter() - started, bool(plan.pages), events


def totals(drafts: list[Any]) -> dict[str, Any]:
    columns = range(len(drafts[0].offered))
    steps = sum(d.steps for d in drafts)
    offered = [sum(d.offered[i] for d in drafts) for i in columns]
    accepted = [sum(d.accepted[i] for d in drafts) for i in columns]
    return {
        "steps": steps,
        "rows_per_step": 1 + sum(offered) / steps,
        "acceptance_length": 1 + sum(accepted) / steps,
        "of_all_steps": [a / steps for a in accepted],
        "of_offered": [a / o if o else 0.0 for a, o in zip(accepted, offered, strict=True)],
    }


# ------------------------------------------------------------------------------- parts of a step


def parts(loop: Any) -> dict[str, float]:
    """Milliseconds of each part of a step with one busy slot: loops of the part alone, on the
    engine's own weights and state."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import PartitionSpec as P

    from k3serve.model.state import tile_of
    from k3serve.model.target import decode_rows, head_logits
    from k3serve.runtime.decode import Decoder, Drafts, Running

    engine = loop._device
    shape, config = engine.shape, engine.config
    decoder = Decoder(config, shape, engine.speculation)
    tile, rows = shape.tile, shape.rows
    specs = engine._specs(config)
    weight_specs = jax.tree.map(lambda a: a.sharding.spec, engine.weights)

    def busy(table: Any, anchor: Any) -> Any:
        one = jnp.arange(shape.max_slots) == 0
        return table.replace(
            active=one, speculate=one, max_tokens=jnp.where(one, 4000, 0),
            prompt_len=jnp.where(one, 100, 0), produced=jnp.where(one, 1, 0),
            anchor=jnp.where(one, anchor, 0), level=jnp.where(one, 16 * rows, 0),
            rows=table.rows.replace(temperature=jnp.zeros(shape.max_slots)),
        )  # fmt: skip

    def repeat(one: Callable[..., Any]) -> float:
        """one(weights, allowed, running) -> (running, a number that depends on all)."""

        def loop_of(weights: Any, allowed: Any, state: Any) -> Any:
            from k3serve.runtime.tick import _Tick

            emitted = _Tick(config, shape, engine.speculation)._nothing()
            running = Running(model=state.model, ring=state.ring,
                              table=busy(state.table, 60), emitted=emitted)  # fmt: skip

            def body(_: Any, carry: Any) -> Any:
                running, total = carry
                # another anchor each time, or the compiler would do the work once for all
                table = busy(running.table, 60 + (total.astype(jnp.int32) & 7))
                running, more = one(weights, allowed, running.replace(table=table))
                return running, total + more

            return lax.fori_loop(0, PART_STEPS, body, (running, jnp.float32(0)))[1]

        mapped = jax.shard_map(loop_of, mesh=engine.mesh, in_specs=(weight_specs, P(), specs),
                               out_specs=P(), check_vma=False)  # fmt: skip
        program = jax.jit(mapped).lower(engine.weights, engine.allowed, engine.state).compile()
        program(engine.weights, engine.allowed, engine.state).block_until_ready()
        times = []
        for _ in range(5):
            started = time.perf_counter()
            program(engine.weights, engine.allowed, engine.state).block_until_ready()
            times.append(time.perf_counter() - started)
        return statistics.median(times) / PART_STEPS * 1000

    def draft(weights: Any, allowed: Any, running: Any) -> Any:
        tile_table = tile_of(running.table, 0, tile)
        found = decoder._draft(weights, allowed, running.ring, tile_table, jnp.int32(0))
        return running, found.tokens.sum().astype(jnp.float32)

    def verify(weights: Any, allowed: Any, running: Any) -> Any:
        view = tile_of(running.table, 0, tile)
        guesses = jnp.broadcast_to(jnp.arange(70, 70 + rows - 1), (tile, rows - 1))
        tokens = jnp.concatenate([view.anchor[:, None], guesses], axis=1)
        counts = jnp.where(view.active, rows, 0)
        hidden, model = decode_rows(config, weights.target, running.model, tokens, view.positions,
                                    counts, view.page_table, 0)  # fmt: skip
        logits = head_logits(config, weights.target, hidden.reshape(tile * rows, -1))
        return running.replace(model=model), logits.sum()

    def accept(weights: Any, allowed: Any, running: Any) -> Any:
        view = tile_of(running.table, 0, tile)
        guesses = jnp.broadcast_to(view.anchor[:, None], (tile, rows - 1))
        drafts = Drafts(tokens=guesses, offered=jnp.full(tile, rows - 1), logits=None)
        logits = jnp.sin(jnp.arange(tile * rows * config.vocab_size) + view.anchor[0])
        logits = logits.reshape(tile, rows, -1)
        tokens, accepted = decoder._accept(view, logits, drafts, allowed)
        running = decoder._commit(running, view, logits, drafts, tokens, accepted, jnp.int32(0))
        return running, tokens.sum().astype(jnp.float32)

    def whole(weights: Any, allowed: Any, running: Any) -> Any:
        running = decoder.step(weights, allowed, running)
        return running, running.emitted.tokens.sum().astype(jnp.float32)

    return {
        "draft": repeat(draft),
        "verify": repeat(verify),
        "accept and commit": repeat(accept),
        "whole step": repeat(whole),
    }


# ---------------------------------------------------------------------------------------- report


def measure(options: argparse.Namespace) -> dict[str, Any]:
    drafting, one_row = build(), build(rows=1)
    assert drafting._device.shape.rows > 1, "the built-in model has no draft"
    forms = [
        Form("drafts", drafting, True),
        Form("none, same program", drafting, False),
        Form("--rows 1", one_row, False),
    ]
    prompts = chats(options.prompts)
    for form in forms:
        run(form, prompts[:4], 1)
    speeds: dict[str, dict[str, list[float]]] = {
        str(n): {f.name: [] for f in forms} for n in STREAMS
    }
    drafts: list[Any] = []
    differing = 0
    for number in range(options.rounds):
        for streams in STREAMS:
            answers = {}
            for form in forms:
                speed, answers[form.name], found = run(form, prompts, streams)
                speeds[str(streams)][form.name].append(speed)
                drafts = found if form.speculate and streams == 1 else drafts
            assert answers["drafts"] == answers["none, same program"]
            differing = sum(
                answers["drafts"][i] != answers["--rows 1"][i] for i in range(len(prompts))
            )
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    sampled = run(forms[0], prompts, 8, temperature=1.0, seed=7)[2]
    return {
        "tokens_per_s": {
            n: {k: statistics.median(v) for k, v in by_form.items()}
            for n, by_form in speeds.items()
        },
        "prompts": len(prompts),
        "answers_that_differ_on_one_row": differing,
        "greedy": totals(drafts),
        "temperature_1": totals(sampled),
        "parts_ms": parts(drafting),
    }


def report(result: dict[str, Any]) -> None:
    print(f"| tokens/s, {result['prompts']} chats, {os.cpu_count()} cores | drafts | same program,"
          " none | ratio | `--rows 1` | ratio |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for streams, by_form in result["tokens_per_s"].items():
        a, b, c = by_form.values()
        print(
            f"| {streams} stream(s) | {a:,.0f} | {b:,.0f} | {a / b:.2f} | {c:,.0f} | {a / c:.2f} |"
        )
    for name in ("greedy", "temperature_1"):
        t = result[name]
        shares = " ".join(f"{x:.2f}" for x in t["of_all_steps"])
        print(f"\n{name}: acceptance length {t['acceptance_length']:.2f}, rows verified "
              f"{t['rows_per_step']:.2f} a step, accepted by position {shares}")  # fmt: skip
    print(
        "\nparts of a step, ms:", ", ".join(f"{k} {v:.3f}" for k, v in result["parts_ms"].items())
    )
    print(f"\nanswers that round otherwise on one row: {result['answers_that_differ_on_one_row']}")


def plot(result: dict[str, Any], path: Path) -> None:
    """Two bar charts as an SVG: tokens/s by form, and how often each position is accepted."""
    speeds, shares = result["tokens_per_s"], result["greedy"]["of_all_steps"]
    colours = ("#2b6cb0", "#a0aec0", "#ed8936")
    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="720" height="260" '
           'font-family="sans-serif" font-size="12">',
           '<rect width="720" height="260" fill="white"/>',
           '<text x="20" y="20" font-size="14">tokens/s (decoding)</text>',
           '<text x="420" y="20" font-size="14">steps that accept draft k</text>']  # fmt: skip
    for i, (streams, by_form) in enumerate(speeds.items()):
        top = max(by_form.values())
        for j, (name, value) in enumerate(by_form.items()):
            x, height = 30 + i * 190 + j * 55, 150 * value / top
            out.append(f'<rect x="{x}" y="{200 - height:.1f}" width="45" height="{height:.1f}" '
                       f'fill="{colours[j]}"><title>{name}</title></rect>')  # fmt: skip
            out.append(f'<text x="{x + 22}" y="{195 - height:.1f}" text-anchor="middle">'
                       f"{value:,.0f}</text>")  # fmt: skip
        out.append(f'<text x="{30 + i * 190 + 77}" y="218" text-anchor="middle">'
                   f"{streams} stream(s)</text>")  # fmt: skip
    for j, name in enumerate(next(iter(speeds.values()))):
        out.append(f'<rect x="{30 + j * 130}" y="235" width="12" height="12" fill="{colours[j]}"/>'
                   f'<text x="{47 + j * 130}" y="245">{name}</text>')  # fmt: skip
    for k, share in enumerate(shares):
        x, height = 430 + k * 38, 150 * share
        out.append(f'<rect x="{x}" y="{200 - height:.1f}" width="28" height="{height:.1f}" '
                   f'fill="{colours[0]}"/>')  # fmt: skip
        out.append(f'<text x="{x + 14}" y="{195 - height:.1f}" text-anchor="middle">'
                   f"{share:.2f}</text>")  # fmt: skip
        out.append(f'<text x="{x + 14}" y="218" text-anchor="middle">{k + 1}</text>')
    path.write_text("\n".join([*out, "</svg>"]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=96, metavar="N", help="[96]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="[3]")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--plot", type=Path, help="write a chart there (SVG)")
    options = parser.parse_args()
    result = measure(options)
    report(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
