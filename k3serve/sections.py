"""Reads config.json and its objects key by key, and knows afterwards which keys nobody read.

Rule: every refusal is a ConfigError that names the key, the value and what is supported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k3serve.errors import ConfigError

TARGETS = "Kimi K3 and Kimi-Linear"


def read_config(path: str | Path) -> Any:
    """The parsed config.json of a checkpoint folder. Raises ConfigError."""
    file = Path(path) / "config.json"
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; a checkpoint folder needs it") from None
    except OSError as error:  # not a folder, not readable, ...
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}); name a checkpoint folder that can"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from None


class Section:
    """One object of config.json that remembers which keys were read."""

    def __init__(self, values: Any, prefix: str) -> None:
        if not isinstance(values, Mapping):
            name = prefix.rstrip(".") or "config.json"
            raise ConfigError(f"{name} must be an object, not {values!r}")
        self.values = values
        self.prefix = prefix
        self.seen: set[str] = set()

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, *default: Any) -> Any:
        self.seen.add(key)
        if key in self.values:
            return self.values[key]
        if default:
            return default[0]
        raise ConfigError(f"{self.prefix}{key} is missing; the model cannot be built without it")

    def failure(self, key: str, value: Any, supported: str) -> ConfigError:
        name = f"{self.prefix}{key}"
        return ConfigError(f"{name}={value!r} is not supported; supported: {supported}")

    def whole(self, key: str, *default: int, least: int = 1) -> int:
        value = self.get(key, *default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.failure(key, value, f"an integer of at least {least}")
        return value

    def real(self, key: str, *default: float, above: float = 0.0) -> float:
        value = self.get(key, *default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > above:
            raise self.failure(key, value, f"a number above {above}")
        return float(value)

    def flag(self, key: str, *default: bool) -> bool:
        value = self.get(key, *default)
        if not isinstance(value, bool):
            raise self.failure(key, value, "true, false")
        return value

    def one_of(self, key: str, supported: tuple[Any, ...], *, default: Any) -> Any:
        value = self.get(key, default)
        if not any(
            value == s and isinstance(value, bool) == isinstance(s, bool) for s in supported
        ):
            raise self.failure(key, value, ", ".join(repr(s) for s in supported))
        return value

    def refuse_rest(self, harmless: Iterable[str] = (), models: str = TARGETS) -> None:
        refuse_unknown(self.values, self.seen | set(harmless), self.prefix, models)


def refuse_unknown(
    values: Mapping[str, Any], known: Iterable[str], prefix: str, models: str = TARGETS
) -> None:
    """Raises ConfigError for the first key that is not known; `models` names those with known
    keys.
    """
    unknown = sorted(set(values) - set(known))
    if unknown:
        key = unknown[0]
        raise ConfigError(
            f"{prefix}{key}={values[key]!r} is an unknown key; supported: the keys of {models}. "
            "If it does not change what the model computes, remove it from config.json"
        )
