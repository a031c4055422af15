"""A client's or a file's value inside an error message.

Rule: short and ASCII whatever the value, so that the message itself always encodes.
"""

from __future__ import annotations

MAX_CHARS = 60


def shown(value: object) -> str:
    """The value where it is short and plain, else what it is."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"  # its repr may raise
    if isinstance(value, str | bytes) and len(value) > MAX_CHARS:
        return ascii(value[:MAX_CHARS]) + "..."
    if value is None or isinstance(value, str | bytes | int | float):
        return ascii(value)
    return f"a {type(value).__name__}"
