"""What every endpoint sees: the executor, the tokenizer, the settings, the metrics.

Rule: built once per server, read-only afterwards; the id counter is the one thing that moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from k3serve.api.settings import ApiSettings
from k3serve.errors import Overloaded, RequestError
from k3serve.metrics import Metrics
from k3serve.types import Executor, State


class Tokenizer(Protocol):
    """The part of text.Tokenizer that the server uses; tests use a byte tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str, allow_special: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...

    def is_special(self, token_id: int) -> bool: ...

    def info(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Context:
    """One server's collaborators."""

    executor: Executor
    tokenizer: Any  # Tokenizer | None; Any because text.channels wants its own richer type
    settings: ApiSettings
    metrics: Metrics
    longest_token: int = 0  # bytes; 0: not known, and long texts are encoded to be counted
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        if self.settings.eos_ids or self.tokenizer is None:
            return self.settings.eos_ids
        return tuple(self.tokenizer.eos_ids)

    def check_room(self) -> None:
        """Overloaded at once when the queue is full: nobody reads or encodes what cannot run."""
        capacity = self.executor.capacity()
        state = self.executor.state()
        if state is not State.READY:
            self.metrics.rejections.inc()
            raise Overloaded(
                f"this server is {state.value}; retry later, or ask another one", status=503
            )
        # Free slots count: what was just submitted waits until the next plan gives it one.
        if capacity.running + capacity.waiting >= capacity.max_slots + capacity.max_queue:
            self.metrics.rejections.inc()
            raise Overloaded(
                f"the queue is full: {capacity.max_queue} requests wait already; retry later"
            )

    def need_tokenizer(self, param: str) -> Any:
        """The tokenizer, or a 400 that says which field needs it."""
        if self.tokenizer is None:
            raise RequestError(
                f"{param} is text, but this checkpoint was loaded without tokenizer files; "
                "send token ids as `prompt` to /v1/completions instead",
                param=param,
                code="no_tokenizer",
            )
        return self.tokenizer

    def check_fits(self, characters: int, param: str) -> None:
        """Refuses a text that no encoding brings into the context: 32 MiB would take seconds."""
        limit = self.executor.capacity().max_context
        if self.longest_token and characters > limit * self.longest_token:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens; {param} has {characters} "
                f"characters, and no token has more than {self.longest_token}",
                param=param,
                code="context_length_exceeded",
            )

    def check_model(self, name: str | None) -> str:
        """The name to report; 404 for a model that is not served here."""
        served = self.settings.served_model_names
        if name is None or name == "":
            return served[0]
        if name not in served:
            raise RequestError(
                f"model {name[:200]!r} does not exist here; served: {', '.join(served)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name
