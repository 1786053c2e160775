import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.routing.coefficients import compile_profile
from app.routing.features import RequestFeatures
from app.routing.mode_info import ModeInfo
from app.routing.policies.cost import CostPolicy
from app.routing.policies.static import StaticPolicy
from app.routing.profile import Profile, parse_profile
from app.routing.settings import RoutingSettings
from app.routing.tags import Tag
from loadgen.profile_answer import answer, words_of
from loadgen.recipe import load_recipe
from loadgen.routing_simulation import SimulatedRequest, simulate

MODES = (
    ModeInfo("fp16", "fp16", "fp16", lossless=True),
    ModeInfo("prefix_caching", "fp16", "fp16", lossless=True, prefix_reuse=True),
    ModeInfo("speculative", "speculative", "fp16", lossless=True, speculative=True),
    ModeInfo("int8", "int8", "int8", lossless=False),
)
PLAIN = {"prefill_ms": [[1, 10.0], [1001, 110.0]], "step_ms": [[1, 10.0], [8, 24.0]]}
SPECULATIVE = {**PLAIN, "step_ms": [[1, 12.0], [8, 40.0]], "speculation": {"accepted_per_step": {"rewriting": 2.0}}}
FAST = {**PLAIN, "step_ms": [[1, 5.0], [8, 12.0]]}


def profile_of(slowdown: float = 2.0, **more: object) -> Profile:
    engines = ("fp16", "speculative", "int8")
    content = {
        "schema_version": 1,
        "version": "p",
        "model": "m",
        "hardware": "h",
        "modes": {"fp16": PLAIN, "prefix_caching": PLAIN, "speculative": SPECULATIVE, "int8": FAST},
        "interference": {one: {other: slowdown for other in engines if other != one} for one in engines},
        **more,
    }
    return parse_profile(content, model="m", hardware="h")


PROFILE, SETTINGS = profile_of(), RoutingSettings()
KNOWN = compile_profile(PROFILE, MODES)


def static(mode: str) -> StaticPolicy:
    return StaticPolicy(mode, MODES, SETTINGS, fall_back=False)


def request(due_s: float = 0.0, output_tokens: int = 11, **more: object) -> SimulatedRequest:
    features = RequestFeatures(prompt_tokens=501, expected_output_tokens=output_tokens, **more)  # type: ignore[arg-type]
    return SimulatedRequest(due_s, features)


def test_alone_a_request_takes_its_prefill_and_its_steps() -> None:
    served = simulate([request()], static("fp16"), KNOWN, PROFILE.interference)
    assert served[0].mode == "fp16"
    assert served[0].latency_ms == pytest.approx(60 + 10 * 10)
    rewriting = simulate([request(tag=Tag.REWRITING)], static("speculative"), KNOWN, PROFILE.interference)
    assert rewriting[0].latency_ms == pytest.approx(60 + 10 / 3 * 12)


def test_two_at_once_share_a_batch_and_prompts_wait_for_one_another() -> None:
    served = simulate([request(), request()], static("fp16"), KNOWN, {})
    assert [one.latency_ms for one in served] == [pytest.approx(120 + 10 * 12)] * 2


def test_a_conversation_finds_its_beginning_in_the_cache() -> None:
    twice = [SimulatedRequest(due_s, request().features, 0, 400) for due_s in (0.0, 5.0)]
    first, second = simulate(twice, static("prefix_caching"), KNOWN, {})
    assert first.latency_ms is not None
    assert second.latency_ms == pytest.approx(first.latency_ms - 40)
    again = simulate(twice, static("fp16"), KNOWN, {})
    assert again[0].latency_ms == pytest.approx(again[1].latency_ms)


loads = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 60), st.sampled_from(list(Tag))), min_size=1, max_size=25)


@given(loads, st.sampled_from(["cost", "fp16", "speculative", "prefix_caching"]))
@settings(deadline=None, max_examples=40)
def test_everything_is_served_and_never_faster_than_alone(load: list[tuple[float, int, Tag]], name: str) -> None:
    requests = [request(due_s, tokens, tag=tag) for due_s, tokens, tag in sorted(load, key=lambda one: one[0])]
    policy = CostPolicy(MODES, SETTINGS, PROFILE) if name == "cost" else static(name)
    for one, served in zip(requests, simulate(requests, policy, KNOWN, PROFILE.interference), strict=True):
        assert served.mode is not None
        assert served.latency_ms is not None
        known = KNOWN[served.mode]
        accepted = known.accepted.get(one.features.tag, 0.0)
        alone = 60 + (one.features.expected_output_tokens - 1) / (1 + accepted) * known.step_ms[1]
        assert served.latency_ms >= alone - 1e-3


def test_the_answer_names_winners_and_what_lacks_evidence() -> None:
    found = answer(PROFILE, MODES, load_recipe("cpu"), SETTINGS)
    assert found.winners["rewriting"].best == "speculative"
    assert found.winners["free_text"].best == "fp16"
    assert found.winners["free_text"].fastest == "int8"
    assert found.unproven == ("int8",)
    assert "int8" not in found.light.static_ms
    assert found.light.saved > 0
    words = " ".join(words_of(found))
    assert "rewriting: speculative is fastest" in words
    assert "free text: fp16 is fastest" in words
    assert "Left out for want of quality evidence: int8" in words


def test_with_evidence_a_faster_lossy_mode_is_the_one_to_beat() -> None:
    passed = [{"mode": "int8", "scope": "any", "outcome": "pass", "metric": "kl", "samples": 500}]
    found = answer(profile_of(quality=passed), MODES, load_recipe("cpu"), SETTINGS)
    assert found.winners["free_text"].best == "int8"
    assert found.light.best_static == "int8"
    assert found.unproven == ()


def test_one_mode_that_is_best_everywhere_makes_routing_pointless() -> None:
    profile = profile_of(modes={"fp16": PLAIN, "speculative": {**PLAIN, "step_ms": [[1, 30.0], [8, 90.0]]}})
    words = words_of(answer(profile, MODES, load_recipe("cpu"), SETTINGS))
    assert words[-1] == "Routing gains little here: always fp16 is as good, and simpler."
