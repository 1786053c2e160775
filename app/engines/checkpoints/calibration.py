"""The text on which calibrated schemes (GPTQ, AWQ) learn which weights matter.

It must need no hub and no network, and come in the form the model will serve: questions and answers through its own
chat template. The answers are passages of the language reference that Python ships, prose mixed with code. Answers by
the model itself would be nearer to its use, but on two cores writing them took longer than all the quantizing.
"""

from collections.abc import Iterator
from itertools import islice
from pydoc_data.topics import topics
from typing import TypeAlias

Conversation: TypeAlias = list[dict[str, str]]
"""Messages in OpenAI's form."""

# Enough to fill a sample of 256 tokens; what is too long is cut by the quantizer.
PASSAGE_CHARACTERS = 1200


def conversations(count: int) -> list[Conversation]:
    """Return `count` conversations, the same ones every time."""
    return list(islice(_passages(), count))


def _passages() -> Iterator[Conversation]:
    """Yield the first passage of every topic, then the second passages, and so on, for variety at any count."""
    for start in range(0, max(map(len, topics.values())), PASSAGE_CHARACTERS):
        for name, text in sorted(topics.items()):
            passage = text[start : start + PASSAGE_CHARACTERS]
            if len(passage) == PASSAGE_CHARACTERS:
                yield [
                    {"role": "user", "content": f"What does the Python reference say about {name}?"},
                    {"role": "assistant", "content": passage},
                ]
