"""Everything a user can set, as one validated tree.

`serve_config.yaml` holds a few of these settings under `args`; a preset from `app/presets/` holds the rest, and what
the user says wins over the preset. Unknown keys are errors: a misspelt setting must not be silently ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.energy.rows import TEXT_KEYS
from app.energy.settings import EnergySettings
from app.modes import CATALOGUE, EngineSpec, Mode, Platform, compose, group_into_engines
from app.routing.settings import RoutingSettings

PRESETS = ("cpu", "a100-40gb")
_BYTES_PER_GIB = 2**30
_VLLM_MEMORY_FRACTION = 0.92
"""vLLM's own `gpu_memory_utilization`. Setting the KV cache in bytes does not lift it: an engine starts only where that
much of the device is free."""


class ConfigError(ValueError):
    """A configuration that cannot be served; the message says what to change."""


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=False)


class ModelSettings(_Settings):
    """The one model that all modes serve.

    `reference` is `embedded`, a local folder or a Hugging Face name. `checkpoints` names quantised versions by
    weights (`int8`, `gptq`, `awq`); what is not named is looked up among the prepared checkpoints.
    """

    reference: str = "embedded"
    served_name: str
    checkpoints: dict[Annotated[str, Field(pattern="^(fp16|int8|gptq|awq)$")], str] = {}
    draft: str | None = None
    """Draft model of the speculative modes that use one: a folder or a Hugging Face name."""
    max_model_len: Annotated[int, Field(gt=0)]
    frontend: dict[str, Any] = {}
    """vLLM front-end arguments, such as `tool_call_parser` and `chat_template`."""


class ComposedMode(_Settings):
    """A mode of the user's own: the deltas of catalogue modes, and further vLLM engine arguments."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]*$")]
    of: Annotated[tuple[str, ...], Field(min_length=1)]
    engine_args: dict[str, Any] = {}

    @field_validator("name")
    @classmethod
    def _is_a_key_of_the_ledger(cls, name: str) -> str:
        if name in TEXT_KEYS:
            raise ValueError(f"a mode cannot be named {name!r}: under this word the ledger refuses texts of users")
        return name


class EngineSettings(_Settings):
    """Share and memory of an engine; `engine_args` are vLLM's and win over everything else."""

    num_cpus: Annotated[float, Field(ge=0)] = 0.0
    num_gpus: Annotated[float, Field(ge=0, le=1)] = 0.0
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    kv_cache_memory_bytes: Annotated[int, Field(gt=0)] | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    engine_args: dict[str, Any] = {}
    env: dict[str, str] = {}
    cores: Annotated[str, Field(pattern=r"^(all|\d+(-\d+)?(,\d+(-\d+)?)*)$")] = "all"
    """On a CPU, where its threads run: `all`, a thread fewer than there are cores and none bound; or a thread bound to
    each of a list, `0-3` or `0,2`."""
    max_ongoing_requests: Annotated[int, Field(gt=1)] = 1024


class CpuSettings(_Settings):
    """How engines run on a CPU."""

    preload: tuple[str, ...] = ("libtcmalloc_minimal.so.4", "libiomp5.so")
    """Shared libraries loaded ahead of the engine's; those not found are left out."""


class HealthSettings(_Settings):
    """When a running engine counts as dead. Serve asks every `period_s`; see `app/engines/health.py`."""

    period_s: Annotated[float, Field(gt=0)] = 4.0
    timeout_s: Annotated[float, Field(gt=0)] = 30.0
    stalled_after_s: Annotated[float, Field(gt=0)] = 10.0
    stuck_after_s: Annotated[float, Field(gt=0)] = 300.0


class RestartSettings(_Settings):
    """Pauses between attempts to start an engine: `first_s`, doubled each time, up to `longest_s`."""

    first_s: Annotated[float, Field(gt=0)] = 5.0
    longest_s: Annotated[float, Field(gt=0)] = 300.0


class ControllerSettings(_Settings):
    """Limits of the ingress."""

    max_body_bytes: Annotated[int, Field(gt=0)] = 8 * 2**20
    max_ongoing_requests: Annotated[int, Field(gt=1)] = 2048
    num_cpus: Annotated[float, Field(ge=0)] = 0.1
    exact_below_chars: Annotated[int, Field(gt=0)] = 100_000
    """Prompts from this size on are not tokenised before they are routed; their tokens are estimated."""
    policy_header: bool = True
    """Whether `x-modeswitch-policy` lets a request choose the policy that decides it."""


class TenantLimits(_Settings):
    """What one tenant may use."""

    model_config = ConfigDict(allow_inf_nan=False)

    tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    """Prompt and output tokens on the long run; None: no limit."""
    burst_tokens: Annotated[float, Field(gt=0)] | None = None
    """How many at once; by default a minute's worth."""
    share: Annotated[float, Field(gt=0)] = 1.0
    """Weight against other tenants: with 2 it is served twice as much before it has to wait for them."""


