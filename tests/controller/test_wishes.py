"""What a request may ask for, and what of it is refused or ignored."""

import pytest

from app.controller.errors import ApiError
from app.controller.wishes import choices_of, max_tokens_of, read_asked
from app.routing.features import Objective, Quality
from app.wire import Endpoint


def test_nothing_is_asked_for_by_default():
    asked = read_asked({}, None)
    assert (asked.wishes.objective, asked.wishes.quality) == (Objective.LATENCY, Quality.GATED)
    assert (asked.policy, asked.label, asked.deadline_s) == (None, None, None)


def test_headers_win_over_metadata():
    metadata = {"policy": "rules", "workload": "code", "quality": "exact", "objective": "energy"}
    asked = read_asked({"x-modeswitch-policy": "cost"}, metadata)
    assert (asked.policy, asked.label) == ("cost", "code")
    assert (asked.wishes.quality, asked.wishes.objective) == (Quality.EXACT, Objective.ENERGY)


def test_a_latency_limit_asks_for_the_least_energy_within_it():
    wishes = read_asked({"x-modeswitch-latency-limit-ms": "250"}, None).wishes
    assert (wishes.objective, wishes.latency_limit_ms) == (Objective.LIMIT, 250.0)


@pytest.mark.parametrize(
    ("headers", "objective"),
    [
        ({}, Objective.LATENCY),
        ({"latency-limit-ms": "250"}, Objective.LIMIT),
        ({"latency-limit-ms": "250", "objective": "energy"}, Objective.LIMIT),
        ({"latency-limit-ms": "250", "objective": "limit"}, Objective.LIMIT),
        ({"energy-weight": "0.2"}, Objective.WEIGHTED),
        ({"energy-weight": "0", "objective": "weighted"}, Objective.WEIGHTED),
        ({"latency-limit-ms": "250", "objective": "latency"}, None),
        ({"latency-limit-ms": "250", "objective": "weighted"}, None),
        ({"energy-weight": "0.2", "objective": "energy"}, None),
        ({"energy-weight": "0.2", "latency-limit-ms": "250"}, None),
    ],
)
def test_no_wish_is_without_effect(headers, objective):
    asked = {f"x-modeswitch-{name}": value for name, value in headers.items()}
    if objective is None:
        with pytest.raises(ApiError) as refused:
            read_asked(asked, None)
        assert (refused.value.status, refused.value.code) == (400, "invalid_objective")
    else:
        assert read_asked(asked, None).wishes.objective is objective


@pytest.mark.parametrize(
    ("headers", "objective"),
    [
        ({}, Objective.ENERGY),
        ({"quality": "exact"}, Objective.ENERGY),
        ({"objective": "latency"}, Objective.LATENCY),
        ({"energy-weight": "0.2"}, Objective.WEIGHTED),
        ({"latency-limit-ms": "250"}, Objective.LIMIT),
    ],
)
def test_the_operators_objective_is_for_requests_that_ask_for_none(headers, objective):
    asked = {f"x-modeswitch-{name}": value for name, value in headers.items()}
    assert read_asked(asked, None, otherwise=Objective.ENERGY).wishes.objective is objective


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("objective", "speed"),
        ("objective", "limit"),
        ("quality", "good"),
        ("energy-weight", "2"),
        ("energy-weight", "much"),
        ("latency-limit-ms", "-1"),
        ("latency-limit-ms", "nan"),
        ("deadline-ms", "soon"),
        ("deadline-ms", "0"),
        ("deadline-ms", "inf"),
    ],
)
def test_nonsense_is_a_clear_error(name, value):
    with pytest.raises(ApiError) as refused:
        read_asked({f"x-modeswitch-{name}": value}, None)
    assert refused.value.status == 400


def test_metadata_may_bring_numbers_as_numbers():
    asked = read_asked({}, {"deadline_ms": 500, "latency_limit_ms": 250.5})
    assert (asked.deadline_s, asked.wishes.latency_limit_ms) == (0.5, 250.5)
    assert read_asked({}, {"energy_weight": 1, "objective": "weighted"}).wishes.energy_weight == 1.0


@pytest.mark.parametrize("name", ["deadline_ms", "latency_limit_ms", "energy_weight"])
@pytest.mark.parametrize("value", [True, [500], {"a": 1}, -1, 10**400])
def test_metadata_that_is_no_number_where_one_is_meant_is_a_clear_error(name, value):
    with pytest.raises(ApiError) as refused:
        read_asked({}, {name: value})
    assert refused.value.status == 400


@pytest.mark.parametrize("metadata", [7, "x", [1], {"policy": 7, "workload": {"a": 1}, "objective": None}])
def test_metadata_of_other_shapes_is_ignored(metadata):
    assert read_asked({}, metadata).policy is None


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "n": 3}, 5),
        ({"max_tokens": 10**400}, 10**9),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": -1}, None),
    ],
)
def test_the_limit_of_output_tokens_is_that_of_each_choice(body, limit):
    assert max_tokens_of(Endpoint.CHAT, body) == limit


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({}, 16),
        ({"max_tokens": None}, 16),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 5),
        ({"max_tokens": -1}, None),
    ],
)
def test_a_completion_is_short_unless_it_says_otherwise(body, limit):
    assert max_tokens_of(Endpoint.COMPLETION, body) == limit


@pytest.mark.parametrize(("n", "choices"), [(None, 1), (3, 3), ("many", 1), (0, 1), (True, 1), (10**400, 10**9)])
def test_how_many_choices(n, choices):
    assert choices_of({"n": n}) == choices
