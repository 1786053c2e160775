"""From a calibration's samples and quality evidence to the profile, checked as the controller checks it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from app.routing.profile import SCHEMA_VERSION, Profile, QualityEvidence, parse_profile
from loadgen.fitting import EngineSamples, interference, modes_of_profile
from loadgen.served_modes import Served


class CalibrationFailed(Exception):
    """Nothing usable was measured, or an input file is wrong; the message says what."""


def read_quality(path: Path) -> list[QualityEvidence]:
    """A file with a list of quality evidence. Raises CalibrationFailed when it is missing or malformed."""
    try:
        return TypeAdapter(list[QualityEvidence]).validate_json(path.read_bytes())
    except OSError as error:
        raise CalibrationFailed(f"cannot read {path}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise CalibrationFailed(f"{path} is no list of quality evidence, at {place}: {first['msg']}") from error


def make_profile(
    served: Served, samples: Mapping[str, EngineSamples], quality: Sequence[QualityEvidence], measured_at: str
) -> Profile:
    """The profile, checked as the controller checks it. Raises CalibrationFailed where nothing usable was measured."""
    modes = modes_of_profile(served.engines, served.carried, samples)
    if not modes:
        raise CalibrationFailed("no engine was measured at two prompt lengths and one batch size: raise --budget-s")
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": served.model,
        "hardware": served.hardware,
        "measured_at": measured_at,
        "modes": modes,
        "interference": interference(samples),
        "quality": [one.model_dump(mode="json") for one in quality],
    }
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()
    content["version"] = f"{measured_at[:10]}-{digest}"
    # Through JSON, as the controller will read it: points are lists there.
    return parse_profile(json.dumps(content), model=served.model, hardware=served.hardware)
