"""What a request's `model` asks for, and which engine carries which mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from app.controller.errors import ApiError
from app.controller.links import EngineLink
from app.modes import CATALOGUE, CarriedMode

AUTO = "auto"


class Choice(NamedTuple):
    """A mode and the engine that carries it."""

    mode: CarriedMode
    link: EngineLink


class ModeTable:
    """The modes that are served, by name, in the order of the configuration."""

    def __init__(self, served_name: str, links: Iterable[EngineLink], order: Iterable[str]) -> None:
        carried = {mode.name: Choice(mode, link) for link in links for mode in link.spec.modes}
        self.served_name = served_name
        self.modes: Mapping[str, Choice] = {name: carried[name] for name in order}

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Everything `model` may be."""
        return (self.served_name, AUTO, *(f"{self.served_name}:{name}" for name in self.modes))

    def named(self, model: str | None) -> str | None:
        """The mode that `model` names, or None where the policy decides.

        Raises:
            ApiError: 404 for a model or mode that is not served.
        """
        if model is None or model in (AUTO, self.served_name):
            return None
        served, colon, mode = model.rpartition(":")
        if colon and served.strip() == self.served_name:
            mode = mode.strip()
            if mode in self.modes:
                return mode
            if mode == AUTO:
                return None
            why = "is not served here" if mode in CATALOGUE else "is unknown"
            raise _not_found(f"mode {mode!r} {why}; there are {', '.join(self.modes)}")
        raise _not_found(f"model {model!r} does not exist; there are {', '.join(self.model_ids)}")

    def states(self, mode: str | None = None) -> str:
        """What the engines (of one mode, or all) are doing, for a refusal."""
        choices = [self.modes[mode]] if mode is not None else self.modes.values()
        links = {choice.link.name: choice.link for choice in choices}
        return "; ".join(
            f"{link.name} is {link.state}" + (f" ({link.status.reason})" if link.status and link.status.reason else "")
            for link in links.values()
        )


def _not_found(message: str) -> ApiError:
    return ApiError(404, message, code="model_not_found", param="model")
