"""DraftConfig: the tiny and the published shape, what must fit the target, and every other layout
refused by name.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from k3serve.config import TargetConfig
from k3serve.draft_config import DraftConfig
from k3serve.errors import ConfigError

DATA = Path(__file__).parent / "data"
TARGET = TargetConfig.from_dir(DATA / "k3_tiny")
TINY = json.loads((DATA / "k3_tiny_dspark" / "config.json").read_text())
L = "transformer_layer_config"


def changed(path, value):
    """TINY with one value replaced, or removed (value is KeyError)."""
    raw = copy.deepcopy(TINY)
    *parents, last = path.split(".")
    place = raw
    for key in parents:
        place = place[key]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return raw


def published():
    """The values of RedHatAI/Kimi-K3-speculator.dspark, and its target."""
    raw = copy.deepcopy(TINY)
    raw |= {"aux_hidden_state_layer_ids": [24, 48, 72, 88, 92], "mask_token_id": 163837}
    raw |= {"draft_vocab_size": 163840, "markov_rank": 256}
    raw[L] |= {"hidden_size": 7168, "intermediate_size": 14336, "num_hidden_layers": 5}
    raw[L] |= {"num_attention_heads": 96, "num_key_value_heads": 16, "head_dim": 64}
    raw[L] |= {"sliding_window": 2048, "vocab_size": 163840}
    raw[L]["layer_types"] = ["sliding_attention"] * 5
    target = json.loads((DATA / "configs" / "kimi_k3.json").read_text())
    return raw, TargetConfig.from_dict(target)


def test_the_tiny_draft():
    c = DraftConfig.from_dir(DATA / "k3_tiny_dspark", TARGET)
    assert (c.vocab_size, c.hidden_size, c.num_layers, c.mlp_width) == (640, 128, 2, 192)
    assert (c.heads, c.kv_heads, c.head_dim, c.window, c.block_size) == (4, 2, 16, 32, 8)
    assert (c.norm_eps, c.rope_theta) == (1e-5, 10000.0)
    assert (c.aux_layers, c.mask_token_id, c.markov_rank) == ((3, 5, 8), 637, 8)
    assert c.confidence and c.confidence_with_markov and c.confidence_size == 136
    assert (c.feature_size, c.ring_slots(8, 8192)) == (384, 40)
    assert c.ring_slots(8, 16) == 24  # no context is longer than the context
    assert c == DraftConfig.from_dict(TINY, TARGET) and hash(c) is not None


def test_the_published_draft():
    c = DraftConfig.from_dict(*published())
    assert (c.feature_size, c.ring_slots(8, 8192), c.confidence_size) == (35840, 2056, 7424)
    assert [c.stored_kv_heads(n) for n in (1, 8, 16, 32)] == [16, 16, 16, 32]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("confidence_head_with_markov", False),
        ("speculators_config", KeyError),
        ("target_hidden_size", 128),
        ("draft_vocab_size", None),
        (f"{L}.use_sliding_window", False),
        (f"{L}.rope_parameters", {"rope_theta": 10000.0}),
    ],
)
def test_other_spellings(path, value):
    found = DraftConfig.from_dict(changed(path, value), TARGET)
    assert found.window == 32 and found.rope_theta == 10000.0


def test_no_confidence_head():
    c = DraftConfig.from_dict(changed("enable_confidence_head", False), TARGET)
    assert not c.confidence and not c.confidence_with_markov


def test_a_flat_rope_theta():
    raw = changed(f"{L}.rope_parameters", KeyError)
    raw[L] |= {"rope_theta": 50000, "rope_scaling": None}
    assert DraftConfig.from_dict(raw, TARGET).rope_theta == 50000.0
    raw[L]["rope_parameters"] = {"rope_theta": 10000.0}
    with pytest.raises(ConfigError, match=r"rope_theta=\[10000.0, 50000.0\].*one value"):
        DraftConfig.from_dict(raw, TARGET)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (f"{L}.hidden_size", 256, "hidden_size=256.*the target's hidden size, 128"),
        ("target_hidden_size", 256, "target_hidden_size=256"),
        (f"{L}.vocab_size", 512, "vocab_size=512.*the target's vocabulary, 640"),
        ("draft_vocab_size", 320, "draft_vocab_size=320.*whole vocabulary, 640.*d2t"),
        ("aux_hidden_state_layer_ids", [3, 5, 10], r"\[3, 5, 10\].*layers, 0..9"),
        ("aux_hidden_state_layer_ids", [5, 3], r"\[5, 3\].*rising"),
        ("aux_hidden_state_layer_ids", [3, 3], r"\[3, 3\].*rising"),
        ("aux_hidden_state_layer_ids", [-1, 3], r"\[-1, 3\].*rising"),
        ("aux_hidden_state_layer_ids", [], r"=\[\].*layer numbers"),
        ("aux_hidden_state_layer_ids", [True], "layer numbers"),
        ("mask_token_id", 640, "mask_token_id=640.*ids below 640"),
        ("mask_token_id", None, "mask_token_id=None"),
    ],
)
def test_what_must_fit_the_target(path, value, said):
    with pytest.raises(ConfigError, match=said):
        DraftConfig.from_dict(changed(path, value), TARGET)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("markov_head_type", "gated", "markov_head_type='gated'.*'vanilla'"),
        ("markov_head_type", "rnn", "markov_head_type='rnn'.*'vanilla'"),
        ("markov_rank", 0, "markov_rank=0"),
        ("sample_from_anchor", False, "sample_from_anchor=False.*True"),
        ("sample_from_anchor", KeyError, "sample_from_anchor=None.*True"),
        ("sliding_window_non_causal", True, "sliding_window_non_causal=True.*False"),
        ("tie_word_embeddings", True, "tie_word_embeddings=True"),
        ("enable_confidence_head", 1, "enable_confidence_head=1"),
        ("speculators_config", {"algorithm": "eagle3"}, "algorithm='eagle3'"),
        ("block_size", 0, "block_size=0"),
        ("surprise", 1, "surprise=1 is an unknown key.*a DSpark draft"),
        (L, KeyError, "transformer_layer_config is missing"),
        (f"{L}.surprise", 1, f"{L}.surprise=1 is an unknown key"),
        (f"{L}.model_type", "llama", "model_type='llama'.*'qwen3'"),
        (f"{L}.hidden_act", "gelu", "hidden_act='gelu'"),
        (f"{L}.attention_bias", True, "attention_bias=True"),
        (f"{L}.sliding_window", None, "sliding_window=None"),
        (f"{L}.head_dim", 15, "head_dim=15.*even"),
        (f"{L}.num_key_value_heads", 3, "num_key_value_heads=3.*4 query heads"),
        (f"{L}.layer_types", KeyError, "layer_types is missing"),
        (f"{L}.layer_types", ["sliding_attention"], "layer_types.*2 times 'sliding_attention'"),
        (f"{L}.rope_parameters", KeyError, "rope_theta is missing"),
        (f"{L}.rope_parameters.factor", 16, "rope_parameters.factor=16"),
    ],
)
def test_refusals_of_values(path, value, said):
    with pytest.raises(ConfigError, match=said):
        DraftConfig.from_dict(changed(path, value), TARGET)


RADIX_LAYERS = ["full_attention"] * 2
OTHERS = {
    "Inferact": ({"model_type": "k3_dspark", "q_lora_rank": 1536}, "Inferact layout"),
    "modal": ({"architectures": ["DFlashDraftModel"], "block_size": 16}, "modal DFlash layout"),
    "flat RadixArk": (
        {"architectures": ["Qwen3DSparkModel"], "layer_types": RADIX_LAYERS, "block_size": 7},
        "RadixArk layout",
    ),
    "RadixArk with dflash_config": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": {}, "markov_rank": 256},
        "RadixArk layout",
    ),
    "full attention": (changed(f"{L}.layer_types", RADIX_LAYERS), "full attention.*RadixArk"),
    "YaRN": (changed(f"{L}.rope_parameters.rope_type", "yarn"), "'yarn'.*RadixArk"),
    "YaRN beside": (changed(f"{L}.rope_scaling", {"type": "yarn", "factor": 16}), "RadixArk"),
    "eagle3": (changed("speculators_model_type", "eagle3"), "'eagle3'.*eagle"),
    "eagle3 without speculators": ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle"),
    "another speculator": (
        changed("speculators_model_type", "mlp"),
        "speculators_model_type='mlp'",
    ),
    "a target": (json.loads((DATA / "k3_tiny" / "config.json").read_text()), "kimi_k3"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_are_named(name):
    raw, said = OTHERS[name]
    with pytest.raises(ConfigError, match=said) as caught:
        DraftConfig.from_dict(raw, TARGET)
    assert "RedHatAI/Kimi-K3-speculator.dspark" in str(caught.value)


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        DraftConfig.from_dir(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold an object, not list"):
        DraftConfig.from_dir(tmp_path, TARGET)


def test_a_draft_given_as_the_model_says_so():
    with pytest.raises(ConfigError, match="holds a draft, not a model: give it as --draft"):
        TargetConfig.from_dir(DATA / "k3_tiny_dspark")
