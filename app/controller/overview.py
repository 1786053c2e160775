"""`GET /v1/models` and `GET /v1/modes`: what is served, and how it fares."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from app.controller.choice import Choice
from app.controller.errors import ApiError
from app.controller.links import EngineLink
from app.controller.live_state import STALE_AFTER_S, residency
from app.controller.service import Service
from app.modes import CATALOGUE

_NOT_FOR_TENANTS = frozenset(
    {
        "steps",
        "prompt_tokens",
        "generation_tokens",
        "prefix_queries_tokens",
        "prefix_hits_tokens",
        "draft_tokens",
        "accepted_tokens",
        "preemptions",
        "env",
    }
)
"""What an engine did for all tenants together, less one's own, is what the others asked of it; and the operator's
variables are nobody's business."""


def models(service: Service, created_s: int) -> dict[str, Any]:
    """OpenAI's list of models: the served name, `auto`, and each mode as `<served>:<mode>`."""
    return {"object": "list", "data": [_model(name, created_s, service) for name in service.table.model_ids]}


def model(service: Service, name: str, created_s: int) -> dict[str, Any]:
    """One entry of that list.

    Raises:
        ApiError: 404 when there is none of this name.
    """
    if name not in service.table.model_ids:
        known = ", ".join(service.table.model_ids)
        raise ApiError(404, f"model {name!r} does not exist; there are {known}", code="model_not_found", param="model")
    return _model(name, created_s, service)


async def modes(service: Service, only_of: str | None = None) -> dict[str, Any]:
    """All modes with their engine's state, the engines with load and memory, and the modes this platform lacks.

    Of tenants all, or `only_of` one, who is not shown what engines did for others.
    """
    engines = await asyncio.gather(*(_engine(service, link) for link in service.links))
    if only_of is not None:
        engines = [{name: told for name, told in engine.items() if name not in _NOT_FOR_TENANTS} for engine in engines]
    platform = service.settings.platform
    knowledge = service.router.policies.knowledge
    return {
        "object": "list",
        "model": knowledge.model,
        "hardware": knowledge.hardware,
        "routing": {**service.router.describe(), "settings_error": service.settings_error},
        "tenants": service.tenants.counters(only_of),
        "data": [_mode(service, name, choice) for name, choice in service.table.modes.items()],
        "engines": engines,
        "not_served": [
            {"id": mode.name, "paper_name": mode.paper_name, "reason": mode.unsupported.get(platform, "not configured")}
            for mode in CATALOGUE.values()
            if mode.name not in service.table.modes
        ],
    }


def _model(name: str, created_s: int, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "modeswitch",
        "root": service.settings.model.reference,
        "max_model_len": service.settings.model.max_model_len,
    }


def _mode(service: Service, name: str, choice: Choice) -> dict[str, Any]:
    mode, link = choice
    breaker, retry_in_s = service.router.breaker(name)
    return {
        "id": name,
        "object": "mode",
        "paper_name": mode.paper_name,
        "engine": link.name,
        "state": link.state,
        "residency": residency(link.status).value,
        "weights": link.spec.weights,
        "prefix_reuse": mode.prefix_reuse,
        "lossless": mode.lossless,
        "engine_delta": link.spec.exact_delta(service.settings.model.draft),
        "alias_of": mode.alias_of,
        "alias_reason": mode.alias_reason,
        "breaker": breaker.value,
        "retry_in_s": retry_in_s,
    }


async def _engine(service: Service, link: EngineLink) -> dict[str, Any]:
    status = await link.read_status()
    age_s = time.monotonic() - link.heard_s
    return {
        **(asdict(status) if status else {}),
        "name": link.name,
        "state": status.state if status else link.state,
        "residency": residency(status).value,
        "modes": [mode.name for mode in link.spec.modes],
        "in_flight": len(link.in_flight),
        "reported_s_ago": round(age_s, 1),
        # What routing does not count on any more, whether or not the engine answered just now.
        "report_is_stale": age_s > STALE_AFTER_S,
    }
