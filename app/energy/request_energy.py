"""What a request used, as it is shown to clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from app.energy.queries import RequestSums
from app.energy.rows import RequestCreditRow


@dataclass(frozen=True, slots=True)
class RequestEnergy:
    """Joules above idle of one request. Without a meter they are None, and the status says `unmeasured`."""

    energy_j: float | None
    j_per_output_token: float | None
    approximate_j: float | None
    """The part that was split by a fallback."""
    method: str | None
    """`nvml_counter`, `nvml_power`, `rapl` or `modelled`; several are joined by `+`."""
    scope: str | None
    status: Literal["partial", "final", "unmeasured"]
    prefill_tokens: float | None = None
    decode_tokens: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


UNMEASURED = RequestEnergy(None, None, None, None, None, "unmeasured")
PENDING = RequestEnergy(None, None, None, None, None, "partial")


def request_energy(
    written: RequestSums | None, pending: Sequence[RequestCreditRow], final: bool, measuring: bool
) -> RequestEnergy:
    """Sum what the ledger holds and what is not flushed yet."""
    if written is None and not pending:
        # Known, but nothing of it is settled: not 0 joules, but not known yet (or never).
        return PENDING if measuring and not final else UNMEASURED
    by_scope: dict[str, tuple[float, float]] = {}
    for row in pending:
        prefill, decode = by_scope.get(row.scope, (0.0, 0.0))
        by_scope[row.scope] = (prefill + row.prefill_tokens, decode + row.decode_tokens)
    # The same tokens are reported on every device of an engine: they add up over time, not over devices.
    prefill_tokens = max((tokens[0] for tokens in by_scope.values()), default=0.0)
    decode_tokens = max((tokens[1] for tokens in by_scope.values()), default=0.0)
    energy_j, approximate_j = sum(row.energy_j for row in pending), sum(row.approximate_j for row in pending)
    methods, scopes = {row.method for row in pending}, {row.scope for row in pending}
    if written is not None:
        energy_j += written.energy_j
        approximate_j += written.approximate_j
        prefill_tokens += written.prefill_tokens
        decode_tokens += written.decode_tokens
        methods.update(written.methods)
        scopes.update(written.scopes)
    return RequestEnergy(
        energy_j=energy_j,
        j_per_output_token=energy_j / decode_tokens if decode_tokens else None,
        approximate_j=approximate_j,
        method="+".join(sorted(methods)),
        scope="; ".join(sorted(scopes)),
        status="final" if final or (written is not None and written.final) else "partial",
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
    )
