"""From the command line's settings to a listening HTTP server; for the front, and for the engine
where HTTP runs in its threads.

Rule: no JAX. What clients are told of the model comes from the checkpoint's config.
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

from k3serve.api.server import ApiServer, cannot_listen
from k3serve.api.server import serve as serve_http
from k3serve.api.settings import ApiSettings
from k3serve.config import TargetConfig
from k3serve.metrics import Metrics
from k3serve.settings import NANO, ServeConfig
from k3serve.types import Executor

log = logging.getLogger("k3serve")

ANSWERS_GRACE_S = 5.0  # for answers that are complete but not yet written when the run ends


def start_http(
    executor: Executor,
    target: TargetConfig,
    config: ServeConfig,
    tokenizer: Any,
    metrics: Metrics,
) -> ApiServer:
    """A server that listens already. Raises ConfigError when it cannot."""
    settings = ApiSettings(
        vocab_size=target.vocab_size,
        eos_ids=(target.eos_token_id,) if tokenizer is None else (),
        host=config.host,
        port=config.port,
        served_model_names=model_names(config),
        model_root=str(config.checkpoint),
        version=metadata.version("k3serve"),
        api_keys=config.api_keys,
        cors_origins=config.allowed_origins,
        max_body_bytes=config.max_body_mib << 20,
        body_memory_bytes=config.body_memory_mib << 20,
        max_connections=config.max_connections,
        request_timeout_s=config.request_timeout_s,
    )
    try:
        return serve_http(executor, tokenizer, settings, metrics)
    except OSError as error:
        raise cannot_listen(config.host, config.port, error) from error


def model_names(config: ServeConfig) -> tuple[str, ...]:
    if config.served_model_names:
        return config.served_model_names
    return ("k3-nano" if config.checkpoint == NANO else config.checkpoint.resolve().name,)


def announce(config: ServeConfig, port: int) -> None:
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("%s is ready: %s", model_names(config)[0], url)
