"""What an operator decides about the HTTP server; fixed once the server runs.

Rule: frozen, plain values; app fills them from the command line.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Names, limits and defaults of one HTTP server."""

    vocab_size: int  # ids 0 .. vocab_size-1 are valid in prompts
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    served_model_names: tuple[str, ...] = ("k3-nano",)  # the first one is reported
    model_root: str = ""  # where the weights came from, as /v1/models shows it
    created: int = field(default_factory=lambda: int(time.time()))
    version: str = "0.0.0"
    eos_ids: tuple[int, ...] = ()  # empty: the tokenizer's own
    api_keys: tuple[str, ...] = ()  # empty: everybody may ask
    cors_origins: tuple[str, ...] = ()  # empty: CORS off; "*" allows all
    default_thinking: bool = True
    default_effort: str | None = None  # low, high or max
    max_body_bytes: int = 32 * 1024 * 1024
    max_connections: int = 512
    idle_timeout_s: float = 75.0  # a kept connection without a request
    request_timeout_s: float = 60.0  # head and body of one request, together
    write_timeout_s: float = 30.0  # a client that does not read
    gone_check_s: float = 0.25  # how often a waiting request looks whether its client is there

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]
