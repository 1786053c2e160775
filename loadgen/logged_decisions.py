"""Decisions as a server's ledger holds them: read in pieces, and decoded to what a policy can be asked again.

The tables are `requests` and `contexts` of `app/energy/schema.py`. A row's `decision` holds the decision and the name
of the policy; what the policy was made of (settings, deployed modes, profile) is the row's context, which many share.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from app.routing.decision import Decision, Outcome, Refusal
from app.routing.features import RequestFeatures
from app.routing.snapshot import Snapshot

_NONE = msgspec.Raw(b"null")
_EMPTY = (b"{}", b"null", b"")


class LedgerUnreadable(Exception):
    """The file is missing or is no ledger; the message names it."""


class RowDamaged(ValueError):
    """A row that is not of the form that is replayed; the message says what is wrong with it."""


class Row(NamedTuple):
    """Columns of one request as SQLite has them; three are JSON, and the last names the context."""

    request_id: bytes
    mode: bytes | None
    features: bytes
    snapshot: bytes
    decision: bytes
    context: bytes | None = None


class Shared(msgspec.Struct, frozen=True):
    """A context: what many decisions were made from. Its parts stay undecoded, since each is decoded once.

    `model` and `hardware` are what served, `trained_model` is the version of the one in use; unknown is None.
    """

    settings: msgspec.Raw = _NONE
    modes: msgspec.Raw = _NONE
    profile: msgspec.Raw = _NONE
    model: str | None = None
    hardware: str | None = None
    trained_model: str | None = None


class Logged(msgspec.Struct, frozen=True):
    """The `decision` column. `named`: the request named its mode. A row without a context has its parts here."""

    decision: msgspec.Raw
    policy: str | None = None
    named: bool = False
    settings: msgspec.Raw = _NONE
    modes: msgspec.Raw = _NONE
    profile_version: str | None = None


class LoggedDecision(NamedTuple):
    """One decision with its inputs. `executed` is the mode that served the request; None where none did.

    `context` names what `shared` came from; None where the row itself says it.
    """

    request_id: str
    executed: str | None
    features: RequestFeatures
    snapshot: Snapshot
    outcome: Outcome
    logged: Logged
    shared: Shared
    context: bytes | None


class RowRange(NamedTuple):
    """Rows by number, both ends included."""

    first: int
    last: int


def ranges(path: Path, rows_each: int) -> list[RowRange]:
    """The ledger's requests in pieces, so that several processes can read it. Raises LedgerUnreadable."""
    try:
        with closing(_open(path)) as connection:
            first, last = connection.execute("SELECT min(rowid), max(rowid) FROM requests").fetchone()
    except sqlite3.Error as error:
        raise LedgerUnreadable(f"{path} is no ledger that can be read: {error}") from error
    if first is None:
        return []
    return [RowRange(start, min(last, start + rows_each - 1)) for start in range(first, last + 1, rows_each)]


def rows(path: Path, span: RowRange) -> Iterator[Row]:
    """The rows of a piece, streamed. Raises LedgerUnreadable."""
    try:
        with closing(_open(path)) as connection:
            # Bytes go to the JSON decoder as they are; text would be decoded and encoded again.
            connection.text_factory = bytes
            query = f"SELECT {', '.join(Row._fields)} FROM requests WHERE rowid BETWEEN ? AND ?"
            yield from map(Row._make, connection.execute(query, span))
    except sqlite3.Error as error:
        raise LedgerUnreadable(f"{path} is no ledger that can be read: {error}") from error


def read_contexts(path: Path) -> dict[bytes, Shared]:
    """All contexts of a ledger by their names; a damaged one is left out. Raises LedgerUnreadable."""
    found = {}
    try:
        with closing(_open(path)) as connection:
            connection.text_factory = bytes
            for name, content in connection.execute("SELECT context, content FROM contexts ORDER BY rowid"):
                with suppress(msgspec.DecodeError):
                    found[name] = msgspec.json.decode(content, type=Shared)
    except sqlite3.Error as error:
        raise LedgerUnreadable(f"{path} is no ledger that can be read: {error}") from error
    return found


def _open(path: Path) -> sqlite3.Connection:
    # Read-only: the ledger may belong to a server that runs.
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


_features = msgspec.json.Decoder(RequestFeatures)
_snapshot = msgspec.json.Decoder(Snapshot)
_logged = msgspec.json.Decoder(Logged)
_decision = msgspec.json.Decoder(Decision)
_refusal = msgspec.json.Decoder(Refusal)


def decode(row: Row, contexts: Mapping[bytes, Shared]) -> LoggedDecision | None:
    """The decision of a row; None for a request that ended before one was made. Raises RowDamaged."""
    if row.decision in _EMPTY:
        return None
    try:
        logged = _logged.decode(row.decision)
        if logged.decision == _NONE:
            return None
        name = row.context
        shared = None if name is None else contexts.get(name)
        if shared is None:
            name, shared = None, Shared(logged.settings, logged.modes)
        outcome = _outcome(logged.decision)
        features, snapshot = _features.decode(row.features), _snapshot.decode(row.snapshot)
    except ValueError as error:  # msgspec's errors are ValueErrors, and so are the records' own
        raise RowDamaged(str(error)) from error
    chosen = outcome.mode if isinstance(outcome, Decision) else None
    executed = chosen if row.mode is None else row.mode.decode(errors="replace")
    return LoggedDecision(
        row.request_id.decode(errors="replace"), executed, features, snapshot, outcome, logged, shared, name
    )


def _outcome(raw: msgspec.Raw) -> Outcome:
    try:
        return _decision.decode(raw)
    except msgspec.ValidationError as error:
        # Neither record says which of the two it is, and nearly all are decisions.
        try:
            return _refusal.decode(raw)
        except msgspec.ValidationError:
            raise error from None
