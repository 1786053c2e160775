"""What a server says of itself: its models, its modes and engines, and where its tokenizer lies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.client import OpenAIClient, ServerFault
from loadgen.prompts import PromptError
from loadgen.records import Outcome

_NO_SUCH_PAGE = frozenset({404, 405, 501})


class NothingServed(Exception):
    """The server answers, but lists no model or not the modes that are needed; the message says which."""


async def overview_of(client: OpenAIClient) -> dict[str, Any]:
    """The answer of `GET /v1/modes`. Raises NothingServed at a server that has no such page, and ServerFault."""
    found = await _overview(client)
    if found is None:
        raise NothingServed(
            f"{client.base_url} has no modes (GET /v1/modes), and this command measures modes: "
            "`run`, `sweep` and `quality` take any server"
        )
    return found


async def _overview(client: OpenAIClient) -> dict[str, Any] | None:
    try:
        return await client.get_json("/v1/modes", timeout_s=30.0)
    except ServerFault as fault:
        if fault.status in _NO_SUCH_PAGE or fault.outcome is Outcome.NOT_JSON:
            return None
        raise


def model_name(served: str, mode: str) -> str:
    """What a request names for a mode. `served` is empty at a server without modes: there every model counts as one."""
    return f"{served}:{mode}" if served else mode


async def served_name(client: OpenAIClient) -> str:
    """The `served` of `model_name`. Raises ServerFault, or NothingServed for a server with modes and no model."""
    return "" if await _overview(client) is None else await first_model(client)


async def first_model(client: OpenAIClient) -> str:
    """The first name that `GET /v1/models` lists. Raises ServerFault, or NothingServed for an empty list."""
    models = _objects(await client.get_json("/v1/models"), "data")
    if not models:
        raise NothingServed(f"{client.base_url}/v1/models lists no model")
    return str(models[0].get("id"))


async def ready_modes(client: OpenAIClient) -> list[str]:
    """Modes that can be asked for now, in the server's order; the models of a server without modes.

    Raises ServerFault.
    """
    overview = await _overview(client)
    if overview is None:
        return [str(item.get("id")) for item in _objects(await client.get_json("/v1/models"), "data")]
    data = _objects(overview, "data")
    return [str(item.get("id")) for item in data if item.get("state") == "ready"]


def require_reference(reference: str, modes: Sequence[str]) -> None:
    """Raises NothingServed where the mode that others are compared with is not among those that are measured."""
    if reference not in modes:
        raise NothingServed(
            f"the reference mode {reference!r} is not among: {', '.join(modes) or 'none'}; name one with --reference"
        )


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
