"""What an operator can set about routing, validated in one place."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RoutingSettings(BaseModel):
    """Thresholds, gates and weights of the policies. Every field may change while the application serves.

    Raises:
        pydantic.ValidationError: a threshold is out of range or not finite, or a field is unknown.
    """

    # YAML has `.inf`, which is above every lower bound: a weight of it would make scores that are no numbers.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    reference_mode: str = "fp16"
    """The mode that ratios are taken against, and the emergency fallback of the rules."""

    batch_medium: int = Field(default=2, ge=1)
    batch_high: int = Field(default=4, ge=1)
    """Concurrent requests from which batch pressure is medium and high (paper: 2 and 4)."""

    shared_prefix_fraction: float = Field(default=0.5, gt=0, le=1)
    """Share of the prompt that must have been seen recently for the class shared_prefix."""
    shared_prefix_min_tokens: int = Field(default=64, ge=1)

    kv_pressure: float = Field(default=0.85, gt=0, le=1)
    """KV-cache use of the fullest engine from which memory is under pressure."""
    device_free_pressure: float = Field(default=0.02, ge=0, le=1)
    """Free share of device memory below which memory is under pressure."""

    accepted_modes: frozenset[str] = frozenset()
    """Modes that the operator declares acceptable: lossy ones without a measured pass, any one in spite of a fail."""
    max_energy_ratio: float | None = Field(default=None, gt=0)
    """Predicted joules against the reference mode's, at most (paper's oracle: 1.00). None: no constraint."""
    max_memory_ratio: float | None = Field(default=None, gt=0)
    """Peak memory against the reference mode's, at most (paper's oracle: 1.02). None: no constraint."""

    objective: Literal["latency", "energy", "weighted"] = "latency"
    """What the policy `cost` wants least of for a request that names no objective."""
    energy_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of energy in the weighted objective; latency has the rest."""
    others_weight: float = Field(default=1.0, ge=0)
    """Weight of the delay that a request causes to those already running. 1 minimises the mean latency."""
    consolidate_from: int = Field(default=1, ge=1)
    """Requests on the device, and expected there soon, beyond which all work may be put on one engine."""
    tie_margin: float = Field(default=0.02, ge=0, lt=1)
    """Modes of one engine this close are equal; the one that reuses prefixes is preferred, for later requests."""

    exploration_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests that `cost` decides by a profile which go to an eligible mode drawn at random."""

    @model_validator(mode="after")
    def _ordered(self) -> RoutingSettings:
        if self.batch_medium > self.batch_high:
            raise ValueError(f"batch_medium ({self.batch_medium}) is above batch_high ({self.batch_high})")
        return self

    @cached_property
    def version(self) -> str:
        """A short digest of all values: equal settings, equal version."""
        values = self.model_dump(mode="json")
        values["accepted_modes"] = sorted(values["accepted_modes"])
        text = repr(sorted(values.items()))
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
