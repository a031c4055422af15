"""How fast a prompt is read: in pages, row by row, and in one plain batched forward pass.

    python scripts/bench_prefill.py [--checkpoint DIR] [--tokens 2048] [--rounds 5]

Pages: one request through scheduler, plan, tick and result, from its arrival to its first token.
Row by row: the decode program's single row, once for each token, in a loop on the device. Batched:
all tokens go through each layer at once, attention is dense, nothing is cached; only the delta
rule's chunks follow one another. No form can do with less arithmetic than that.
Rule: one process, the same weights; the forms take turns in every round and medians are compared.
Without --checkpoint a random one is made (scripts/random_model.py). Run it when nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def build(checkpoint: Path, options: argparse.Namespace) -> Any:
    """An engine of one row, so that its state serves the rows program too."""
    from k3serve.settings import ServeConfig
    from k3serve.startup import build_engine

    page = options.page_tokens
    changes = {} if page is None else {"page_tokens": page}
    if options.pages_per_tick is not None:
        changes["pages_per_tick"] = options.pages_per_tick
    config = ServeConfig(checkpoint=checkpoint, rows=1, draft="none", max_slots=4,
                         allow_reserved=True, **changes)  # fmt: skip
    return build_engine(config)


def paged(engine: Any) -> Callable[[list[int]], int]:
    """The prompt's first token, by the scheduler and the tick program."""
    from k3serve.lockstep.bare import BareLoop
    from k3serve.types import Request, Sampling

    loop = BareLoop(engine, engine.shape)
    settings = Sampling(max_tokens=1, temperature=0.0)

    def run(prompt: list[int]) -> int:
        events = list(loop.run([Request(0, tuple(prompt), settings)]))
        return int(events[-1].tokens[-1])

    return run


