from collections.abc import Callable
from typing import Any

import pytest

from app.modes import CATALOGUE, compose, group_into_engines
from app.routing.decision import Ineligible
from app.routing.eligibility import Eligibility, refusal_code
from app.routing.features import Quality, RequestFeatures, Wishes
from app.routing.mode_info import ModeInfo
from app.routing.profile import Profile, parse_profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import Residency, Snapshot
from app.routing.tags import Tag

Make = Callable[..., Any]


def reasons(
    modes: tuple[ModeInfo, ...],
    profile: Profile | None,
    request: RequestFeatures,
    live: Snapshot,
    **settings: Any,
) -> dict[str, Ineligible]:
    gate = Eligibility(modes, RoutingSettings(**settings), profile)
    eligible, refused = gate.split(request, live)
    # Both ways to ask agree.
    for mode in modes:
        assert gate.refuses(mode, request, live) == refused.get(mode.name)
    assert {mode.name for mode in eligible} | set(refused) == {mode.name for mode in modes}
    return refused


def test_all_serve_when_all_is_well(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    assert reasons(modes, profile, features(), snapshot()) == {}


@pytest.mark.parametrize(
    ("view", "why"),
    [
        ({"healthy": False}, Ineligible.UNHEALTHY),
        ({"residency": Residency.STARTING}, Ineligible.NOT_RESIDENT),
        ({"residency": Residency.FAILED}, Ineligible.NOT_RESIDENT),
        ({"in_flight": 256}, Ineligible.QUEUE_FULL),
        ({"in_flight": 255}, None),
        ({"residency": Residency.ASLEEP}, None),
    ],
)
def test_the_state_of_the_engine_counts_for_all_its_modes(
    modes: tuple[ModeInfo, ...],
    profile: Profile,
    features: Make,
    snapshot: Make,
    view: dict[str, Any],
    why: Ineligible | None,
) -> None:
    found = reasons(modes, profile, features(), snapshot(gptq=view))
    assert found == ({"gptq": why, "gptq_prefix_caching": why} if why else {})


def test_an_engine_that_is_not_there_is_unhealthy(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make
) -> None:
    assert set(reasons(modes, profile, features(), Snapshot()).values()) == {Ineligible.UNHEALTHY}


def test_a_tripped_mode_leaves_its_engines_others(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    live = snapshot({"tripped_modes": frozenset({"gptq_prefix_caching"})})
    assert reasons(modes, profile, features(), live) == {"gptq_prefix_caching": Ineligible.BREAKER_OPEN}


def test_a_tenant_with_its_share_of_a_queue_is_kept_from_it_and_told_so(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    request = features(wishes=Wishes(crowded_engines=("gptq", "int8")))
    refused = reasons(modes, profile, request, snapshot(int8={"in_flight": 256}))
    assert {refused[mode] for mode in ("gptq", "gptq_prefix_caching")} == {Ineligible.TENANT_QUEUE_FULL}
    assert {refused[mode] for mode in ("int8", "int8_continuous_batching")} == {Ineligible.QUEUE_FULL}
    assert len(refused) == 4


def test_an_engine_that_failed_this_request_is_left_out(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    request = features(wishes=Wishes(excluded_engines=("speculative",)))
    assert reasons(modes, profile, request, snapshot()) == {"speculative": Ineligible.EXCLUDED}


def test_exact_admits_lossless_modes_only(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    request = features(wishes=Wishes(quality=Quality.EXACT))
    found = reasons(modes, profile, request, snapshot(), accepted_modes=frozenset({"int8"}))
    assert found == {mode.name: Ineligible.NOT_LOSSLESS for mode in modes if not mode.lossless}


def test_without_evidence_only_lossless_and_declared_modes_serve(
    modes: tuple[ModeInfo, ...], features: Make, snapshot: Make
) -> None:
    found = reasons(modes, None, features(), snapshot(), accepted_modes=frozenset({"int8"}))
    assert found == dict.fromkeys(
        ("int8_continuous_batching", "gptq", "gptq_prefix_caching"), Ineligible.QUALITY_UNPROVEN
    )


@pytest.mark.parametrize(
    ("label", "tag", "why"),
    [
        ("gpqa", Tag.MULTIPLE_CHOICE, Ineligible.QUALITY_FAILED),
        (None, Tag.MULTIPLE_CHOICE, None),
        ("unheard_of", Tag.MULTIPLE_CHOICE, None),
        (None, Tag.MATHEMATICS, Ineligible.QUALITY_UNPROVEN),
        (None, Tag.CODE, Ineligible.QUALITY_UNPROVEN),
        (None, Tag.NONE, Ineligible.QUALITY_FAILED),
    ],
)
def test_the_most_specific_evidence_decides(
    content: Make,
    modes: tuple[ModeInfo, ...],
    features: Make,
    snapshot: Make,
    label: str | None,
    tag: Tag,
    why: Ineligible | None,
) -> None:
    """vllm#50702, #43559: some combinations lose accuracy, so evidence is per mode, combinations included."""

    def piece(scope: str, outcome: str) -> dict[str, Any]:
        return {"mode": "gptq", "scope": scope, "outcome": outcome, "metric": "accuracy"}

    quality = [
        piece("gpqa", "fail"),
        piece("multiple_choice", "pass"),
        piece("mathematics", "insufficient_evidence"),
        piece("code", "no_signal"),
        piece("standard", "pass"),
        piece("standard", "fail"),
        piece("any", "pass"),
    ]
    profile = parse_profile(content(quality=quality), model="tiny", hardware="box")
    found = reasons(modes, profile, features(label=label, tag=tag), snapshot())
    assert found.get("gptq") is why
    assert found["gptq_prefix_caching"] is Ineligible.QUALITY_UNPROVEN


def piece_of(mode: str, scope: str, outcome: str = "fail", metric: str = "kl") -> dict[str, Any]:
    return {"mode": mode, "scope": scope, "outcome": outcome, "metric": metric}


@pytest.mark.parametrize(
    ("pieces", "tag", "why"),
    [
        ([("none", "fail")], Tag.NONE, Ineligible.QUALITY_FAILED),
        ([("none", "fail")], Tag.CODE, None),
        ([("none", "fail"), ("any", "pass")], Tag.CODE, None),
        ([("any", "fail"), ("none", "pass")], Tag.NONE, None),
        ([("any", "fail"), ("none", "no_signal")], Tag.NONE, Ineligible.QUALITY_FAILED),
        ([("none", "insufficient_evidence")], Tag.NONE, None),
        # Its texts decided nothing, its own answers did.
        ([("none", "insufficient_evidence"), ("none", "fail")], Tag.NONE, Ineligible.QUALITY_FAILED),
    ],
)
def test_a_lossless_mode_serves_until_it_fails(
    content: Make,
    modes: tuple[ModeInfo, ...],
    features: Make,
    snapshot: Make,
    pieces: list[tuple[str, str]],
    tag: Tag,
    why: Ineligible | None,
) -> None:
    quality = [piece_of("speculative", *piece) for piece in pieces]
    profile = parse_profile(content(quality=quality), model="tiny", hardware="box")
    accepted = {"accepted_modes": frozenset({"speculative"})}
    assert reasons(modes, profile, features(tag=tag), snapshot()).get("speculative") is why
    assert "speculative" not in reasons(modes, profile, features(tag=tag), snapshot(), **accepted)
    # Accepting a loss does not make it exact.
    exact = features(tag=tag, wishes=Wishes(quality=Quality.EXACT))
    for settings in ({}, accepted):
        assert reasons(modes, profile, exact, snapshot(), **settings).get("speculative") is why


def test_the_reference_cannot_fail_against_itself(
    content: Make, modes: tuple[ModeInfo, ...], features: Make, snapshot: Make
) -> None:
    quality = [piece_of("fp16", "any"), piece_of("prefix_caching", "any"), piece_of("gptq", "any")]
    profile = parse_profile(content(quality=quality), model="tiny", hardware="box")
    refused = reasons(modes, profile, features(), snapshot())
    assert "fp16" not in refused
    assert refused["prefix_caching"] is Ineligible.QUALITY_FAILED
    # What is lossy is measured against another mode, whatever ratios are taken against.
    lossy = reasons(modes, profile, features(), snapshot(), reference_mode="gptq")
    assert (lossy["gptq"], lossy["fp16"]) == (Ineligible.QUALITY_FAILED, Ineligible.QUALITY_FAILED)


def test_a_composition_that_shares_the_kv_cache_needs_a_pass(content: Make, features: Make, snapshot: Make) -> None:
    mine = compose("mine", [CATALOGUE["speculative"], CATALOGUE["prefix_caching"]])
    (engine,) = group_into_engines([CATALOGUE["speculative"], mine], "cpu")
    infos = tuple(ModeInfo(mode.name, engine.name, "fp16", mode.lossless) for mode in engine.modes)
    for outcome, why in (("pass", None), ("fail", Ineligible.QUALITY_FAILED)):
        profile = parse_profile(content(quality=[piece_of("mine", "any", outcome)]), model="tiny", hardware="box")
        assert reasons(infos, profile, features(), snapshot()).get("mine") is why
    unproven = reasons(infos, None, features(), snapshot())
    assert unproven == {"mine": Ineligible.QUALITY_UNPROVEN}
    assert reasons(infos, None, features(), snapshot(), accepted_modes=frozenset({"mine"})) == {}
    exact = features(wishes=Wishes(quality=Quality.EXACT))
    assert reasons(infos, profile, exact, snapshot()) == {"mine": Ineligible.NOT_LOSSLESS}


def test_a_conversation_keeps_its_weights_while_they_are_there(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    request = features(wishes=Wishes(conversation="c", conversation_weights="gptq"))
    kept = reasons(modes, profile, request, snapshot())
    assert set(kept.values()) == {Ineligible.OTHER_WEIGHTS}
    assert set(kept) == {mode.name for mode in modes if mode.weights != "gptq"}
    gone = reasons(modes, profile, request, snapshot(gptq={"healthy": False}))
    assert set(gone) == {"gptq", "gptq_prefix_caching"}
    # A full queue is not the end of an engine: the conversation waits.
    full = reasons(modes, profile, request, snapshot(gptq={"in_flight": 999}))
    assert len(full) == len(modes)


def test_a_mode_beyond_the_memory_limit_is_left_out(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    found = reasons(modes, profile, features(), snapshot(), max_memory_ratio=1.02)
    assert found == {"gptq": Ineligible.MEMORY}


def test_clients_cannot_grow_the_gates_memory(
    modes: tuple[ModeInfo, ...], profile: Profile, features: Make, snapshot: Make
) -> None:
    gate = Eligibility(modes, RoutingSettings(), profile)
    for number in range(1000):
        gate.split(features(label=f"label {number}"), snapshot())
    assert len(gate._gate._refused) == 1


def test_the_code_of_a_refusal_is_what_waiting_would_cure() -> None:
    assert refusal_code([Ineligible.QUALITY_FAILED, Ineligible.QUEUE_FULL]) is Ineligible.QUEUE_FULL
    assert refusal_code([]) is Ineligible.UNKNOWN_MODE
    assert {refusal_code([code]) for code in Ineligible} == set(Ineligible)
