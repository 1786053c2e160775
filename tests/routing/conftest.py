from collections.abc import Callable
from typing import Any

import pytest

from app.routing.features import RequestFeatures
from app.routing.mode_info import ModeInfo
from app.routing.profile import Profile, parse_profile
from app.routing.snapshot import EngineView, Snapshot

MODES = (
    ModeInfo("fp16", "fp16", "fp16", lossless=True),
    ModeInfo("prefix_caching", "fp16", "fp16", lossless=True, prefix_reuse=True),
    ModeInfo("int8", "int8", "int8", lossless=False),
    ModeInfo("int8_continuous_batching", "int8", "int8", lossless=False),
    ModeInfo("gptq", "gptq", "gptq", lossless=False),
    ModeInfo("gptq_prefix_caching", "gptq", "gptq", lossless=False, prefix_reuse=True),
    ModeInfo("speculative", "speculative", "fp16", lossless=True, speculative=True),
)
ENGINES = ("fp16", "int8", "gptq", "speculative")


def mode_profile(prefill_ms_per_token: float, step_ms: float, joules: float, **more: Any) -> dict[str, Any]:
    return {
        "prefill_ms": [[1, 5.0], [1001, 5.0 + 1000 * prefill_ms_per_token]],
        "step_ms": [[1, step_ms], [8, step_ms * 1.7]],
        "prefill_j": [[1, joules], [1001, 20 * joules]],
        "decode_j_per_token": [[1, joules], [8, joules / 4]],
        **more,
    }


def profile_content(**changes: Any) -> dict[str, Any]:
    """GPTQ decodes fastest, INT8 prefills fastest and is thriftiest, n-gram speculation pays on rewriting."""
    content = {
        "schema_version": 1,
        "version": "p1",
        "model": "tiny",
        "hardware": "box",
        "modes": {
            "fp16": mode_profile(0.10, 20.0, 4.0, peak_memory_bytes=1000.0),
            "prefix_caching": mode_profile(0.10, 20.0, 4.0, peak_memory_bytes=1005.0),
            "int8": mode_profile(0.07, 12.0, 1.5, peak_memory_bytes=1010.0),
            "int8_continuous_batching": mode_profile(0.07, 12.0, 1.5),
            "gptq": mode_profile(0.14, 8.0, 2.0, peak_memory_bytes=1100.0),
            "gptq_prefix_caching": mode_profile(0.14, 8.0, 2.0),
            "speculative": mode_profile(
                0.12, 22.0, 4.5, speculation={"accepted_per_step": {"rewriting": 2.5}, "default": 0.05}
            ),
        },
        "interference": {one: {other: 1.6 for other in ENGINES if other != one} for one in ENGINES},
        "quality": [
            {"mode": mode.name, "scope": "any", "outcome": "pass", "metric": "kl", "samples": 500}
            for mode in MODES
            if not mode.lossless
        ],
    }
    return {**content, **changes}


@pytest.fixture(scope="session")
def modes() -> tuple[ModeInfo, ...]:
    return MODES


@pytest.fixture(scope="session")
def content() -> Callable[..., dict[str, Any]]:
    return profile_content


@pytest.fixture(scope="session")
def profile() -> Profile:
    return parse_profile(profile_content(), model="tiny", hardware="box")


@pytest.fixture(scope="session")
def snapshot() -> Callable[..., Snapshot]:
    """`snapshot(gptq={"in_flight": 3})`: four idle engines but for what is said; `snapshot(of={...})` for the rest."""

    def make(of: dict[str, Any] | None = None, **engines: dict[str, Any]) -> Snapshot:
        views = {name: EngineView(engine=name, **engines.get(name, {})) for name in ENGINES}
        return Snapshot(engines=views, **(of or {}))

    return make


@pytest.fixture(scope="session")
def features() -> Callable[..., RequestFeatures]:
    def make(**values: Any) -> RequestFeatures:
        return RequestFeatures(**{"prompt_tokens": 100, "expected_output_tokens": 100, **values})

    return make
