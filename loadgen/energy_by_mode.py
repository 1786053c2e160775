"""Joules per output token of each mode, from interleaved rounds. Pure: what was measured in, rows out.

Unknown stays None: a trial in which one request's joules are unknown has none, since leaving the request out would
divide by the wrong tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from loadgen.statistics import Floats, Interval, paired_bootstrap, total

MODELLED = "modelled"


class Spent(NamedTuple):
    """One finished request. `joules` are above idle; None where the server does not know them, or its tokens."""

    joules: float | None
    output_tokens: int | None


def j_per_token(requests: Sequence[Spent]) -> float | None:
    """Of all requests of a trial together; None as soon as one of them is unknown."""
    joules, tokens = total(item.joules for item in requests), total(item.output_tokens for item in requests)
    return joules / tokens if joules is not None and tokens else None


class Account(NamedTuple):
    """What the server's own account has for a mode in the time of the run, over all requests that the key may see."""

    j_per_output_token: float | None
    methods: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()


def accounts(answer: dict[str, Any]) -> dict[str, Account]:
    """By mode, from the answer of `GET /v1/energy`; empty where it has another form."""
    by = answer.get("by")
    shares = by.get("mode") if isinstance(by, dict) else None
    methods, scopes = (_words(answer.get(name)) for name in ("methods", "scopes"))
    return {
        str(share["name"]): Account(_number(share.get("j_per_output_token")), methods, scopes)
        for share in (shares if isinstance(shares, list) else ())
        if isinstance(share, dict) and share.get("name") is not None
    }


def _words(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(slots=True)
class Results:
    """J/token by mode, then round; and by which methods and over which scopes they were measured."""

    trials: dict[str, dict[int, float | None]] = field(default_factory=dict)
    methods: dict[str, set[str]] = field(default_factory=dict)
    scopes: dict[str, set[str]] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, mode: str, number: int, value: float | None, method: str | None, scope: str | None) -> None:
        self.trials.setdefault(mode, {})[number] = value
        for kept, word in ((self.methods, method), (self.scopes, scope)):
            known = kept.setdefault(mode, set())
            if value is not None and word:
                known.add(word)


class Row(NamedTuple):
    """One mode. `ratio` is to the reference in the same rounds; `rounds` those in which the joules are known."""

    mode: str
    j_per_token: Interval | None
    ratio: Interval | None
    rounds: int
    rounds_tried: int
    method: str | None
    scope: str | None
    account: Account | None

    @property
    def modelled(self) -> bool:
        account = self.account.methods if self.account else ()
        return MODELLED in (self.method or "") or (self.method is None and MODELLED in account)

    def as_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "j_per_token": None if self.j_per_token is None else self.j_per_token._asdict(),
            "ratio": None if self.ratio is None else self.ratio._asdict(),
            "rounds": self.rounds,
            "rounds_tried": self.rounds_tried,
            "method": self.method,
            "scope": self.scope,
            "modelled": self.modelled,
            "account": None if self.account is None else self.account._asdict(),
        }


def rows(results: Results, reference: str) -> list[Row]:
    """One row a mode, in the order measured; the interval is a 95 % bootstrap over rounds."""
    base = results.trials.get(reference, {})
    found = []
    for mode, by_round in results.trials.items():
        known = {number: value for number, value in by_round.items() if value is not None}
        # A ratio to nothing, or of nothing, says nothing.
        others = base if mode != reference else {}
        pairs = [(value, other) for number, value in known.items() if value > 0 and (other := others.get(number))]
        values = list(known.values())
        found.append(
            Row(
                mode,
                paired_bootstrap(values, values, _mean) if values else None,
                paired_bootstrap([pair[0] for pair in pairs], [pair[1] for pair in pairs]) if pairs else None,
                len(known),
                len(by_round),
                "+".join(sorted(results.methods.get(mode, ()))) or None,
                "; ".join(sorted(results.scopes.get(mode, ()))) or None,
                results.accounts.get(mode),
            )
        )
    return found


def _mean(values: Floats, _: Floats) -> Floats:
    return np.asarray(np.mean(values, axis=-1))


def table_of(found: Sequence[Row], reference: str) -> Table:
    """For people."""
    table = Table(title="Joules above idle per output token [95 % over rounds]")
    for name in ("mode", "J/token", f"to {reference}", "rounds", "method", "in the server's account"):
        table.add_column(name, justify="left" if name in ("mode", "method") else "right")
    for row in found:
        account = row.account.j_per_output_token if row.account else None
        table.add_row(
            row.mode,
            _interval(row.j_per_token),
            "" if row.mode == reference else _interval(row.ratio),
            f"{row.rounds} of {row.rounds_tried}",
            row.method or "unknown",
            "unknown" if account is None else f"{account:.3g}",
        )
    return table


def _interval(found: Interval | None) -> str:
    return "unknown" if found is None else found.words(".3g")
