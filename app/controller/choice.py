"""Which mode a request names, and which engine carries it."""

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

    def __init__(self, served_name: str, links: Iterable[EngineLink], order: Iterable[str], default_mode: str) -> None:
        carried = {mode.name: Choice(mode, link) for link in links for mode in link.spec.modes}
        self.served_name = served_name
        self.modes: Mapping[str, Choice] = {name: carried[name] for name in order}
        self._preferred = (default_mode, *(name for name in self.modes if name != default_mode))

    @property
    def model_ids(self) -> tuple[str, ...]:
        """Everything `model` may be."""
        return (self.served_name, AUTO, *(f"{self.served_name}:{name}" for name in self.modes))

    def candidates(self, model: str | None) -> tuple[Choice, ...]:
        """The modes to try for this `model`, best first; those whose engine is not ready are left out.

        Raises:
            ApiError: 404 for a model or mode that is not served, 503 when no engine for it is ready.
        """
        named = self._named(model)
        names = self._preferred if named is None else (named,)
        ready = tuple(self.modes[name] for name in names if self.modes[name].link.ready)
        if not ready:
            raise self._unavailable(names)
        return ready

    def _named(self, model: str | None) -> str | None:
        """The mode's name, or None where the choice is ours."""
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

    def _unavailable(self, names: Iterable[str]) -> ApiError:
        links = {self.modes[name].link.name: self.modes[name].link for name in names}
        states = "; ".join(
            f"{link.name} is {link.state}" + (f" ({link.status.reason})" if link.status and link.status.reason else "")
            for link in links.values()
        )
        return ApiError(503, f"no engine is ready: {states}", code="engine_not_ready", headers={"retry-after": "5"})


def _not_found(message: str) -> ApiError:
    return ApiError(404, message, code="model_not_found", param="model")
