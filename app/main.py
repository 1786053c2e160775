"""The application: the only place that wires the deployments together (`import_path: app.main:build`)."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve

from app.config import EngineSettings, Settings, load_settings
from app.controller.deployment import Controller
from app.device import Device
from app.energy.deployment import meter_application
from app.engines.deployment import Engine
from app.modes import EngineSpec

_ENGINE_SHUTDOWN_S = 10.0
"""An engine's channel never ends by itself, so Serve waits this long in vain before it stops a replica."""


def build(args: dict[str, Any]) -> serve.Application:
    """The application for the `args` of `serve_config.yaml`.

    Raises:
        ConfigError: nothing is started; the message says what to change.
    """
    settings = load_settings(args, has_gpu=ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)
    device = serve.deployment(
        Device, name="device", max_ongoing_requests=256, ray_actor_options=_actor(settings, num_cpus=0)
    ).bind(settings)
    ledger_path = settings.energy.ledger_path or settings.home / "ledger.sqlite"
    meter = meter_application(settings.energy, ledger_path, settings.device.resource)
    engines = {spec.name: _engine(spec, settings, device, meter) for spec in settings.engine_specs}
    controller = settings.controller
    return serve.deployment(
        serve.ingress()(Controller),
        name="controller",
        max_ongoing_requests=controller.max_ongoing_requests,
        ray_actor_options={"num_cpus": controller.num_cpus},
        user_config={},
    ).bind(settings, engines, device, meter)


def _engine(
    spec: EngineSpec, settings: Settings, device: serve.Application, meter: serve.Application
) -> serve.Application:
    engine = settings.engine_settings(spec.name)
    return serve.deployment(
        Engine,
        name=spec.name,
        max_ongoing_requests=engine.max_ongoing_requests,
        health_check_period_s=settings.health.period_s,
        health_check_timeout_s=settings.health.timeout_s,
        graceful_shutdown_timeout_s=_ENGINE_SHUTDOWN_S,
        ray_actor_options=_actor(settings, engine.num_cpus, engine),
    ).bind(spec, settings, device, meter)


def _actor(settings: Settings, num_cpus: float, engine: EngineSettings | None = None) -> dict[str, Any]:
    """Ray's actor options: explicit shares, and the device's custom resource where one is configured."""
    resources = dict(engine.resources) if engine else {}
    if settings.device.resource:
        resources[settings.device.resource] = 0.001
    return {"num_cpus": num_cpus, "num_gpus": engine.num_gpus if engine else 0, "resources": resources}
