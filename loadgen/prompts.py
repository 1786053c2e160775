"""Prompts of an exact number of tokens, counted with the model's own tokenizer and chat template."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = list[dict[str, str]]

# Frequent enough to be one token each in the vocabularies of today's models; those that are not are left out at load.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment
air teacher force education foot boy age policy music market sense nation plan college interest death experience
effect use class control field development role effort rate heart drug show leader light voice wife police mind price
report decision son view relationship town road arm difference value building action season society tax director
position player record paper space ground form event matter center couple site project activity star table need court
oil situation cost industry figure street image phone data picture practice piece land product doctor wall worker news
test movie north love step support century south film treatment source window food century bank tree summer winter
"""


class PromptError(Exception):
    """No prompt of the wanted size can be made, or there is no usable tokenizer; the message says why."""


class ChatTokenizer:
    """Counts tokens as the server does: the model's chat template, then its tokenizer, no special tokens added."""

    def __init__(self, encode: Callable[[str], Sequence[int]], template: str | None, tokens: Mapping[str, str]) -> None:
        self._encode = encode
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(template) if template else None
        self._tokens = dict(tokens)

    @classmethod
    def load(cls, folder: Path) -> "ChatTokenizer":
        """From a model folder with `tokenizer.json`. Raises PromptError when it has none that can be read."""
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            settings = json.loads(_read(folder / "tokenizer_config.json") or "{}")
        except Exception as error:  # the tokenizers library raises plain Exception
            raise PromptError(f"no usable tokenizer in {folder}: {error}") from error
        template = _read(folder / "chat_template.jinja") or settings.get("chat_template")
        if isinstance(template, list):
            template = next((item["template"] for item in template if item.get("name") == "default"), None)
        named = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        return cls(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, template, named)

    def count(self, text: str) -> int:
        return len(self._encode(text))

    def count_chat(self, messages: Messages) -> int:
        """Tokens of the whole prompt, the opening of the answer included: the server's `usage.prompt_tokens`."""
        if self._template is None:
            raise PromptError("this model has no chat template")
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._tokens)
        except TemplateError as error:
            raise PromptError(f"the model's chat template refuses the messages: {error}") from error
        return self.count(text)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


@dataclass(frozen=True, slots=True)
class Frame:
    """The fixed parts of a prompt: the filler goes between `head` and `tail` of the last user message."""

    head: str = ""
    tail: str = ""
    before: tuple[tuple[str, str], ...] = ()  # earlier messages, (role, content)

    def messages(self, filler: str) -> Messages:
        earlier = [{"role": role, "content": content} for role, content in self.before]
        return [*earlier, {"role": "user", "content": f"{self.head}{filler}{self.tail}".strip()}]


class PromptMaker:
    """Fills frames up to an exact size with words drawn by a seeded generator."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        base = tokenizer.count("so")
        self.words = tuple(word for word in dict.fromkeys(_WORDS.split()) if tokenizer.count(f"so {word}") == base + 1)
        if len(self.words) < 20:
            raise PromptError("this tokenizer has too few words of one token to make prompts of an exact size from")

    def filler(self, rng: random.Random, words: int) -> str:
        """`words` words of one token each, every one after a space."""
        return "".join(f" {word}" for word in rng.choices(self.words, k=words))

    def exact(self, frame: Frame, tokens: int, rng: random.Random, start: str = "") -> Messages:
        """Messages that the server counts as `tokens` tokens; `start` is the filler's given beginning.

        Raises PromptError when the fixed parts alone are longer.
        """
        words = start.split(" ")[1:]
        for _ in range(30):
            filler = "".join(f" {word}" for word in words)
            missing = tokens - self.tokenizer.count_chat(frame.messages(filler))
            if missing == 0:
                return frame.messages(filler)
            if missing < 0 and not words:
                raise PromptError(f"a prompt of {tokens} tokens is too short: its fixed parts are {tokens - missing}")
            words = words + rng.choices(self.words, k=missing) if missing > 0 else words[:missing]
        raise PromptError(f"no prompt of exactly {tokens} tokens found")
