"""The text on which calibrated schemes (GPTQ, AWQ) learn which weights matter.

It must need no hub and no network, and be like what the model will serve: conversations through its own chat template.
Three quarters are questions of many kinds with answers that the embedded model gave in 16 bits, kept in a file because
writing them takes longer than quantizing; what they say may be wrong, and only their form counts. One quarter are
passages of the language reference that Python ships, for prompts that hold documents or code. In chats about other
questions, the embedded model in 4 bits (GPTQ) strays 0.30 nats (KL) from the dense one; calibrated on such passages
alone, 0.52.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import TypeAlias

Conversation: TypeAlias = list[dict[str, str]]
"""Messages in OpenAI's form."""

CHATS = Path(__file__).with_name("calibration_chats.json")
# Enough to fill a sample of 256 tokens; what is too long is cut by the quantizer.
PASSAGE_CHARACTERS = 1200


def conversations(count: int) -> list[Conversation]:
    """Return `count` conversations, the same ones every time: the chats first, then passages."""
    return list(islice(_all(), count))


def _all() -> Iterator[Conversation]:
    for chat in json.loads(CHATS.read_text(encoding="utf-8")):
        yield _talk(chat["question"], chat["answer"])
    # The first passage of every topic, then the second passages, and so on, for variety at any count.
    for start in range(0, max(map(len, topics.values())), PASSAGE_CHARACTERS):
        for name, text in sorted(topics.items()):
            passage = text[start : start + PASSAGE_CHARACTERS]
            if len(passage) == PASSAGE_CHARACTERS:
                yield _talk(f"What does the Python reference say about {name}?", passage)


def _talk(question: str, answer: str) -> Conversation:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
