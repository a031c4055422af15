"""Loading: both layouts, all accepted forms, each rank its slice, and damage that is named."""

from __future__ import annotations

import json
import re
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import load_file, save_file

from k3serve.checkpoint.hf import Checkpoint
from k3serve.checkpoint.load import load
from k3serve.config import TargetConfig
from k3serve.errors import CheckpointError, ConfigError
from k3serve.model import weight_specs
from tests.checkpoint.files import DATA, copy, edit, edit_index, file_of

LAYER = "language_model.model.layers.1."
Q = f"{LAYER}self_attn.q_proj.weight"


def mesh(ranks=1):
    return Mesh(np.array(jax.devices()[:ranks]), ("rank",))


def loaded(folder, ranks=1, dtype=np.float32, expert_format="dense", progress=None):
    config = TargetConfig.from_dir(folder)
    return load(folder, config, mesh(ranks), dtype, expert_format, progress)


def same(a, b):
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(left) == len(right) and all(
        np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(left, right, strict=True)
    )


@pytest.fixture(scope="module")
def k3():
    return loaded(DATA / "k3_tiny")


def test_values_come_from_the_right_tensors(k3):
    tensors = load_file(DATA / "k3_tiny" / "model-00002-of-000013.safetensors")
    attn = k3.layers[1].attn
    for i, part in enumerate("qkv"):
        stored = tensors[f"{LAYER}self_attn.{part}_proj.weight"].astype(np.float32)
        assert np.array_equal(np.asarray(attn.qkv)[:, i], stored.T)
        conv = tensors[f"{LAYER}self_attn.{part}_conv1d.weight"][:, 0]
        assert np.array_equal(np.asarray(attn.conv)[:, i], conv.T)
    assert np.array_equal(attn.a_log, tensors[f"{LAYER}self_attn.A_log"][:4])
    score = tensors[f"{LAYER}mlp_res_norm.weight"].astype(np.float32)
    score = score * tensors[f"{LAYER}mlp_res_proj.weight"][0].astype(np.float32)
    assert np.array_equal(k3.layers[1].mlp_mix, score)
    assert k3.layers[0].attn_mix is None  # in the file, never used


@pytest.mark.parametrize("expert_format", ["dense", "packed"])
@pytest.mark.parametrize("name", ["k3_tiny", "kimi_linear_tiny"])
def test_ranks_hold_slices_of_the_same_arrays(name, expert_format):
    if name == "kimi_linear_tiny" and expert_format == "packed":
        with pytest.raises(ConfigError, match="expert_format='packed' needs"):
            loaded(DATA / name, expert_format="packed")
        return
    one = loaded(DATA / name, 1, expert_format=expert_format)
    four = loaded(DATA / name, 4, expert_format=expert_format)
    assert same(one, four)
    experts = four.layers[2].mlp.experts
    array = experts.gate_up if expert_format == "dense" else experts.gate_up_codes
    assert array.addressable_shards[3].data.shape[0] == array.shape[0] // 4
    assert four.embed.addressable_shards[1].data.shape[0] == four.embed.shape[0] // 4


def test_a_rank_reads_no_more_than_its_share(monkeypatch):
    """The host with ranks 2 and 3 of 4: count what is read of a split matrix and of the experts."""
    read, largest = {}, {}
    original = Checkpoint.read

    def spy(self, name, index=()):
        part = original(self, name, index)
        read[name] = read.get(name, 0) + part.nbytes
        largest[name] = max(largest.get(name, 0), part.nbytes)
        return part

    monkeypatch.setattr(Checkpoint, "read", spy)
    from k3serve.checkpoint import sources
    from k3serve.model.weights import layout

    config = TargetConfig.from_dir(DATA / "k3_tiny")
    checkpoint = Checkpoint.open(DATA / "k3_tiny", config)
    find = sources.readers(checkpoint, config)
    leaf = layout(config, 4, np.float32, "packed").layers[1].attn.qkv
    for rank in (2, 3):
        bounds = slice(rank * 32, (rank + 1) * 32)
        find(("layers", 1, "attn", "qkv"))((slice(0, leaf.shape[0]), slice(0, 3), bounds))
    assert read[Q] == 128 * 128 * 2 // 2 and largest[Q] == 128 * 128 * 2 // 4
    part = find(("layers", 1, "mlp", "experts", "gate_up_codes"))
    part((slice(8, 12), slice(0, 2), slice(0, 64), slice(0, 32)))
    touched = {int(n.split(".experts.")[1].split(".")[0]) for n in read if ".experts." in n}
    assert touched == {8, 9, 10, 11}


