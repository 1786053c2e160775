"""Which weights a conversation began with, so that its style and facts do not change between turns."""

from __future__ import annotations

from collections import OrderedDict

MAX_CONVERSATIONS = 100_000
"""Names; a turn has two, its beginning and all of it."""


class Conversations:
    """The weight set of each recent conversation, by hashes of it; the least recently used are forgotten."""

    __slots__ = ("_limit", "_weights")

    def __init__(self, limit: int = MAX_CONVERSATIONS) -> None:
        self._limit = limit
        self._weights: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._weights)

    def weights(self, conversation: str) -> str | None:
        """For `Wishes.conversation_weights`; None for a new conversation."""
        found = self._weights.get(conversation)
        if found is not None:
            self._weights.move_to_end(conversation)
        return found

    def began(self, conversation: str, weights: str) -> None:
        """A turn is served with `weights`; later turns keep to them."""
        self._weights[conversation] = weights
        self._weights.move_to_end(conversation)
        if len(self._weights) > self._limit:
            self._weights.popitem(last=False)
