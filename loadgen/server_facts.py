"""What a server says of itself: its models, its modes and engines, and where its tokenizer lies."""

from pathlib import Path
from typing import Any

from loadgen.client import OpenAIClient, ServerFault
from loadgen.prompts import PromptError


class NothingServed(Exception):
    """The server answers, but lists no model or not the modes that are needed; the message says which."""


async def first_model(client: OpenAIClient) -> str:
    """The first name that `GET /v1/models` lists. Raises ServerFault, or NothingServed for an empty list."""
    models = _objects(await client.get_json("/v1/models"), "data")
    if not models:
        raise NothingServed(f"{client.base_url}/v1/models lists no model")
    return str(models[0].get("id"))


async def ready_modes(client: OpenAIClient) -> list[str]:
    """Modes that can be asked for now, in the server's order. Raises ServerFault at a server without modes."""
    data = _objects(await client.get_json("/v1/modes"), "data")
    return [str(item.get("id")) for item in data if item.get("state") == "ready"]


async def engines(client: OpenAIClient) -> list[dict[str, Any]] | None:
    """State, load and memory of every engine; None at a server that has no such page."""
    try:
        return _objects(await client.get_json("/v1/modes"), "engines")
    except ServerFault:
        return None


async def tokenizer_folder(client: OpenAIClient) -> Path:
    """The model folder of one of the application's engines. Raises PromptError where the server does not say."""
    for engine in await engines(client) or []:
        args = engine.get("engine_args")
        if isinstance(args, dict) and "model" in args:
            return Path(str(args["model"]))
    raise PromptError(f"{client.base_url} does not name its model's folder: give --tokenizer FOLDER")


def _objects(answer: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = answer.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