@pytest.mark.parametrize("expert_format", ["dense", "packed"])
def test_a_weight_is_put_together_beside_one_tensor_at_a_time(expert_format):
    from k3serve.checkpoint import sources

    config = TargetConfig.from_dir(DATA / "k3_tiny")
    find = sources.readers(Checkpoint.open(DATA / "k3_tiny", config), config)
    suffix = {"dense": "", "packed": "_codes"}[expert_format]
    read = find(("layers", 1, "mlp", "experts", f"gate_up{suffix}"))
    everything = (slice(0, config.num_experts), *[slice(None)] * 3)
    tracemalloc.start()
    try:
        part = read(everything)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert part.nbytes <= peak < 1.5 * part.nbytes  # a second copy of all experts would be 2


def test_single_file_layout_is_the_same(k3, tmp_path):
    folder = copy("k3_tiny", tmp_path)
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors")
    assert same(loaded(folder), k3)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 1, 4, 1), (128,)])
def test_forms_of_a_log(k3, tmp_path, shape):
    folder = copy("k3_tiny", tmp_path)
    name = f"{LAYER}self_attn.A_log"

    def reshape(tensors):
        numbers = tensors[name][:4]
        padded = np.zeros(int(np.prod(shape)), np.float32)
        padded[:4] = numbers
        tensors[name] = padded.reshape(shape)

    edit(folder, name, reshape)
    if shape == (4, 1):
        with pytest.raises(CheckpointError, match=re.escape(f"{name}: shape [4, 1]")):
            loaded(folder)
    else:
        assert same(loaded(folder), k3)


def test_a_log_padding_must_be_zero(tmp_path):
    folder = copy("k3_tiny", tmp_path)
    name = f"{LAYER}self_attn.A_log"
    edit(folder, name, lambda t: t.update({name: np.ones(8, np.float32)}))
    with pytest.raises(CheckpointError, match=f"{name}: 8 numbers .* expected zeros"):
        loaded(folder)


def test_other_forms_and_no_vision(k3, tmp_path):
    """Flat conv weights, F32 where BF16 is usual, and the vision shards not downloaded."""
    folder = copy("k3_tiny", tmp_path)
    conv = f"{LAYER}self_attn.k_conv1d.weight"

    def change(tensors):
        tensors[conv] = tensors[conv][:, 0]
        tensors[Q] = tensors[Q].astype(np.float32)

    edit(folder, conv, change)
    for file in ("model-00012-of-000013.safetensors", "model-00013-of-000013.safetensors"):
        (folder / file).unlink()
    assert same(loaded(folder), k3)


def test_dtypes(k3):
    bf16 = loaded(DATA / "k3_tiny", dtype=ml_dtypes.bfloat16)
    attn, mlp = bf16.layers[1].attn, bf16.layers[1].mlp
    assert attn.qkv.dtype == mlp.experts.gate_up.dtype == ml_dtypes.bfloat16
    for island in (attn.conv, attn.a_log, attn.dt_bias, attn.out_norm, mlp.router, mlp.router_bias):
        assert island.dtype == np.float32
    assert np.array_equal(np.asarray(attn.qkv, np.float32), k3.layers[1].attn.qkv)


def test_progress_ends_at_the_total():
    seen = []
    weights = loaded(DATA / "k3_tiny", 4, progress=lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done) and seen[-1][0] == seen[-1][1] and len({t for _, t in seen}) == 1
    shards = sum(s.data.nbytes for a in jax.tree.leaves(weights) for s in a.addressable_shards)
    assert seen[-1][1] == shards


