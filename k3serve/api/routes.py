"""The route table: every path this server answers, in one place.

Rule: a path absent here is a 404, a method absent here a 405 with Allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from k3serve.api import admin, chat, completions, tokenize
from k3serve.api.context import Context
from k3serve.api.exchange import Exchange
from k3serve.api.page import page
from k3serve.api.replies import Reply

Endpoint = Callable[[Context, Exchange], Reply | None]


@dataclass(frozen=True, slots=True)
class Route:
    """`open_end` routes match every longer path and pass the rest on as path_arg."""

    methods: dict[str, Endpoint]
    open_end: bool = False
    public: bool = False  # needs no API key
    generates: bool = False  # takes a slot: refused at once while none can be had

    @property
    def allow(self) -> str:
        names = list(self.methods)
        return ", ".join([*names, "HEAD"] if "GET" in names else names)


ROUTES: dict[str, Route] = {
    "/": Route({"GET": page}, public=True),  # a browser cannot send a key; the page then does
    "/chat": Route({"GET": page}, public=True),
    "/health": Route({"GET": admin.health}, public=True),
    "/ping": Route({"GET": admin.health, "POST": admin.health}, public=True),
    "/version": Route({"GET": admin.version}, public=True),
    "/metrics": Route({"GET": admin.metrics}, public=True),
    "/v1/models": Route({"GET": admin.models}),
    "/v1/models/": Route({"GET": admin.model}, open_end=True),
    "/tokenizer_info": Route({"GET": tokenize.tokenizer_info}),
    "/tokenize": Route({"POST": tokenize.tokenize}),
    "/detokenize": Route({"POST": tokenize.detokenize}),
    "/v1/completions": Route({"POST": completions.completions}, generates=True),
    "/v1/chat/completions": Route({"POST": chat.chat_completions}, generates=True),
}


def find(target: str) -> tuple[Route, str] | None:
    """The route of a request target (its query is not looked at) and the open end's rest."""
    try:
        path = urlsplit(target).path
    except ValueError:
        return None
    route = ROUTES.get(path)
    if route is not None and not route.open_end:
        return route, ""
    for prefix, candidate in ROUTES.items():
        if candidate.open_end and path.startswith(prefix) and len(path) > len(prefix):
            return candidate, unquote(path[len(prefix) :])
    return None
