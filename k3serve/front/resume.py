"""A request that goes on in another engine: its prompt, then the tokens its client already has.

Rule: what the client has is never sent again, and nothing is left out. Random bits depend on seed,
choice and position alone, so a drawn continuation is drawn as it would have been; the prompt's part
is now computed by pages, whose roundings differ from those of decode steps in the last bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from k3serve.types import PromptScores, Request, TokenEvent

MOST_RESUMES = 2  # a request that ends every engine it meets must not end them for ever


@dataclass(slots=True)
class Progress:
    """What a client has got of its request so far."""

    request: Request  # as the client made it
    tokens: list[int] = field(default_factory=list)
    scored: int = 1  # prompt positions below have their scores; position 0 has none
    heard: bool = False
    resumes: int = 0

    def take(self, event: TokenEvent) -> TokenEvent:
        """Notes the event; gives it without what the client already has."""
        scores = event.prompt_scores
        if scores is not None:
            scores = _after(scores, self.scored)
            self.scored = max(self.scored, scores.start + len(scores.logprobs))
            event = replace(event, prompt_scores=scores if len(scores.logprobs) else None)
        if self.heard and event.cached_tokens:  # of the prompt as first told, not of our own
            event = replace(event, cached_tokens=0)
        self.heard = True
        self.tokens += event.tokens
        return event

    def obstacle(self) -> str | None:
        """Why this request cannot go on elsewhere; None: it can."""
        sampling = self.request.sampling
        if self.tokens and (sampling.presence_penalty or sampling.frequency_penalty):
            # both count generated tokens, and those of the answer so far would be prompt tokens
            return "presence_penalty and frequency_penalty cannot be resumed"
        if self.resumes >= MOST_RESUMES:
            return f"it was resumed {MOST_RESUMES} times already"
        return None

    def rest(self) -> Request:
        """The request for what is still to come."""
        request, done = self.request, len(self.tokens)
        sampling = request.sampling
        if self.scored >= len(request.prompt):
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            request,
            prompt=(*request.prompt, *self.tokens),
            sampling=replace(
                sampling,
                max_tokens=sampling.max_tokens - done,
                min_tokens=max(0, sampling.min_tokens - done),
            ),
        )


def _after(scores: PromptScores, start: int) -> PromptScores:
    """The scores of positions start and later."""
    cut = max(0, start - scores.start)
    return PromptScores(
        scores.start + cut,
        scores.logprobs[cut:],
        scores.top_ids[cut:],
        scores.top_logprobs[cut:],
    )
