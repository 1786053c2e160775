"""Profiles for tests: what they are for does not matter there."""

from collections.abc import Mapping
from typing import Any

from app.routing.profile import Profile, parse_profile


def profile_of(modes: Mapping[str, Any], **more: Any) -> Profile:
    """A profile of these modes; `more` are its other fields."""
    head = {"schema_version": 1, "version": "p1", "model": "m", "hardware": "h"}
    return parse_profile({**head, "modes": modes, **more}, model="m", hardware="h")
