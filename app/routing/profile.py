"""The profile: what was measured of every mode for one model on one kind of hardware. A versioned JSON file.

This is the schema and its checks; who reads the file hands its content to `parse_profile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

SCHEMA_VERSION = 1
VERSION_PATTERN = r"^[!-~]([ -~]{0,62}[!-~])?$"
"""Of a profile and of a trained model: it goes into answers' headers, which hold little more than ASCII."""

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Points = Annotated[tuple[tuple[Count, NonNegative], ...], Field(min_length=1)]
"""(x, value) pairs with rising x; linear between them. Beyond the last the last slope goes on."""
Curve = Annotated[Points, Field(min_length=2)]
"""At least two points, since one gives no slope to go on with."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GateOutcome(StrEnum):
    """Only `pass` makes a lossy mode eligible; `fail` keeps out any mode but the reference."""

    PASS = "pass"
    FAIL = "fail"
    INSUFFICIENT = "insufficient_evidence"
    NO_SIGNAL = "no_signal"


class Speculation(_Part):
    """Draft tokens accepted per decode step of one sequence, by workload tag; `default` for other tags."""

    accepted_per_step: dict[str, NonNegative] = Field(default_factory=dict)
    default: NonNegative = 0.0
    verification: NonNegative = 0.0
    """What verifying adds to a step, as a share of it, for each accepted token: where more fits, more is drafted."""

    def steps_per_token(self, accepted: float) -> float:
        """Steps without drafts that take as long as a token with speculation, `accepted` more coming with each step."""
        return (1.0 + self.verification * accepted) / (1.0 + accepted)


class ModeProfile(_Part):
    """Coefficients of one mode.

    `prefill_ms` is by uncached prompt tokens, on an otherwise idle engine, the first token included; `step_ms` is one
    decode step by batch size, on an engine alone on the device. A speculative mode's is without drafts: with them a
    step is longer and yields 1 + accepted tokens.
    """

    prefill_ms: Curve
    step_ms: Points
    prefill_j: Curve | None = None
    decode_j_per_token: Points | None = None
    """Joules per output token by batch size."""
    peak_memory_bytes: Positive | None = None
    wake_ms: NonNegative | None = None
    wake_j: NonNegative | None = None
    speculation: Speculation | None = None

    @model_validator(mode="after")
    def _rising(self) -> ModeProfile:
        for name in ("prefill_ms", "step_ms", "prefill_j", "decode_j_per_token"):
            points = getattr(self, name) or ()
            if any(left[0] >= right[0] for left, right in pairwise(points)):
                raise ValueError(f"{name}: the first numbers of its points must rise")
        return self


class QualityEvidence(_Part):
    """A mode's measured quality against the reference in one scope.

    `scope` is a client label, a workload tag (`none` for text without one), a request class or `any`; the most
    specific one that exists decides. Evidence from free text is of scope `none`, not of `any`: it says nothing of
    mathematics.
    `delta` is in the metric's units (points of accuracy, ROUGE-L), negative for worse, with its confidence interval.
    `covered` is told of a KL: the share of the reference's probability on tokens that were compared one by one. What is
    left counts as one outcome, so that such a KL is a lower bound, the closer the more is covered.
    """

    mode: str
    scope: str
    outcome: GateOutcome
    metric: str
    delta: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = Field(default=0, ge=0)
    covered: Annotated[float, Field(ge=0, le=1)] | None = None


class Profile(_Part):
    """All that the cost policy reads."""

    schema_version: Literal[1]
    version: str = Field(pattern=VERSION_PATTERN)
    model: str = Field(min_length=1)
    hardware: str = Field(min_length=1)
    measured_at: str | None = None
    modes: dict[str, ModeProfile] = Field(min_length=1)
    interference: dict[str, dict[str, Annotated[float, Field(ge=1, allow_inf_nan=False)]]] = Field(default_factory=dict)
    """`interference[engine][other]`: how many times slower `engine` is while `other` generates."""
    quality: tuple[QualityEvidence, ...] = ()


class ProfileRefused(ValueError):
    """The profile is malformed, or for another model or hardware. The message is for the operator."""


def parse_profile(content: str | bytes | Mapping[str, Any], *, model: str, hardware: str) -> Profile:
    """The profile in `content`, if it belongs to this model on this hardware.

    Raises:
        ProfileRefused: not JSON, not of this schema, or measured for something else.
    """
    try:
        if isinstance(content, (str, bytes)):
            profile = Profile.model_validate_json(content)
        else:
            profile = Profile.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise ProfileRefused(f"The profile is malformed at {place}: {first['msg']}{more}.") from error
    for what, measured, served in (("model", profile.model, model), ("hardware", profile.hardware, hardware)):
        if measured != served:
            raise ProfileRefused(
                f"Profile {profile.version} was measured for {what} {measured!r}, but {served!r} serves here. "
                "Measure this one with `python -m loadgen calibrate`."
            )
    return profile
