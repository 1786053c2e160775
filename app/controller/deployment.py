"""The ingress deployment: one replica that owns the links to all engines and answers HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette

from app.config import Settings, load_live
from app.controller.accounts import HandleAccounts
from app.controller.knowledge import Knowledge, read_knowledge
from app.controller.links import EngineLink
from app.controller.past import read_past
from app.controller.routes import create_app
from app.controller.service import Service
from app.controller.tenants import Keys, Tenants
from app.controller.token_costs import token_costs
from app.controller.tokens import TokenCounter
from app.energy.client import HandlePort, RecordSender, WeightSender
from app.engines import store
from app.telemetry import CONTROLLER_METRICS, RayTelemetry

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")
_READ_DEVICE_EVERY_S = 2.0
_READ_DEVICE_WITHIN_S = 5.0
_ASK_AGAIN_AFTER_S = 1.0
_LOOK_FOR_TOKENIZER_EVERY_S = 10.0
_REMEMBERED_REQUESTS = 1000
_REMEMBER_WITHIN_S = 60.0
"""A meter that begins with the controller answers once it is there."""


class Controller:
    """Serves the OpenAI API (`serve.ingress()` asks it for the application once it is constructed)."""

    def __init__(
        self,
        settings: Settings,
        engines: Mapping[str, DeploymentHandle],
        device: DeploymentHandle,
        meter: DeploymentHandle,
    ) -> None:
        self._settings = settings
        self._device = device
        self._model = settings.model.reference
        self._live = settings.live
        self._refused: str | None = None
        """Why the last `user_config` was not taken."""
        self._knows_hardware = False
        links = [EngineLink(spec, engines[spec.name]) for spec in settings.engine_specs]
        records = RecordSender(HandlePort(meter))
        self._weights = WeightSender(HandlePort(meter))
        self._accounts = HandleAccounts(meter)
        self._service = Service(
            # Until the files are read, a policy that is made from them cannot decide.
            settings.model_copy(update={"live": settings.live.model_copy(update={"policy": "cost", "shadows": ()})}),
            links,
            None,
            Tenants(Keys.load(settings.auth), settings.live.tenants, settings.auth.admins),
            records,
            RayTelemetry(CONTROLLER_METRICS),
            Knowledge(self._model, "", refused=("The hardware is not known yet.",)),
        )
        loop = asyncio.get_running_loop()
        self._running = [loop.create_task(link.follow()) for link in links]
        others = (records.run(), self._weights.run(), self._watch_device(), self._read_tokenizer(), self._remember())
        self._running += [loop.create_task(each) for each in others]

    def __serve_build_asgi_app__(self) -> Starlette:
        return create_app(self._service, self._accounts)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve with `user_config`, at the start and whenever it changes; no engine is touched.

        Serve takes a replica down whose `reconfigure` fails, so what is not valid is logged and shown in `/v1/modes`,
        and the present settings stay.
        """
        try:
            live = load_live(self._settings.live, user_config)
            self._settings.check_names(live)
        except ValueError as error:
            self._refused = str(error)
            self._service.refuse_settings(self._refused)
            return
        self._live, self._refused = live, None
        if self._knows_hardware:
            self._service.change(self._live)

    async def _remember(self) -> None:
        """Learn again what the requests before this controller taught; requests are served meanwhile, and without."""
        try:
            asking = self._accounts.past(self._model, _REMEMBERED_REQUESTS)
            rows = await asyncio.wait_for(asking, _REMEMBER_WITHIN_S)
            past, damaged = read_past(rows, time.time())
            count = self._service.router.remember(past, time.monotonic())
        except Exception as error:
            # Ray's error has the traceback from the other side before what it says.
            why = str(error).strip().rpartition("\n")[2]
            log.warning("nothing is learned again from earlier requests: %s: %s", type(error).__name__, why)
            return
        told = "learned again from %d earlier requests; passed over: %d of modes not deployed, %d damaged rows"
        log.log(logging.WARNING if damaged else logging.INFO, told, count, len(past) - count, damaged)

    async def _read_tokenizer(self) -> None:
        """Count tokens as soon as the model's files are there; until then they are estimated, and requests served."""
        told = ""
        while True:
            try:
                self._service.count_with(await asyncio.to_thread(_token_counter, self._settings))
                return
            except Exception as error:
                if (why := str(error)) != told:
                    log.warning("prompt tokens are estimated until the tokenizer can be read: %s", why)
                told = why
                await asyncio.sleep(_LOOK_FOR_TOKENIZER_EVERY_S)

    async def _watch_device(self) -> None:
        """Learn what the hardware is, read the files that fit it, then follow the device's memory."""
        while True:
            try:
                if not self._knows_hardware:
                    hardware = await self._device.identify.remote()
                    knowledge = read_knowledge(self._settings.knowledge, self._model, hardware)
                    self._service.change(knowledge=knowledge)
                    self._service.change(self._live)
                    if self._refused is not None:
                        self._service.refuse_settings(self._refused)
                    self._weights.put(*token_costs(knowledge.profile, self._settings.engine_specs))
                    self._knows_hardware = True
                self._service.tell_gauges()
                reading = await asyncio.wait_for(self._device.read.remote(), _READ_DEVICE_WITHIN_S)
                self._service.router.device_bytes = (reading.total_bytes, reading.free_bytes)
                await asyncio.sleep(_READ_DEVICE_EVERY_S)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # What was free some time ago decides nothing: unknown is unknown.
                self._service.router.device_bytes = (None, None)
                log.warning("the device cannot be read: %s", error or type(error).__name__)
                await asyncio.sleep(_ASK_AGAIN_AFTER_S)


def _token_counter(settings: Settings) -> TokenCounter:
    """The model's tokenizer.

    Raises:
        Exception: the model was not prepared, cannot be downloaded, or its tokenizer is of a kind that is not known.
    """
    folder = store.resolve(settings.model.reference, "fp16", settings.model.checkpoints, settings.home)
    return TokenCounter(tokenizer_folder(folder), settings.model.frontend)


def tokenizer_folder(reference: str) -> Path:
    """The folder with the tokenizer's files: the model's own, or a download from the Hugging Face hub."""
    if Path(reference).is_dir():
        return Path(reference)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(reference, allow_patterns=["tokenizer*", "chat_template*", "config.json"]))
