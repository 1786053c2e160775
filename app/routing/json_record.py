"""JSON round trip of the immutable records, so that a logged decision can be replayed.

msgspec structs rather than dataclasses: a frozen one is built ten times as fast, which is what a decision mostly does.
"""

from __future__ import annotations

from typing import Self

import msgspec


class JsonRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of immutable, slotted records: `Record.from_json(record.to_json()) == record`."""

    def to_json(self) -> str:
        """One line of JSON with a key per field."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The record that `to_json` wrote.

        Raises:
            msgspec.DecodeError: not JSON, or (as msgspec.ValidationError) not this record.
        """
        return msgspec.json.decode(text, type=cls)
