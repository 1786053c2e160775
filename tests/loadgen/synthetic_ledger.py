"""A ledger of decisions as a server would have written it. `python -m tests.loadgen.synthetic_ledger PATH ROWS` makes
one to measure the replay with, beside it its profile as `PATH.profile.json`."""

import json
import random
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from app.energy.ledger import Ledger
from app.routing.decision import Decision
from app.routing.features import RequestFeatures, measure
from app.routing.mode_info import ModeInfo
from app.routing.output_length import OutputLengthPredictor
from app.routing.policies import make_policy
from app.routing.policies.learned import Predictor
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import EngineView, Snapshot

ENGINES = ("fp16", "int8", "gptq", "speculative")
MODES = (
    ModeInfo("fp16", "fp16", "fp16", True),
    ModeInfo("prefix_caching", "fp16", "fp16", True, prefix_reuse=True),
    ModeInfo("int8", "int8", "int8", False),
    ModeInfo("int8_continuous_batching", "int8", "int8", False),
    ModeInfo("gptq", "gptq", "gptq", False),
    ModeInfo("gptq_prefix_caching", "gptq", "gptq", False, prefix_reuse=True),
    ModeInfo("speculative", "speculative", "fp16", True, speculative=True),
)
TEXTS = ("What is 3 + 4?", "Rewrite this text: it rains.", "Tell me a story.", "Which is right? A. one B. two C. three")


def profile_content(version: str = "p1") -> dict[str, Any]:
    """Coefficients of every mode; all lossy ones pass the gate."""

    def mode(prefill: float, step: float) -> dict[str, Any]:
        return {
            "prefill_ms": [[16, 5.0], [1024, 1000 * prefill], [2048, 2100 * prefill]],
            "step_ms": [[1, step], [4, step * 1.1], [16, step * 1.6]],
            "prefill_j": [[16, 1.0], [2048, 60.0]],
            "decode_j_per_token": [[1, step / 10], [16, step / 40]],
        }

    return {
        "schema_version": 1,
        "version": version,
        "model": "tiny",
        "hardware": "box",
        "modes": {info.name: mode(0.1, {"fp16": 20.0, "int8": 13.0, "gptq": 9.0}[info.weights]) for info in MODES},
        "interference": {one: {two: 1.5 for two in ENGINES if two != one} for one in ENGINES},
        "quality": [
            {"mode": info.name, "scope": "any", "outcome": "pass", "metric": "kl"}
            for info in MODES
            if not info.lossless
        ],
    }


def inputs(rng: random.Random, settings: RoutingSettings, queue_limit: int = 256) -> tuple[RequestFeatures, Snapshot]:
    """One request and the state it met."""
    views = {}
    for name in ENGINES:
        load = rng.choice((0, 0, 1, 2, 6))
        views[name] = EngineView(
            engine=name,
            in_flight=load,
            queue_limit=queue_limit,
            running=load,
            kv_use=round(rng.random() * 0.9, 4),
            kv_capacity_tokens=40_000,
            pending_output_tokens=load * 60,
            step_ms=round(rng.uniform(5, 30), 3),
            age_s=round(rng.random(), 3),
        )
    live = Snapshot(engines=views, corrections={"gptq": rng.uniform(0.8, 1.2), "fp16": rng.uniform(0.8, 1.2)})
    tokens = rng.choice((128, 600, 1024, 2048))
    features = measure(
        text=rng.choice(TEXTS),
        prompt_tokens=tokens,
        snapshot=live,
        predictor=OutputLengthPredictor(),
        settings=settings,
        max_tokens=rng.choice((8, 32, 128)),
        seen_tokens=rng.choice((0, tokens - 20)),
        cached_tokens={"gptq": rng.choice((0, tokens // 2))},
        draw=rng.random(),
    )
    return features, live


def rows(
    count: int, *, policy: str = "cost", seed: int = 0, queue_limit: int = 256, predictor: Predictor | None = None
) -> Iterator[dict[str, Any]]:
    """Column values of `requests` for `count` requests, each decided by `policy`. Rows name what decided."""
    settings = RoutingSettings()
    profile = Profile.model_validate(profile_content())
    decide = make_policy(policy, MODES, settings, profile, predictor, model="tiny", hardware="box").decide
    rng = random.Random(seed)
    context = {
        "policy": policy,
        "settings": settings.model_dump(mode="json"),
        "modes": msgspec.to_builtins(MODES),
        "profile_version": profile.version,
    }
    for number in range(count):
        features, live = inputs(rng, settings, queue_limit)
        outcome = decide(features, live)
        decided = isinstance(outcome, Decision)
        yield {
            "request_id": f"r{number}",
            "recorded_s": 1_700_000_000.0 + number / 10,
            "mode": outcome.mode if decided else None,
            "engine": outcome.engine if decided else None,
            "tenant": "t",
            "class": features.request_class.value,
            "status": "ok" if decided else "refused",
            "features": features.to_json(),
            "snapshot": live.to_json(),
            "decision": _json({"decision": msgspec.to_builtins(outcome)} | context),
            "outcome": _json({"total_ms": 100.0, "output_tokens": 32}),
        }


def context_content(**more: Any) -> dict[str, Any]:
    """What a server keeps once for all rows that were decided alike."""
    return {
        "model": "tiny",
        "hardware": "box",
        "settings": RoutingSettings().model_dump(mode="json"),
        "modes": msgspec.to_builtins(MODES),
        "profile": profile_content(),
        "trained_model": None,
    } | more


def write_as_served(path: Path, wanted: Iterator[dict[str, Any]], **context: Any) -> None:
    """Makes a ledger as the server writes it: rows name their policy and a context that they share."""
    content = _json(context_content(**context))

    def row(values: dict[str, Any]) -> dict[str, Any]:
        logged = json.loads(values["decision"])
        kept = {"policy": logged["policy"], "named": False, "decision": logged["decision"]}
        return values | {"decision": _json(kept), "context": "c"}

    write(path, map(row, wanted))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO contexts VALUES ('c', 1, ?)", (content,))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def write(path: Path, wanted: Iterator[dict[str, Any]]) -> None:
    """Makes a ledger with these rows."""
    ledger = Ledger(path)
    ledger.connection.execute("BEGIN")
    for row in wanted:
        names = ", ".join(row)
        marks = ", ".join("?" for _ in row)
        ledger.connection.execute(
            f"INSERT INTO requests (generation, {names}) VALUES (1, {marks})", tuple(row.values())
        )
    ledger.connection.execute("COMMIT")
    ledger.close()


def write_profile(path: Path, version: str = "p1") -> Path:
    path.write_text(json.dumps(profile_content(version)))
    return path


def many(count: int, distinct: int = 20_000) -> Iterator[dict[str, Any]]:
    """Rows that repeat after the distinct ones, each with an id of its own: deciding takes longer than writing."""
    base = list(rows(min(count, distinct)))
    yield from (base[number % len(base)] | {"request_id": f"r{number}"} for number in range(count))


if __name__ == "__main__":
    write_as_served(Path(sys.argv[1]), many(int(sys.argv[2])))
    write_profile(Path(sys.argv[1] + ".profile.json"))
