"""Files that policies decide by: the profile and the trained model, read and checked against what serves here."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from app.config import KnowledgeSettings
from app.routing.policies.learned import Predictor
from app.routing.profile import Profile, ProfileRefused, parse_profile

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What was found, and what was refused and why."""

    model: str
    hardware: str
    profile: Profile | None = None
    predictor: Predictor | None = None
    refused: tuple[str, ...] = ()


def read_knowledge(settings: KnowledgeSettings, model: str, hardware: str) -> Knowledge:
    """The configured files. One that does not fit is refused, with the reason; the application serves without it."""
    hardware = settings.hardware or hardware
    refused: list[str] = []
    profile = _profile(settings.profile, model, hardware, refused)
    predictor = _predictor(settings.trained_model, refused)
    for why in refused:
        log.warning("%s", why)
    return Knowledge(model, hardware, profile, predictor, tuple(refused))


def _profile(path: str | None, model: str, hardware: str, refused: list[str]) -> Profile | None:
    if path is None:
        return None
    if path != "auto":
        return _parse(Path(path), model, hardware, refused)
    reasons: list[str] = []
    for file in _shipped():
        if (profile := _parse(file, model, hardware, reasons)) is not None:
            return profile
    refused.extend(reasons or ["No profile comes with the application."])
    return None


def _shipped() -> Iterable[Path]:
    """Profiles beside the presets."""
    folder = Path(str(resources.files("app.presets") / "profiles"))
    return sorted(folder.glob("*.json"))


def _parse(path: Path, model: str, hardware: str, refused: list[str]) -> Profile | None:
    try:
        return parse_profile(path.read_bytes(), model=model, hardware=hardware)
    except OSError as error:
        refused.append(f"The profile {path} cannot be read: {error.strerror or error}.")
    except ProfileRefused as error:
        refused.append(str(error))
    return None


def _predictor(path: Path | None, refused: list[str]) -> Predictor | None:
    if path is None:
        return None
    from app.controller.trained_model import OnnxPredictor

    try:
        return OnnxPredictor(path)
    except (OSError, ValueError) as error:
        refused.append(f"The trained model {path} cannot be used: {error}")
        return None
