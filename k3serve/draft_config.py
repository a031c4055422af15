"""What a DSpark draft's config.json says about it, validated once and against its target.

Rule: standard library only, and nothing is guessed. One layout is supported, that of the
speculators library with sliding-window Qwen3 layers; the other published layouts are recognised and
refused by name. The raw JSON is read: transformers' Qwen3Config loses the window.

Try it: `DraftConfig.from_dir("tests/data/k3_tiny_dspark", TargetConfig.from_dir(...))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3serve.config import TargetConfig
from k3serve.errors import ConfigError
from k3serve.sections import Section, read_config

LAYOUT = (
    "a DSpark draft as the speculators library writes it (speculators_model_type 'dspark', "
    "sliding-window Qwen3 layers, vanilla Markov head), like RedHatAI/Kimi-K3-speculator.dspark"
)
HARMLESS_KEYS = frozenset(
    """
    _name_or_path architectures auto_map dtype model_type
    speculators_version torch_dtype transformers_version
    """.split()
)
HARMLESS_LAYER_KEYS = frozenset(
    """
    _name_or_path architectures bos_token_id dtype eos_token_id initializer_range
    max_position_embeddings max_window_layers pad_token_id tie_word_embeddings torch_dtype
    transformers_version use_cache use_sliding_window
    """.split()
)  # use_sliding_window: false in some files although layer_types, which decides, says sliding
LAYERS = "transformer_layer_config."


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The draft model. Layer numbers are the target's, 0-based."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    norm_eps: float
    rope_theta: float
    window: int  # positions before the anchor that a block sees
    block_size: int  # rows of a block: at most so many drafts
    aux_layers: tuple[int, ...]  # the target's stream as it enters these layers is the context
    mask_token_id: int
    markov_rank: int
    confidence: bool  # there is a confidence head
    confidence_with_markov: bool  # it also reads the Markov embedding of the previous token

    @property
    def feature_size(self) -> int:
        """Length of a token's concatenated auxiliary streams."""
        return len(self.aux_layers) * self.hidden_size

    @property
    def confidence_size(self) -> int:
        return self.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)

    def ring_slots(self, rows: int, context: int) -> int:
        """Positions that the ring keeps of a slot which decodes so many rows a step and has at most
        `context` tokens.
        """
        return min(self.window, context) + rows

    def stored_kv_heads(self, ranks: int) -> int:
        """KV heads that all ranks together hold. With more ranks than heads each rank has a copy of
        the one that its query heads use.
        """
        return max(self.kv_heads, ranks)

    @staticmethod
    def from_dir(path: str | Path, target: TargetConfig) -> DraftConfig:
        """Reads config.json of a draft's folder. Raises ConfigError, also for a draft that does not
        fit the target.
        """
        return DraftConfig.from_dict(read_config(path), target)

    @staticmethod
    def from_dict(raw: Mapping[str, Any], target: TargetConfig) -> DraftConfig:
        """From the parsed config.json. Raises ConfigError."""
        if not isinstance(raw, Mapping):
            raise ConfigError(f"config.json must hold an object, not {type(raw).__name__}")
        _refuse_other_layouts(raw)
        top = Section(raw, "")
        layers = Section(top.get("transformer_layer_config"), LAYERS)
        config = _draft(top, layers)
        _check_switches(top, layers, config)
        _check_target(top, layers, config, target)
        top.refuse_rest(HARMLESS_KEYS, "a DSpark draft")
        layers.refuse_rest(HARMLESS_LAYER_KEYS, "a DSpark draft's layers")
        return config


def _draft(top: Section, layers: Section) -> DraftConfig:
    heads = layers.whole("num_attention_heads")
    confidence = top.flag("enable_confidence_head", False)
    with_markov = top.flag("confidence_head_with_markov", False)
    return DraftConfig(
        vocab_size=layers.whole("vocab_size"),
        hidden_size=layers.whole("hidden_size"),
        num_layers=layers.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=layers.whole("num_key_value_heads", heads),
        head_dim=layers.whole("head_dim"),
        mlp_width=layers.whole("intermediate_size"),
        norm_eps=layers.real("rms_norm_eps"),
        rope_theta=_rope_theta(layers),
        window=layers.whole("sliding_window"),
        block_size=top.whole("block_size"),
        aux_layers=_aux_layers(top),
        mask_token_id=top.whole("mask_token_id", least=0),
        markov_rank=top.whole("markov_rank"),
        confidence=confidence,
        confidence_with_markov=confidence and with_markov,
    )


def _aux_layers(top: Section) -> tuple[int, ...]:
    value = top.get("aux_hidden_state_layer_ids")
    if not isinstance(value, list) or not value or not all(type(n) is int for n in value):
        raise top.failure("aux_hidden_state_layer_ids", value, "a list of 0-based layer numbers")
    return tuple(value)


