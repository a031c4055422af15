"""GET /health /ping /version /metrics /v1/models: what load balancers and SDKs ask first.

Rule: no endpoint here waits for anything; each answers from values at hand.
"""

from __future__ import annotations

from typing import Any

from k3serve.api.context import Context
from k3serve.api.exchange import Exchange
from k3serve.api.replies import Reply, json_reply
from k3serve.errors import RequestError
from k3serve.types import State


def health(context: Context, exchange: Exchange) -> Reply:
    """200 with an empty body when requests are taken, else 503 naming the state."""
    state = context.executor.state()
    if state is not State.READY:
        raise RequestError(
            f"this server is {state.value}", status=503, code=state.value, retry_after_s=1.0
        )
    return Reply(200, b"", None)


def version(context: Context, exchange: Exchange) -> Reply:
    return json_reply({"version": context.settings.version})


def metrics(context: Context, exchange: Exchange) -> Reply:
    content_type, body = context.metrics.render()
    return Reply(200, body, content_type)


def models(context: Context, exchange: Exchange) -> Reply:
    names = context.settings.served_model_names
    return json_reply({"object": "list", "data": [_card(context, name) for name in names]})


def model(context: Context, exchange: Exchange) -> Reply:
    return json_reply(_card(context, context.check_model(exchange.path_arg)))


def _card(context: Context, name: str) -> dict[str, Any]:
    settings = context.settings
    return {
        "id": name,
        "object": "model",
        "created": settings.created,
        "owned_by": "k3serve",
        "root": settings.model_root or name,
        "parent": None,
        "max_model_len": context.executor.capacity().max_context,
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": settings.created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
