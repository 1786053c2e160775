import dataclasses
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.classes import RequestClass
from app.routing.decision import Decision, Ineligible, Refusal
from app.routing.features import NO_WISHES, Objective, RequestFeatures, Wishes, measure
from app.routing.mode_info import ModeInfo
from app.routing.output_length import OutputLengthPredictor
from app.routing.policies import make_policy
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import EngineView, Residency, Snapshot
from app.routing.tags import Tag

names = st.sampled_from(["fp16", "int8", "gptq", "speculative", "other"])
shares = st.floats(0, 1)
views = st.builds(
    EngineView,
    engine=names,
    epoch=st.integers(0, 9),
    healthy=st.booleans(),
    residency=st.sampled_from(Residency),
    in_flight=st.integers(0, 400),
    running=st.integers(0, 99),
    waiting=st.integers(0, 99),
    kv_use=shares,
    kv_capacity_tokens=st.none() | st.integers(1, 10**6),
    step_ms=st.none() | st.floats(0, 1e4),
    accepted_per_step=st.none() | st.floats(0, 8),
    pending_prefill_tokens=st.integers(0, 10**6),
    pending_output_tokens=st.integers(0, 10**6),
    age_s=st.floats(0, 100),
)
snapshots = st.builds(
    Snapshot,
    engines=st.lists(views, max_size=5).map(lambda found: {view.engine: view for view in found}),
    tripped_modes=st.frozensets(names),
    device_total_bytes=st.none() | st.integers(0, 2**37),
    device_free_bytes=st.none() | st.integers(0, 2**37),
    corrections=st.dictionaries(names, st.floats(0.4, 2.5)),
    mean_prompt_tokens=st.floats(0, 1e5),
    mean_seen_tokens=st.floats(0, 1e5),
    arrivals_per_s=st.floats(0, 1e5),
    mean_output_tokens=st.floats(0, 1e5),
    mean_output_shares=st.dictionaries(st.sampled_from(Tag).map(str), shares),
    accepted_per_step=st.dictionaries(st.just("speculative:rewriting"), st.floats(0, 6)),
)
wishes = st.builds(
    Wishes,
    objective=st.sampled_from([Objective.LATENCY, Objective.ENERGY, Objective.WEIGHTED]),
    energy_weight=st.none() | shares,
    conversation_weights=st.none() | st.sampled_from(["fp16", "gptq", "gone"]),
    excluded_engines=st.lists(names, max_size=2).map(tuple),
    crowded_engines=st.lists(names, max_size=2).map(tuple),
)
requests = st.builds(
    RequestFeatures,
    prompt_tokens=st.integers(0, 10**6),
    expected_output_tokens=st.integers(1, 10**5),
    sequences=st.integers(1, 200),
    cached_tokens=st.dictionaries(names, st.integers(0, 10**6)),
    shared_prefix=st.booleans(),
    memory_pressure=st.booleans(),
    tag=st.sampled_from(Tag),
    label=st.none() | st.text(max_size=64),
    draw=st.floats(0, 1, exclude_max=True),
    wishes=wishes,
)


@given(
    request_=requests,
    live=snapshots,
    policy=st.sampled_from(["rules", "rules_published", "cost", "static:gptq"]),
    rate=st.sampled_from([0.0, 0.5]),
)
def test_whatever_is_logged_replays_to_the_same_decision(
    request_: RequestFeatures,
    live: Snapshot,
    policy: str,
    rate: float,
    modes: tuple[ModeInfo, ...],
    profile: Profile,
) -> None:
    settings = RoutingSettings(exploration_rate=rate)
    outcome = make_policy(policy, modes, settings, profile).decide(request_, live)
    again = make_policy(policy, modes, settings, profile).decide(
        RequestFeatures.from_json(request_.to_json()), Snapshot.from_json(live.to_json())
    )
    assert again == outcome
    assert type(outcome).from_json(outcome.to_json()) == outcome
    assert outcome.reason.endswith(".")
    if isinstance(outcome, Decision):
        view = live.engines[outcome.engine]
        assert view.healthy
        assert outcome.mode not in live.tripped_modes
        assert outcome.engine not in request_.wishes.excluded_engines
        assert outcome.engine not in request_.wishes.crowded_engines
    else:
        assert outcome.by_mode
        assert outcome.code in outcome.by_mode.values()


def test_records_do_not_change(features: Callable[..., RequestFeatures]) -> None:
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        features().prompt_tokens = 3  # type: ignore[misc]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"mode": 1}', '{"engines": {"a": {"engine": "a", "colour": 1}}}'])
def test_what_is_no_record_is_refused(text: str) -> None:
    for record in (RequestFeatures, Decision):
        with pytest.raises(msgspec.DecodeError):
            record.from_json(text)


def test_wishes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="latency_limit_ms"):
        Wishes(objective=Objective.LIMIT)
    with pytest.raises(ValueError, match="latency_limit_ms"):
        Wishes(objective=Objective.LIMIT, latency_limit_ms=-1.0)
    with pytest.raises(ValueError, match="energy_weight"):
        Wishes(energy_weight=1.5)


def test_features_hold_what_was_measured_and_no_text(snapshot: Callable[..., Snapshot]) -> None:
    live = snapshot(
        fp16={"in_flight": 2, "kv_use": 0.9}, gptq={"in_flight": 0, "running": 3, "waiting": 1, "age_s": 0.1}
    )
    found = measure(
        text="Rewrite this secret sentence.",
        prompt_tokens=1000,
        snapshot=live,
        predictor=OutputLengthPredictor(),
        settings=RoutingSettings(),
        max_tokens=200,
        label="x" * 10_240,
        seen_tokens=600,
        cached_tokens={"gptq": 500},
    )
    assert found.batch_size == 7
    assert found.memory_pressure
    assert found.shared_prefix
    assert found.tag is Tag.REWRITING
    assert found.repeats_prompt
    assert found.label is None
    assert found.expected_output_tokens == 200
    assert found.output_prompt_ratio == 0.2
    assert found.wishes is NO_WISHES
    assert "secret" not in found.to_json()


def test_a_stale_report_is_not_counted_on(snapshot: Callable[..., Snapshot]) -> None:
    live = snapshot(gptq={"in_flight": 1, "running": 30, "kv_use": 0.99, "age_s": 60.0})
    view = live.engines["gptq"]
    assert live.stale(view)
    assert live.loads() == {name: int(name == "gptq") for name in live.engines}
    assert live.kv_use() == 0.0
    assert live.total_load() == 1


def test_device_memory_counts_as_pressure_where_it_is_known(snapshot: Callable[..., Snapshot]) -> None:
    def pressed(free_bytes: int | None) -> bool:
        return measure(
            text="",
            prompt_tokens=1,
            snapshot=snapshot({"device_total_bytes": 1000, "device_free_bytes": free_bytes}),
            predictor=OutputLengthPredictor(),
            settings=RoutingSettings(),
        ).memory_pressure

    assert pressed(10)
    assert not pressed(100)
    assert not pressed(None)


def test_a_refusal_says_why_for_each_mode() -> None:
    refusal = Refusal(
        code=Ineligible.QUEUE_FULL,
        request_class=RequestClass.STANDARD,
        policy="cost",
        settings_version="v",
        by_mode={"fp16": Ineligible.QUEUE_FULL, "gptq": Ineligible.BREAKER_OPEN},
    )
    assert "fp16: queue full, gptq: circuit breaker open" in refusal.reason
