"""Counting prompt tokens as the engine will, with the `tokenizers` library and the model's own chat template.

No torch and no transformers: the controller's process stays small. The rendering follows vLLM's Hugging Face
renderer (`vllm/renderers/hf.py`) for text: parts are joined by line breaks unless the template reads them itself, tools
are written with the fields of its classes, and tool arguments are parsed. What it would render otherwise than here is
`Uncountable`, and becomes an estimate.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind a message that is to be continued, to find in the rendered text where it ends; as transformers does."""

_READS_PARTS = re.compile(r"""\bfor\s+\w+\s+in\s+\w+(\.content\b|\[\s*['"]content['"]\s*\])""")
"""In a chat template, a loop over the parts of a message's content."""


class Uncountable(ValueError):
    """A prompt whose tokens cannot be counted here; the engine decides what it is worth."""


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; when serving it only has to be passed through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def prompts_of(body: Mapping[str, Any]) -> list[Any]:
    """A completion's prompts: one text, one list of token ids, or a list of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


class TokenCounter:
    """Counts for one model, read from its folder: `tokenizer.json`, `tokenizer_config.json`, the chat template."""

    def __init__(self, folder: Path, frontend: Mapping[str, Any] | None = None) -> None:
        """`frontend` are the fields of vLLM's `FrontendArgs` that the engines get."""
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        self._special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in config.items()
            if key.endswith("_token") and isinstance(value, str | dict)
        }
        frontend = frontend or {}
        self._default_variables = frontend.get("default_chat_template_kwargs") or {}
        self._tools_unless_none = bool(frontend.get("exclude_tools_when_tool_choice_none"))
        source = _configured(frontend.get("chat_template")) or _chat_template(folder, config)
        self._template = _environment().from_string(source) if source else None
        given = frontend.get("chat_template_content_format", "auto")
        self._reads_parts = given == "openai" or (given == "auto" and bool(_READS_PARTS.search(source or "")))

    def count(self, body: Mapping[str, Any]) -> list[int]:
        """Tokens of each of a completion's prompts.

        Raises:
            Uncountable: one is neither text nor token ids.
        """
        add_special_tokens = bool(body.get("add_special_tokens", True))
        return [self._count_prompt(prompt, add_special_tokens) for prompt in prompts_of(body)]

    def count_text(self, text: str, body: Mapping[str, Any]) -> int:
        """Tokens of a rendered chat."""
        return len(self.encode(text, bool(body.get("add_special_tokens", False))))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def render(self, body: Mapping[str, Any]) -> str:
        """The prompt text of a chat request.

        Raises:
            Uncountable: it is not all text, or the chat template refuses it.
        """
        if self._template is None or body.get("chat_template") is not None:
            raise Uncountable("the chat template is not the model's")
        try:
            messages = [_message(message, self._reads_parts) for message in body["messages"]]
            variables = {**self._special, **self._variables(body), "messages": messages}
            if not body.get("continue_final_message"):
                return self._template.render(variables)
            if variables["add_generation_prompt"]:
                raise Uncountable("a message is either continued or followed by another")
            if self._reads_parts:
                raise Uncountable("the message that is continued is in parts")
            messages[-1]["content"] += _CONTINUE
            return _up_to_continued(self._template.render(variables))
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise Uncountable(str(error)) from error

    def _variables(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the template may use beside messages; fields of their own win over `chat_template_kwargs`."""
        given = body.get("chat_template_kwargs") or {}
        effort = body.get("reasoning_effort")
        own = {
            "add_generation_prompt": body.get("add_generation_prompt", True),
            "documents": body.get("documents"),
            "reasoning_effort": effort,
            "enable_thinking": effort != "none" if effort is not None and "enable_thinking" not in given else None,
        }
        own = {name: value for name, value in own.items() if value is not None}
        hidden = self._tools_unless_none and body.get("tool_choice") == "none"
        tools = None if hidden else [_tool(tool) for tool in body.get("tools") or ()]
        return {"tools": tools or None, "documents": None, **self._default_variables, **given, **own}

    def _count_prompt(self, prompt: Any, add_special_tokens: bool) -> int:
        match prompt:
            case str():
                return len(self.encode(prompt, add_special_tokens))
            case [int(), *_]:
                return len(prompt)
        raise Uncountable("the prompt is neither text nor token ids")


def _configured(template: str | None) -> str | None:
    """vLLM takes a template, or the path of one."""
    if template is None or any(character in template for character in "{}\n"):
        return template
    return Path(template).read_text()


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for (transformers' `chat_template_utils`)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: dt.datetime.now().strftime(pattern)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _up_to_continued(text: str) -> str:
    """A rendered chat up to the end of the message that is to be continued."""
    # A template that trims messages has trimmed the mark as well.
    end = text.rindex(_CONTINUE.strip())
    return text[:end] if text.startswith(_CONTINUE, end) else text[:end].rstrip()


def _message(message: Mapping[str, Any], in_parts: bool) -> dict[str, Any]:
    """A message as vLLM hands it to the template: what it knows of the role, and nothing else.

    `in_parts` is for a template that goes through the parts of a content itself.
    """
    role, content = message["role"], message.get("content")
    if role == "developer" or message.keys() & {"reasoning", "reasoning_content"}:
        raise Uncountable("what becomes of it depends on the template")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or "text" not in part for part in content):
            raise Uncountable("the message holds more than text")
        content = [part["text"] for part in content]
    given = content if isinstance(content, list) else [content]
    texts = [text for text in given if text or (in_parts and text is not None)]
    wrapped = [{"type": "text", "text": text} for text in texts]
    rendered = {"role": role, "content": wrapped if in_parts and role != "tool" else "\n".join(texts)}
    rendered |= {key: message[key] for key in ("name", "task") if isinstance(message.get(key), str)}
    if role == "assistant" and (calls := message.get("tool_calls")):
        rendered["tool_calls"] = [_tool_call(call) for call in calls]
    if role == "tool" and "tool_call_id" in message:
        rendered["tool_call_id"] = message["tool_call_id"]
    return rendered


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments if isinstance(arguments, dict) else {}}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as vLLM's classes write it: their fields in their order, `null` where there is no description."""
    function, deferred = tool["function"], tool.get("defer_loading")
    written = {name: function.get(name) for name in ("name", "description", "parameters")}
    optional = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", deferred)}
    written |= {name: value for name, value in optional.items() if value is not None}
    outer = {"type": "function", "function": written}
    return outer if deferred is None else {**outer, "defer_loading": deferred}
