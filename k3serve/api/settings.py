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
    body_memory_bytes: int = 512 * 1024 * 1024  # all bodies together, what parsing makes included
    max_connections: int = 512
    idle_timeout_s: float = 75.0  # a kept connection without a request
    head_timeout_s: float = 10.0  # a request's first line and headers
    body_timeout_s: float = 30.0  # its body, and the time that its bytes take at a slow link's rate
    request_timeout_s: float = 3600.0  # from the queue to the last token; 0: no limit
    write_timeout_s: float = 30.0  # a client that does not read
    send_buffer_bytes: int = 256 * 1024  # what the kernel keeps for such a client
    max_outbox: int = 1024  # events that wait for such a client before its request is cancelled
    gone_check_s: float = 0.25  # how often a waiting request looks whether its client is there

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]
