"""Tables of the ledger. Rows are only ever added; retention removes old ones."""

from __future__ import annotations

VERSION = 1

LATER_INDEX = "CREATE INDEX IF NOT EXISTS requests_by_context ON requests (context)"
"""A file of this version may have been made before there was this index."""

SCHEMA = """
CREATE TABLE generations (
    generation INTEGER PRIMARY KEY AUTOINCREMENT,
    started_s REAL NOT NULL,
    boot TEXT NOT NULL,
    pid INTEGER NOT NULL
) STRICT;
CREATE TABLE intervals (
    id INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    start_s REAL NOT NULL,
    end_s REAL NOT NULL,
    device TEXT NOT NULL,
    method TEXT NOT NULL,
    scope TEXT NOT NULL,
    measured_j REAL NOT NULL,
    idle_j REAL,
    credited_j REAL NOT NULL,
    residual_j REAL NOT NULL,
    approximate_j REAL NOT NULL,
    unmeasured_s REAL NOT NULL,
    idle_w REAL,
    boot TEXT NOT NULL,
    end_monotonic_s REAL NOT NULL,
    end_counter_j REAL
) STRICT;
CREATE INDEX intervals_by_time ON intervals (end_s);
CREATE INDEX intervals_by_device ON intervals (device, id);
CREATE TABLE credits (
    id INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    end_s REAL NOT NULL,
    device TEXT NOT NULL,
    engine TEXT NOT NULL,
    mode TEXT,
    tenant TEXT,
    class TEXT,
    energy_j REAL NOT NULL,
    idle_share_j REAL NOT NULL,
    prefill_tokens REAL NOT NULL,
    decode_tokens REAL NOT NULL
) STRICT;
CREATE INDEX credits_by_time ON credits (end_s);
CREATE TABLE request_credits (
    id INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    end_s REAL NOT NULL,
    engine TEXT NOT NULL,
    method TEXT NOT NULL,
    scope TEXT NOT NULL,
    energy_j REAL NOT NULL,
    approximate_j REAL NOT NULL,
    prefill_tokens REAL NOT NULL,
    decode_tokens REAL NOT NULL,
    final INTEGER NOT NULL
) STRICT;
CREATE INDEX request_credits_by_request ON request_credits (request_id);
CREATE INDEX request_credits_by_time ON request_credits (end_s);
CREATE TABLE requests (
    request_id TEXT PRIMARY KEY,
    generation INTEGER NOT NULL,
    recorded_s REAL NOT NULL,
    mode TEXT,
    engine TEXT,
    tenant TEXT,
    class TEXT,
    status TEXT NOT NULL,
    features TEXT NOT NULL,
    snapshot TEXT NOT NULL,
    decision TEXT NOT NULL,
    outcome TEXT NOT NULL,
    context TEXT
) STRICT;
CREATE TABLE contexts (
    context TEXT PRIMARY KEY,
    generation INTEGER NOT NULL,
    content TEXT NOT NULL
) STRICT;
CREATE INDEX requests_by_time ON requests (recorded_s);
CREATE TABLE calibrations (
    id INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    at_s REAL NOT NULL,
    device TEXT NOT NULL,
    idle_w REAL,
    engine_watts TEXT NOT NULL
) STRICT;
CREATE INDEX calibrations_by_device ON calibrations (device, id);
"""
"""Times are seconds since 1970 (UTC), but for `end_monotonic_s`, which is CLOCK_MONOTONIC of that boot."""