def test_specs_fit_the_arrays(k3):
    specs = weight_specs(TargetConfig.from_dir(DATA / "k3_tiny"), 1, "dense")
    plain = jax.tree.map(lambda _: 0, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    assert jax.tree.structure(k3) == jax.tree.structure(plain)


def test_vocabulary_padding(tmp_path):
    """510 of 512 rows over 4 ranks: two rows of zeros at the end."""
    folder = copy("kimi_linear_tiny", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"], config["pad_token_id"] = 510, 509
    (folder / "config.json").write_text(json.dumps(config))
    names = ("lm_head.weight", "model.embed_tokens.weight")
    edit(folder, names[0], lambda t: t.update({n: t[n][:510] for n in names}))
    weights = loaded(folder, 4)
    assert weights.embed.shape == (512, 96) and not np.asarray(weights.embed)[510:].any()
    assert weights.head.shape == (96, 512) and np.asarray(weights.head)[:, 509].any()


# ------------------------------------------------------------------------------------ damage


def refuse(folder, *words):
    with pytest.raises(CheckpointError) as error:
        loaded(folder)
    for word in words:
        assert str(word) in str(error.value)


def test_missing_tensor(tmp_path):
    folder = copy("k3_tiny", tmp_path)
    file = edit(folder, Q, lambda t: t.pop(Q))
    refuse(folder, Q, file)
    edit_index(folder, lambda places: places.pop(Q))
    refuse(folder, Q, "missing", folder)


def test_missing_file_and_index(tmp_path):
    folder = copy("k3_tiny", tmp_path)
    file_of(folder, Q).unlink()
    refuse(folder, "model-00002-of-000013.safetensors", "no such file")
    (folder / "model.safetensors.index.json").unlink()
    refuse(folder, "neither", "model.safetensors")


def test_broken_index(tmp_path):
    folder = copy("k3_tiny", tmp_path)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    refuse(folder, "not a checkpoint index")


def test_extra_tensors(tmp_path):
    folder = copy("k3_tiny", tmp_path)
    extra = f"{LAYER}self_attn.rope.weight"
    file = edit(folder, Q, lambda t: t.update({extra: t[Q]}))
    refuse(folder, extra, file, "no such tensor")
    linear = copy("kimi_linear_tiny", tmp_path)
    edit(linear, "lm_head.weight", lambda t: t.update(mtp=t["lm_head.weight"]))
    refuse(linear, "mtp", "no such tensor")


def test_wrong_shape_and_dtype(tmp_path):
    folder = copy("k3_tiny", tmp_path)
    file = edit(folder, Q, lambda t: t.update({Q: t[Q][:100]}))
    refuse(folder, Q, file, "[100, 128]", "[128, 128]")
    edit(folder, Q, lambda t: t.update({Q: np.zeros((128, 128), np.float16)}))
    refuse(folder, Q, file, "F16", "BF16 or F32")
    codes = f"{LAYER}block_sparse_moe.experts.5.w2.weight_packed"
    edit(folder, Q, lambda t: t.update({Q: np.zeros((128, 128), np.float32)}))
    edit(folder, codes, lambda t: t.update({codes: t[codes].astype(np.int8)}))
    refuse(folder, codes, "I8", "expected U8")


def test_bad_scale_byte(tmp_path):
    folder = copy("k3_tiny", tmp_path)
    name = f"{LAYER}block_sparse_moe.experts.5.w2.weight_scale"

    def spoil(tensors):
        tensors[name][3, 1] = 255

    edit(folder, name, spoil)
    refuse(folder, name, "255", "1..254")


@pytest.mark.parametrize("keep", [0, 5, 3000, -1, -5000])
def test_truncated_file(tmp_path, keep):
    folder = copy("k3_tiny", tmp_path)
    file = file_of(folder, Q)
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    refuse(folder, file, "truncated")
    if keep < 0:
        last = max(load_header(data).items(), key=lambda item: item[1]["data_offsets"][1])[0]
        refuse(folder, f"found only {len(data) + keep} bytes", *([last] if keep == -1 else []))


def load_header(data):
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return header


@pytest.mark.parametrize("damage", ["length", "json", "offsets"])
def test_corrupted_header(tmp_path, damage):
    folder = copy("k3_tiny", tmp_path)
    file = file_of(folder, Q)
    data = bytearray(file.read_bytes())
    if damage == "length":
        data[0:8] = (2**62).to_bytes(8, "little")
    elif damage == "json":
        data[8:12] = b"\xff\xff\xff\xff"
    else:
        at = data.index(b'"data_offsets":[') + len(b'"data_offsets":[')
        data[at : at + 1] = b"-"
    file.write_bytes(bytes(data))
    refuse(folder, file, "corrupted header")
