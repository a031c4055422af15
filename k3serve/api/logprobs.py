"""Log-probabilities in the two shapes that OpenAI's endpoints use.

Rule: each float32 is converted once and the same float stands wherever its value appears, so that
a client can compare with ==. JSON has no -inf: what is not above -9999 is written as -9999.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3serve.api.tokens import Detokenizer, Pieces
from k3serve.types import PromptScores, TokenEvent

FLOOR = -9999.0


def finite(value: float) -> float:
    return value if value > FLOOR else FLOOR  # NaN too compares false


@dataclass(frozen=True, slots=True)
class Scored:
    """One token with its score and the best alternatives; `logprob` None for a prompt's first."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def scored_tokens(event: TokenEvent, count: int) -> list[Scored]:
    """The first `count` generated tokens of an event."""
    return [
        Scored(
            event.tokens[i],
            finite(event.logprobs[i]),
            tuple(
                (t, finite(v)) for t, v in zip(event.top_ids[i], event.top_logprobs[i], strict=True)
            )
            if event.top_ids
            else (),
        )
        for i in range(count)
    ]


def scored_prompt(prompt: tuple[int, ...], scores: PromptScores, top: int) -> list[Scored]:
    """The prompt tokens that a chunk of scores speaks of."""
    values = scores.logprobs.tolist()
    ids = scores.top_ids[:, :top].tolist()
    tops = scores.top_logprobs[:, :top].tolist()
    return [
        Scored(
            prompt[scores.start + i],
            finite(value),
            tuple((t, finite(v)) for t, v in zip(ids[i], tops[i], strict=True)),
        )
        for i, value in enumerate(values)
    ]


@dataclass(slots=True)
class CompletionLogprobs:
    """The four parallel arrays of /v1/completions; knows how long the text is so far."""

    pieces: Pieces
    decoder: Detokenizer
    offset: int = 0

    def arrays(self, entries: list[Scored], skip_special: bool) -> dict[str, list[Any]]:
        """The entries' arrays, their offsets continuing where the last call ended."""
        offsets, tokens, values, tops = [], [], [], []
        for entry in entries:
            offsets.append(self.offset)
            tokens.append(self.pieces.text(entry.token))
            values.append(entry.logprob)
            tops.append(self._top(entry))
            self.offset += len(self.decoder.feed((entry.token,), skip_special))
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": tops,
        }

    def _top(self, entry: Scored) -> dict[str, float] | None:
        """Alternatives by text, the chosen token among them. Tokens that look the same share a
        key: the largest value stays, else a token that is not the best would look like it."""
        if entry.logprob is None:
            return None
        best: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token, entry.logprob)):
            text = self.pieces.text(token)
            best[text] = max(value, best.get(text, value))
        return best


def chat_entries(pieces: Pieces, entries: list[Scored]) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat answer: every generated token, markers and end included."""
    return [
        {
            **_chat_token(pieces, entry.token, entry.logprob),
            "top_logprobs": [_chat_token(pieces, t, v) for t, v in entry.top],
        }
        for entry in entries
    ]


def _chat_token(pieces: Pieces, token: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": pieces.text(token),
        "logprob": logprob,
        "bytes": list(pieces.raw(token)),
    }
