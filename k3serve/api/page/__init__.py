"""GET / and /chat: the chat page, one file without outside parts.

Rule: a browser takes the file's own script and style, known by their hashes, and nothing else; the
page talks to this server only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from k3serve.api.context import Context
from k3serve.api.exchange import Exchange
from k3serve.api.replies import Reply

FILE = Path(__file__).parent / "index.html"


def page(context: Context, exchange: Exchange) -> Reply:
    return _reply()


@cache
def _reply() -> Reply:
    html = FILE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(html, "script"),
        "style-src": _hash(html, "style"),
        "img-src": "data:",  # the empty icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = (
        ("Content-Security-Policy", "; ".join(f"{k} {v}" for k, v in policy.items())),
        ("X-Content-Type-Options", "nosniff"),
        ("X-Frame-Options", "DENY"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-cache"),
    )
    return Reply(200, html.encode(), "text/html; charset=utf-8", headers)


def _hash(html: str, tag: str) -> str:
    """What a policy calls the one inline element of this kind."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
