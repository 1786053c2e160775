"""What a server says it serves, as routing and a calibration need it: read from `GET /v1/modes`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from app.routing.mode_info import ModeInfo
from app.routing.settings import RoutingSettings
from loadgen.calibration_plan import Engine
from loadgen.server_facts import NothingServed

_UNKNOWN_CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Served:
    """What the server says it serves: ready modes, their engines, and the names the profile is filed under."""

    modes: tuple[ModeInfo, ...]
    engines: tuple[Engine, ...]
    model: str
    hardware: str
    longest_tokens: int

    @property
    def carried(self) -> dict[str, list[str]]:
        """Modes by engine."""
        return {one.name: [mode.name for mode in self.modes if mode.engine == one.name] for one in self.engines}


def read_served(overview: Mapping[str, Any], model: str | None, hardware: str | None) -> Served:
    """From `GET /v1/modes`; model and hardware given by the user win.

    Raises NothingServed when no mode is ready, or when a name is neither told nor given.
    """
    modes = read_modes(overview)
    if not modes:
        raise NothingServed("the server has no mode that is ready")
    names = {"model": model or overview.get("model"), "hardware": hardware or overview.get("hardware")}
    for what, name in names.items():
        if not isinstance(name, str) or not name:
            raise NothingServed(f"the server does not say its {what}: give --{what} NAME")
    lengths = [(one.get("engine_args") or {}).get("max_model_len") for one in _states(overview).values()]
    longest = min((int(length) for length in lengths if length), default=_UNKNOWN_CONTEXT_TOKENS)
    states = _states(overview)
    engines = tuple(replace(one, plain=_plain_of(one, states)) for one in engines_of(modes))
    return Served(modes, engines, str(names["model"]), str(names["hardware"]), longest)


def read_modes(overview: Mapping[str, Any]) -> tuple[ModeInfo, ...]:
    """The modes that are ready, from `GET /v1/modes`."""
    states = _states(overview)
    return tuple(
        ModeInfo(
            str(one["id"]),
            str(one.get("engine") or one["id"]),
            str(one.get("weights") or "fp16"),
            lossless=bool(one.get("lossless")),
            prefix_reuse=bool(one.get("prefix_reuse")),
            speculative=bool((one.get("engine_delta") or {}).get("speculative_config"))
            or _draws_drafts(states.get(str(one.get("engine")), {})),
        )
        for one in overview.get("data") or ()
        if one.get("state") == "ready"
    )


def engines_of(modes: Sequence[ModeInfo]) -> tuple[Engine, ...]:
    """The engines that carry these modes, each asked through the first of its own."""
    firsts: dict[str, Engine] = {}
    for mode in modes:
        firsts.setdefault(mode.engine, Engine(mode.engine, mode.name, mode.speculative))
    return tuple(firsts.values())


def _plain_of(engine: Engine, states: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The engine that runs with equal arguments and no drafts; None where a draft model reads the prompts as well."""
    args = states.get(engine.name, {}).get("engine_args") or {}
    if (args.get("speculative_config") or {}).get("method") != "ngram":
        return None
    alike = {name: _without_drafts(state.get("engine_args") or {}) for name, state in states.items()}
    return next((name for name in alike if name != engine.name and alike[name] == alike[engine.name]), None)


def _without_drafts(args: Mapping[str, Any]) -> dict[str, Any]:
    # Reuse of prefixes changes what is computed and not how fast.
    return {name: value for name, value in args.items() if name not in ("speculative_config", "enable_prefix_caching")}


def _states(overview: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {str(one.get("name")): one for one in overview.get("engines") or () if isinstance(one, dict)}


def read_settings(overview: Mapping[str, Any]) -> tuple[RoutingSettings, str | None]:
    """The settings that the server routes by; the defaults and a sentence about it where it does not tell its own."""
    routing = overview.get("routing")
    routing = routing if isinstance(routing, dict) else {}
    defaults = RoutingSettings()
    if isinstance(told := routing.get("settings"), dict):
        try:
            return RoutingSettings.model_validate(told), None
        except ValidationError:
            return defaults, "The server's routing settings are unknown here: the answer supposes the defaults."
    if routing.get("settings_version") == defaults.version:
        return defaults, None
    return defaults, "The server does not tell its routing settings: the answer supposes the defaults."


def _draws_drafts(state: Mapping[str, Any]) -> bool:
    """A draft model is an engine argument of its own, which the mode's delta need not show."""
    return bool((state.get("engine_args") or {}).get("speculative_config"))