class LiveSettings(_Settings):
    """What may change while the application serves: Serve's `user_config` of the deployment `controller`.

    A change reaches the controller alone; no engine is restarted.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    policy: str = "cost"
    """`cost`, `rules`, `rules_published`, `learned` or `static:<mode>`."""
    shadows: tuple[str, ...] = ()
    """Policies that are asked and logged beside it, never followed."""
    routing: RoutingSettings = RoutingSettings()
    queue_limit: Annotated[int, Field(gt=0)] = 256
    """Requests sent to one engine and not finished, at most."""
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Of every request, unless it brings a shorter one (`x-modeswitch-deadline-ms`)."""
    tenants: dict[str, TenantLimits] = {}


class KnowledgeSettings(_Settings):
    """Files that policies decide by."""

    profile: str | None = "auto"
    """A profile's path; `auto` takes the one that comes with the application, if it fits; None: none."""
    trained_model: Path | None = None
    """Of the policy `learned`: what `python -m loadgen train` wrote."""
    hardware: str | None = None
    """Take this as the hardware's name when profiles are checked; None: ask the device."""


class AuthSettings(_Settings):
    """API keys; with none, everybody is let in (see `app/controller/tenants.py` for the formats)."""

    keys_env: str = "MODESWITCH_API_KEYS"
    keys_file: Path | None = None
    admins: tuple[str, ...] = ()
    """Tenants whose keys open `/admin`, and show all tenants' figures; without keys everybody does."""


class DeviceSettings(_Settings):
    """The device that all engines share. `resource` pins them to one node or GPU through a custom Ray resource."""

    resource: str | None = None
    lease_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """How long one start may hold the device: then it has failed, and the next engine starts."""


class Settings(_Settings):
    """The whole configuration after the preset is applied."""

    preset: Literal["cpu", "a100-40gb"]
    platform: Platform
    model: ModelSettings
    modes: Annotated[tuple[str | ComposedMode, ...], Field(min_length=1)]
    share_engines: bool = True
    home: Path = Field(default_factory=lambda: default_home())
    engine_defaults: EngineSettings = EngineSettings()
    engines: dict[str, dict[str, Any]] = {}
    """Settings of single engines by name, on top of `engine_defaults`."""
    cpu: CpuSettings = CpuSettings()
    health: HealthSettings = HealthSettings()
    restart: RestartSettings = RestartSettings()
    controller: ControllerSettings = ControllerSettings()
    live: LiveSettings = LiveSettings()
    knowledge: KnowledgeSettings = KnowledgeSettings()
    auth: AuthSettings = AuthSettings()
    energy: EnergySettings = EnergySettings()
    device: DeviceSettings = DeviceSettings()

    @cached_property
    def resolved_modes(self) -> tuple[Mode, ...]:
        """The modes to serve, in the user's order."""
        return tuple(_resolve(mode) for mode in self.modes)

    @cached_property
    def engine_specs(self) -> tuple[EngineSpec, ...]:
        """The engines these modes need, in start order."""
        return group_into_engines(self.resolved_modes, self.platform, self.share_engines)

    def engine_settings(self, name: str) -> EngineSettings:
        """`engine_defaults` with what `engines.<name>` changes."""
        base = self.engine_defaults.model_dump()
        return EngineSettings.model_validate(_merge(base, self.engines.get(name, {})))

    def check_names(self, live: LiveSettings) -> None:
        """Check that live settings name modes that there are: a misspelt one would silently do nothing.

        Raises:
            ValueError: a policy's mode is not among the modes, or a mode is unknown.
        """
        names = {mode.name for mode in self.resolved_modes}
        for policy in (live.policy, *live.shadows):
            if policy.startswith("static:") and policy.removeprefix("static:") not in names:
                raise ValueError(f"policy {policy!r}: its mode is not among the modes")
        known = {*names, *CATALOGUE}
        for setting, modes in (
            ("accepted_modes", live.routing.accepted_modes),
            ("reference_mode", {live.routing.reference_mode}),
        ):
            if unknown := modes - known:
                raise ValueError(f"routing.{setting}: there is no mode named {', '.join(sorted(unknown))}")

    @model_validator(mode="after")
    def _check(self) -> Self:
        engines = {spec.name for spec in self.engine_specs}
        self.check_names(self.live)
        if unknown := set(self.engines) - engines:
            raise ValueError(f"engines: no engine named {', '.join(sorted(unknown))}; there are {', '.join(engines)}")
        for spec in self.engine_specs:
            if spec.draft_model and self.model.draft is None:
                raise ValueError(f"engine {spec.name!r} speculates with a draft model: set model.draft")
        self._check_device_fits()
        return self

    def _check_device_fits(self) -> None:
        """Refuse, with a table, shares that cannot be had together; nothing has started yet.

        vLLM reads `gpu_memory_utilization` as a fraction of the whole device for each engine, so the sum counts.
        """
        each = {spec.name: self.engine_settings(spec.name) for spec in self.engine_specs}
        fractions = {spec.name: self._memory_fraction(spec) for spec in self.engine_specs}
        shares = sum(settings.num_gpus for settings in each.values())
        total = sum(fraction or 0.0 for fraction in fractions.values())
        if self.platform == "cuda":
            total += _VLLM_MEMORY_FRACTION * list(fractions.values()).count(None)
        if shares <= 1 + 1e-9 and total <= 1 + 1e-9:
            return
        rows = [f"{'engine':<26}{'num_gpus':>9}{'gpu_memory_utilization':>24}{'KV GiB':>9}"]
        for name, settings in each.items():
            kv_gib = settings.kv_cache_memory_bytes and settings.kv_cache_memory_bytes / _BYTES_PER_GIB
            rows.append(
                f"{name:<26}{settings.num_gpus:>9.2f}{self._show(fractions[name]):>24}"
                f"{'-' if kv_gib is None else f'{kv_gib:.2f}':>9}"
            )
        rows.append(f"{'sum (at most 1)':<26}{shares:>9.2f}{total:>24.2f}")
        if self.platform == "cuda" and None in fractions.values():
            rows.append(
                f"Where gpu_memory_utilization is not set, vLLM takes {_VLLM_MEMORY_FRACTION}, also beside "
                "kv_cache_memory_bytes: set it in engine_defaults or in engines.<name>."
            )
        raise ValueError("the engines do not fit on one device:\n" + "\n".join(rows))

    def _memory_fraction(self, spec: EngineSpec) -> float | None:
        """What the engine will be given as `gpu_memory_utilization` (see `vllm_args`); None: vLLM's own."""
        settings = self.engine_settings(spec.name)
        own = self.engines.get(spec.name, {}).get("engine_args", {})
        fraction: object = settings.gpu_memory_utilization
        for args in (self.engine_defaults.engine_args, spec.delta, own):
            fraction = args.get("gpu_memory_utilization", fraction)
        if fraction is None:
            return None
        if not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ValueError(f"engine {spec.name!r}: gpu_memory_utilization must be in (0, 1], not {fraction!r}")
        return float(fraction)

    def _show(self, fraction: float | None) -> str:
        if fraction is not None:
            return f"{fraction:.2f}"
        return f"not set: {_VLLM_MEMORY_FRACTION}" if self.platform == "cuda" else "-"


