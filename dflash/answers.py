"""What is asked of a source of the target's own answers, and what comes back: the one interface of both sources.

`generation.py` lets the target answer here, `endpoint.py` asks a server; `regenerate.py` keeps what they say.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

STOP, LENGTH, REFUSED = "stop", "length", "refused"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One reply that is wanted."""

    key: str
    """Names prompt and turn; this reply's random numbers come from it and the seed."""
    messages: list[dict[str, Any]]
    """The conversation so far; the last turn is not an assistant's."""
    tools: list[Any] | None
    prompt_tokens: list[int]
    """Its token ids with the generation prompt, by the target's own tokenizer and template."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One reply."""

    content: str
    reasoning: str | None = None
    """Where a server has taken it out of the content."""
    finish_reason: str
    """STOP, LENGTH, or REFUSED: this prompt cannot be answered at all, `detail` says why."""
    completion_tokens: int
    token_ids: list[int] | None = None
    """Without the end-of-turn token; None where the source does not know them."""
    detail: str = ""


class Pending(Protocol):
    """The requests that wait for a source."""

    def take(self, count: int) -> list[Request]:
        """Up to `count` requests of like length, the longest first; none when there is nothing to do right now."""
        ...


class Source(Protocol):
    """Somebody who answers as the target."""

    @property
    def identity(self) -> dict[str, Any]:
        """What the answers depend on beside template and sampling, as JSON."""
        ...

    def answers(self, pending: Pending) -> Generator[tuple[Request, Answer], None, None]:
        """Each answer as it comes, in any order, until none is under way and `pending` has nothing more.

        Asks `pending` whenever there is room: also after a yield, since an answered conversation may have a next turn.
        """
        ...