def _rope_theta(layers: Section) -> float:
    """Nested in rope_parameters or rope_scaling, or flat; wherever it stands, unscaled."""
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        if layers.get(key, None) is None:
            continue
        rope = Section(layers.values[key], f"{layers.prefix}{key}.")
        for kind in ("rope_type", "type"):
            if rope.get(kind, "default") != "default":
                raise ConfigError(
                    f"{rope.prefix}{kind}={rope.values[kind]!r} is not supported: scaled positions "
                    f"belong to the RadixArk layout; supported: 'default', in {LAYOUT}"
                )
        rope.one_of("partial_rotary_factor", (1, 1.0), default=1.0)
        if rope.has("rope_theta"):
            found.append(rope.real("rope_theta"))
        rope.refuse_rest(models="unscaled rotary positions")
    if layers.get("rope_theta", None) is not None:
        found.append(layers.real("rope_theta"))
    if not found:
        raise ConfigError(
            f"{layers.prefix}rope_theta is missing, also in rope_parameters; the model cannot be "
            "built without it"
        )
    if len(set(found)) > 1:
        raise layers.failure("rope_theta", found, "one value wherever it is written")
    return found[0]


def _check_switches(top: Section, layers: Section, config: DraftConfig) -> None:
    """Everything that has one supported value."""
    top.one_of("speculators_model_type", ("dspark",), default=None)
    layers.one_of("model_type", ("qwen3",), default="qwen3")
    layers.one_of("hidden_act", ("silu",), default="silu")
    layers.one_of("attention_bias", (False,), default=False)
    layers.one_of("attention_dropout", (0, 0.0), default=0.0)
    kinds = layers.get("layer_types")
    if len(kinds) != config.num_layers or set(kinds) != {"sliding_attention"}:
        raise ConfigError(
            f"{layers.prefix}layer_types={kinds!r} is not supported: full attention layers belong "
            f"to the RadixArk layout; supported: {config.num_layers} times 'sliding_attention', in "
            f"{LAYOUT}"
        )
    top.one_of("tie_word_embeddings", (False,), default=False)
    top.one_of("markov_head_type", ("vanilla",), default="vanilla")
    top.one_of("sample_from_anchor", (True,), default=None)
    top.one_of("sliding_window_non_causal", (False,), default=False)
    if top.get("speculators_config", None) is not None:
        described = Section(top.values["speculators_config"], "speculators_config.")
        described.one_of("algorithm", ("dspark",), default="dspark")
    if config.heads % config.kv_heads:
        key = "num_key_value_heads"
        raise layers.failure(key, config.kv_heads, f"divisors of the {config.heads} query heads")
    if config.head_dim % 2:
        raise layers.failure("head_dim", config.head_dim, "even numbers, for rotary positions")


def _check_target(top: Section, layers: Section, config: DraftConfig, target: TargetConfig) -> None:
    """What must agree with the target model."""
    if config.hidden_size != target.hidden_size:
        raise layers.failure("hidden_size", config.hidden_size, f"the target's {_of(target)}")
    top.one_of("target_hidden_size", (None, target.hidden_size), default=None)
    if config.vocab_size != target.vocab_size:
        wanted = f"the target's vocabulary, {target.vocab_size}"
        raise layers.failure("vocab_size", config.vocab_size, wanted)
    drafted = top.get("draft_vocab_size", None)
    if drafted is not None and drafted != target.vocab_size:
        wanted = f"the target's whole vocabulary, {target.vocab_size}, without d2t and t2d maps"
        raise top.failure("draft_vocab_size", drafted, wanted)
    aux = config.aux_layers
    if list(aux) != sorted(set(aux)) or aux[0] < 0 or aux[-1] >= target.num_layers:
        wanted = f"rising numbers of the target's layers, 0..{target.num_layers - 1}"
        raise top.failure("aux_hidden_state_layer_ids", list(aux), wanted)
    if config.mask_token_id >= target.vocab_size:
        wanted = f"ids below {target.vocab_size}"
        raise top.failure("mask_token_id", config.mask_token_id, wanted)


def _of(target: TargetConfig) -> str:
    return f"hidden size, {target.hidden_size}"


def _refuse_other_layouts(raw: Mapping[str, Any]) -> None:
    """Names the other published draft layouts, before anything of them is read."""
    found = _other_layout(raw)
    if found is not None:
        raise ConfigError(f"{found}, a draft layout that is not supported; supported: {LAYOUT}")


def _other_layout(raw: Mapping[str, Any]) -> str | None:
    """The key that gives another layout away, and the layout's name; None for ours."""
    kind, model = raw.get("speculators_model_type"), raw.get("model_type")
    names = str(raw.get("architectures")).lower()
    if kind == "dspark":
        return None
    if "eagle" in f"{kind} {model} {names}".lower():
        return f"speculators_model_type={kind!r}, architectures={raw.get('architectures')!r}: eagle"
    if kind is not None:
        return f"speculators_model_type={kind!r}"
    if model == "k3_dspark":
        return "model_type='k3_dspark': the Inferact layout (MLA layers)"
    if "dflash_config" in raw or "dflash" in f"{model} {names}".lower():
        if raw.get("markov_rank") or "markov_head_type" in raw or "dspark" in names:
            return "dflash_config with a Markov head: the RadixArk layout (full attention layers)"
        return f"architectures={raw.get('architectures')!r}: the modal DFlash layout"
    if "dspark" in f"{model} {names}".lower():
        return (
            f"architectures={raw.get('architectures')!r} without speculators_model_type: the "
            "RadixArk layout (full attention layers, scaled positions)"
        )
    return f"speculators_model_type is missing (model_type={model!r})"
