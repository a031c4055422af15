"""Stop strings in a stream of text.

Rule: the result does not depend on how the text is cut: the text ends before the occurrence that
starts first, as if `text.find` had been called on the whole. Of several stops that start at the
same place the shortest is the hit: it is complete first, and waiting for a longer one would only
delay the end.

Held back is exactly the longest suffix that may still become (part of) a stop. Each character costs
one step per stop, whatever came before (Knuth, Morris and Pratt's failure tables).

Try it: m = StopMatcher(["own fox"]); m.feed("br"), m.feed("own f"), m.feed("ox!")
"""

from __future__ import annotations

from collections.abc import Sequence

from k3serve.errors import RequestError


class StopMatcher:
    """Watches one choice's text. With `include` the stop itself is delivered too."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        for position, stop in enumerate(stops):
            if not stop:
                raise RequestError(
                    f"stop[{position}] is an empty string, which would end every reply at once: "
                    f"leave it out",
                    param=f"stop[{position}]",
                )
        self.hit: str | None = None
        self._include = include
        self._stops = tuple(dict.fromkeys(stops))
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # per stop: how many of its characters end the text
        self._held = ""
        self._best: tuple[int, str] | None = None  # start in _held, stop; others may start earlier

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text to deliver now, the stop that ended the reply or None); nothing after a hit."""
        if self.hit is not None:
            return "", self.hit
        if not self._held and not any(stop[0] in text for stop in self._stops):
            return text, None
        first_new = len(self._held)
        self._held += text
        for end, char in enumerate(text, start=first_new + 1):
            self._step(char, end)
            if self._best and end - max(self._matched) >= self._best[0]:
                return self._finish(), self.hit
        keep = max(self._matched)  # reaches back before _best, else that had been the hit
        ready, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        if self._best:
            self._best = (self._best[0] - len(ready), self._best[1])
        return ready, None

    def flush(self) -> str:
        """The held-back text once no more comes; without a hit, later text starts afresh.

        A stop that was complete while one with an earlier start was still possible counts now: look
        at `hit` afterwards.
        """
        if self._best:
            return self._finish()
        ready, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return ready

    def _step(self, char: str, end: int) -> None:
        """One character, which makes the text `end` characters of _held long."""
        for k, stop in enumerate(self._stops):
            table, n = self._tables[k], self._matched[k]
            while n and stop[n] != char:
                n = table[n - 1]
            n += stop[n] == char
            if n == len(stop):
                start = end - n
                if self._best is None or start < self._best[0]:
                    self._best = (start, stop)
                n = 0  # what this stop may still match cannot start earlier
            self._matched[k] = n

    def _finish(self) -> str:
        assert self._best is not None
        start, self.hit = self._best
        ready = self._held[:start] + (self.hit if self._include else "")
        self._held, self._best = "", None
        return ready


def _failure_table(stop: str) -> list[int]:
    """Entry i: length of the longest proper prefix of stop[: i + 1] that is also its suffix."""
    table = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[n] != stop[i]:
            n = table[n - 1]
        n += stop[n] == stop[i]
        table[i] = n
    return table
