import json
from collections.abc import Callable
from typing import Any

import pytest

from app.routing.coefficients import MAX_BATCH, Curve, compile_profile
from app.routing.mode_info import ModeInfo
from app.routing.profile import Profile, ProfileRefused, parse_profile


def test_a_profile_is_read_from_text_and_from_data(content: Callable[..., dict[str, Any]]) -> None:
    data = content()
    profile = parse_profile(json.dumps(data), model="tiny", hardware="box")
    assert profile == parse_profile(data, model="tiny", hardware="box")
    assert parse_profile(profile.model_dump_json(), model="tiny", hardware="box") == profile


@pytest.mark.parametrize(
    ("served", "words"),
    [
        ({"model": "large", "hardware": "box"}, "measured for model 'tiny', but 'large' serves"),
        ({"model": "tiny", "hardware": "A100"}, "measured for hardware 'box', but 'A100' serves"),
    ],
)
def test_another_model_or_hardware_is_refused(
    content: Callable[..., dict[str, Any]], served: dict[str, str], words: str
) -> None:
    with pytest.raises(ProfileRefused, match=words):
        parse_profile(content(), **served)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"version": "erste Größe"}, "version"),
        ({"version": "v1\n"}, "version"),
        ({"version": "日本"}, "version"),
        ({"modes": {}}, "modes"),
        ({"modes": {"fp16": {"prefill_ms": [[1, 5.0]], "step_ms": [[1, 2.0]]}}}, "prefill_ms"),
        ({"modes": {"fp16": {"prefill_ms": [[9, 5.0], [1, 6.0]], "step_ms": [[1, 2.0]]}}}, "must rise"),
        ({"modes": {"fp16": {"prefill_ms": [[1, 5.0], [9, -1.0]], "step_ms": [[1, 2.0]]}}}, "prefill_ms"),
        ({"interference": {"fp16": {"gptq": 0.5}}}, "interference"),
        ({"quality": [{"mode": "gptq", "scope": "any", "outcome": "fine", "metric": "kl"}]}, "outcome"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_malformed_profile_is_refused_with_the_place(
    content: Callable[..., dict[str, Any]], change: dict[str, Any], place: str
) -> None:
    with pytest.raises(ProfileRefused, match=place):
        parse_profile(content(**change), model="tiny", hardware="box")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema_version": NaN}', b"\xff\xfe"])
def test_what_is_no_profile_at_all_is_refused(text: str | bytes) -> None:
    with pytest.raises(ProfileRefused):
        parse_profile(text, model="tiny", hardware="box")


def test_a_curve_goes_through_its_points_and_on() -> None:
    curve = Curve(((10, 1.0), (20, 3.0), (40, 4.0)))
    assert [curve(x) for x in (0, 10, 15, 20, 30, 40, 60)] == [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert Curve(((10, 5.0), (20, 3.0)))(1000) == 3.0
    assert Curve(((1, 7.0),))(99) == 7.0


def test_only_deployed_modes_are_compiled(profile: Profile, modes: tuple[ModeInfo, ...]) -> None:
    compiled = compile_profile(profile, modes[:1])
    assert list(compiled) == ["fp16"]
    step_ms = compiled["fp16"].step_ms
    assert step_ms[1] == 20.0
    assert step_ms[8] == pytest.approx(34.0)
    assert len(step_ms) == MAX_BATCH + 1
    assert step_ms[MAX_BATCH] > step_ms[8]
