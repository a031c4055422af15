"""The skills of the curriculum, one module per kind. Importing this package registers them all."""

from scripts.train_nano.skills import (  # noqa: F401
    arithmetic,
    chat,
    conversations,
    facts,
    generation,
    lists,
    structured,
    text,
    tools,
)