def by_rows(engine: Any) -> Callable[[list[int]], int]:
    """The same by rows: a loop of decode steps of one slot, whose tokens are given."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import PartitionSpec as P

    from k3serve.model import decode_rows, head_logits, init_state, state_specs

    config, shape = engine.config, engine.shape
    pages = shape.pages_per_slot

    def all_rows(weights: Any, state: Any, prompt: Any) -> Any:
        table = jnp.arange(pages)[None]

        def row(i: Any, carry: Any) -> Any:
            state, _ = carry
            hidden, state = decode_rows(config, weights, state, prompt[i][None, None], i[None],
                                        jnp.ones(1, bool), table)  # fmt: skip
            return state, hidden[0]

        empty = jnp.zeros((1, config.hidden_size), weights.embed.dtype)
        state, hidden = lax.fori_loop(0, prompt.shape[0], row, (state, empty))
        return jnp.argmax(head_logits(config, weights, hidden)[0]), state

    specs = state_specs(config)
    program = compiled(engine, all_rows, (specs, P()), (P(), specs))
    state = init_state(
        config,
        engine.mesh,
        slots=1,
        num_pages=pages,
        page_tokens=shape.page_tokens,
        dtype=jax.dtypes.canonicalize_dtype("float32"),
    )

    def run(prompt: list[int]) -> int:
        nonlocal state
        first, state = program(engine.weights.target, state, np.asarray(prompt, np.int32))
        return int(first)

    return run


def batched(engine: Any) -> Callable[[list[int]], int]:
    """The same by one forward pass over all tokens."""
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from k3serve.model import head_logits
    from k3serve.model.state import State
    from k3serve.model.target import run_layers

    config = engine.config

    def mixer(index: int, layer: Any, x: Any, _: Any) -> Any:
        mix = kda_forward if config.is_kda(index) else mla_forward
        return mix(config, layer.attn, x), None

    def forward(weights: Any, prompt: Any) -> Any:
        nothing = State(layers=(None,) * config.num_layers)
        live = jnp.ones(prompt.shape, bool)
        hidden, _ = run_layers(config, weights, nothing, prompt, live, mixer, None)
        return jnp.argmax(head_logits(config, weights, hidden[-1:])[0])

    program = compiled(engine, forward, (P(),), P())
    return lambda prompt: int(program(engine.weights.target, np.asarray(prompt, np.int32)))


def kda_forward(config: Any, w: Any, x: Any) -> Any:
    import jax.numpy as jnp

    from k3serve.model import kda

    size = x.shape[0]
    u = kda.project(w, x)
    window = jnp.concatenate([jnp.zeros((config.conv_width - 1, *u.shape[1:]), u.dtype), u])
    live = jnp.ones(size, bool)
    rows = kda.prepare(config, w, x, kda.convolve(window, w.conv), live)
    k = config.kda_head_dim
    _, o = kda.chunks(jnp.zeros((w.a_log.shape[0], k, k)), rows)
    return kda.finish(config, w, x, o)


def mla_forward(config: Any, w: Any, x: Any) -> Any:
    import jax
    import jax.numpy as jnp

    from k3serve.model import mla
    from k3serve.model.ops import einsum_f32

    size, latent = x.shape[0], config.kv_lora_rank
    rows = mla.latent_rows(config, w, x)
    keys = einsum_f32("cl,hkl->hck", rows[:, :latent], w.k_up)
    values = einsum_f32("cl,hlv->hcv", rows[:, :latent], w.v_up)
    q, q_rope = mla.queries(config, w, x)
    shared = rows[:, latent : latent + config.rope_dim]
    scores = einsum_f32("thk,hck->htc", q, keys) + einsum_f32("thr,cr->htc", q_rope, shared)
    seen = jnp.tril(jnp.ones((size, size), bool))
    p = jax.nn.softmax(jnp.where(seen, scores * mla.scale(config), -jnp.inf), axis=-1)
    return mla.finish(w, x, einsum_f32("htc,hcv->thv", p, values))


def compiled(engine: Any, function: Any, in_specs: Any, out_specs: Any) -> Any:
    import jax

    weight_specs = jax.tree.map(lambda a: a.sharding.spec, engine.weights.target)
    mapped = jax.shard_map(function, mesh=engine.mesh, in_specs=(weight_specs, *in_specs),
                           out_specs=out_specs, check_vma=False)  # fmt: skip
    return jax.jit(mapped, donate_argnums=1 if len(in_specs) == 2 else ())


def measure(checkpoint: Path, options: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    engine = build(checkpoint, options)
    forms = {"pages": paged(engine), "batched": batched(engine), "rows": by_rows(engine)}
    if options.skip_rows:
        del forms["rows"]
    random = np.random.default_rng(3)
    times: dict[str, list[float]] = {name: [] for name in forms}
    agreed = 0
    for number in range(options.rounds + 1):  # the first one warms up
        prompt = random.integers(0, min(8000, engine.config.vocab_size), options.tokens).tolist()
        firsts = {}
        for name, run in forms.items():
            started = time.perf_counter()
            firsts[name] = run(prompt)
            if number:
                times[name].append(time.perf_counter() - started)
        agreed += len(set(firsts.values())) == 1
    speeds = {name: options.tokens / statistics.median(t) for name, t in times.items()}
    shape = engine.shape
    return {
        "tokens": options.tokens,
        "page_tokens": shape.page_tokens,
        "pages_per_tick": shape.pages_per_tick,
        "tokens_per_s": speeds,
        "against_rows": speeds["pages"] / speeds["rows"] if "rows" in speeds else None,
        "against_batched": speeds["pages"] / speeds["batched"],
        "same_first_token": f"{agreed} of {options.rounds + 1}",
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="[a random one]")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="[2048]")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="[5]")
    parser.add_argument("--page-tokens", type=int, metavar="C", help="[the server's default]")
    parser.add_argument("--pages-per-tick", type=int, metavar="P", help="[the server's default]")
    parser.add_argument("--skip-rows", action="store_true", help="the slowest form is left out")
    options = parser.parse_args()
    if options.tokens % 64:
        parser.error(f"--tokens {options.tokens}: must be a multiple of 64")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint
        if checkpoint is None:
            from scripts.random_model import write

            checkpoint = write(Path(folder))
        print(json.dumps(measure(checkpoint, options), indent=1))


if __name__ == "__main__":
    main()