def load_settings(args: Mapping[str, Any], has_gpu: bool = False) -> Settings:
    """Settings from the `args` of `serve_config.yaml`, on top of the preset they name (`auto` by default).

    Raises:
        ConfigError: an unknown preset or key, a value out of range, or engines that do not fit.
    """
    chosen = args.get("preset", "auto")
    if chosen == "auto":
        chosen = "a100-40gb" if has_gpu else "cpu"
    if chosen not in PRESETS:
        raise ConfigError(f"preset {chosen!r} is unknown; there are auto, {', '.join(PRESETS)}")
    preset = yaml.safe_load(resources.files("app.presets").joinpath(f"{chosen}.yaml").read_text())
    try:
        return Settings.model_validate(_merge(preset, {**args, "preset": chosen}))
    except ValidationError as error:
        raise _config_error("the configuration", error) from None


def load_live(base: LiveSettings, user_config: Mapping[str, Any]) -> LiveSettings:
    """`base` with what Serve's `user_config` changes.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    try:
        return LiveSettings.model_validate(_merge(base.model_dump(mode="json"), user_config))
    except ValidationError as error:
        raise _config_error("user_config", error) from None


def _config_error(what: str, error: ValidationError) -> ConfigError:
    lines = [f"  {'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()]
    return ConfigError(f"{what} is not valid:\n" + "\n".join(lines))


def default_home() -> Path:
    """Where checkpoints, caches and logs live: `MODESWITCH_HOME`, or the user's cache folder."""
    if home := os.environ.get("MODESWITCH_HOME"):
        return Path(home).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has a relative path ignored.
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "modeswitch"


def _resolve(mode: str | ComposedMode) -> Mode:
    if isinstance(mode, str):
        return _catalogued(mode)
    if mode.name in CATALOGUE:
        raise ValueError(f"mode {mode.name!r} is in the catalogue; a composed mode needs a name of its own")
    return compose(mode.name, [_catalogued(part) for part in mode.of], mode.engine_args)


def _catalogued(name: str) -> Mode:
    if name not in CATALOGUE:
        raise ValueError(f"mode {name!r} is unknown; there are {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top; mappings merge key by key, anything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
