"""The text on which calibrated schemes (GPTQ, AWQ) learn which weights matter.

It must need no hub and no network, and should look like what the model will serve: conversations through its own chat
template. Half are questions on everyday subjects which the dense model answers itself, so activations are those of
real chats; half are passages of Python's own language reference, for long prompts, code and formal prose.
"""

from collections.abc import Iterator
from itertools import islice
from pydoc_data.topics import topics
from typing import TypeAlias

Conversation: TypeAlias = list[dict[str, str]]

# Below about 2,000 characters a sample of 512 tokens would not be filled; what is too long is cut by the quantizer.
PASSAGE_CHARACTERS = 2200

_QUESTIONS = (
    "What is {}? Explain it in simple words.",
    "Write a short story about {}.",
    "Give me five practical tips on {}.",
    "What should a beginner know about {}? Answer with a numbered list.",
)
_SUBJECTS = (
    "the water cycle",
    "growing vegetables on a balcony",
    "the Roman Empire",
    "saving money as a student",
    "black holes",
    "learning to play the guitar",
    "sorting a list of numbers in a program",
    "the human heart",
)


def conversations(count: int) -> list[Conversation]:
    """Return `count` conversations, the same ones every time; half of them end with a question to be answered."""
    questions = count // 2
    return [*islice(_asked(), questions), *islice(_passages(), count - questions)]


def _asked() -> Iterator[Conversation]:
    for question in _QUESTIONS:
        for subject in _SUBJECTS:
            yield [{"role": "user", "content": question.format(subject)}]


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
