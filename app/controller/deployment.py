"""The ingress deployment: one replica that owns the links to all engines and answers HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from app.config import Settings
from app.controller.links import EngineLink
from app.controller.routes import create_app
from app.controller.service import Service
from app.controller.tokens import TokenCounter
from app.engines import store

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")


class Controller:
    """Serves the OpenAI API (`serve.ingress()` asks it for the application once it is constructed)."""

    def __init__(self, settings: Settings, engines: Mapping[str, DeploymentHandle]) -> None:
        links = [EngineLink(spec, engines[spec.name]) for spec in settings.engine_specs]
        self._service = Service(settings, links, _token_counter(settings))
        loop = asyncio.get_running_loop()
        self._following = [loop.create_task(link.follow()) for link in links]

    def __serve_build_asgi_app__(self) -> Starlette:
        return create_app(self._service)


def _token_counter(settings: Settings) -> TokenCounter | None:
    """The model's tokenizer; without one the engines still count, and requests are served."""
    template = settings.model.frontend.get("chat_template")
    try:
        folder = store.resolve(settings.model.reference, "fp16", settings.model.checkpoints, settings.home)
        return TokenCounter(tokenizer_folder(folder), template)
    except Exception as error:
        log.warning("prompt tokens cannot be counted before generation: %s", error)
        return None


def tokenizer_folder(reference: str) -> Path:
    """The folder with the tokenizer's files: the model's own, or a download from the Hugging Face hub."""
    if Path(reference).is_dir():
        return Path(reference)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(reference, allow_patterns=["tokenizer*", "chat_template*", "config.json"]))
