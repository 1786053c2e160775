"""The meter's weights are the profile's joules, by engine, where they were measured."""

import pytest

from app.config import load_settings
from app.controller.token_costs import token_costs
from app.energy.attribution import TokenWeights
from app.routing.profile import Profile

SPECS = load_settings({"preset": "cpu", "modes": ["fp16", "prefix_caching", "int8", "speculative"]}).engine_specs
TIMED = {"prefill_ms": [[1, 1], [100, 50]], "step_ms": [[1, 20], [8, 40]]}
JOULES = {"prefill_j": [[50, 1.0], [400, 6.0]], "decode_j_per_token": [[1, 0.3], [8, 0.1]]}


def costs(**modes):
    content = {"schema_version": 1, "version": "v", "model": "m", "hardware": "h", "modes": modes}
    return token_costs(Profile.model_validate(content), SPECS)


def test_tokens_and_watts_are_those_of_shared_steps():
    found = costs(fp16={**TIMED, **JOULES})
    assert found.tokens == {"fp16": TokenWeights(pytest.approx(6.0 / 400), 0.1)}
    assert found.watts == {"fp16": pytest.approx(0.1 * 8 / 0.040)}


def test_an_engine_takes_the_first_of_its_modes_that_was_measured():
    found = costs(fp16=TIMED, prefix_caching={**TIMED, **JOULES}, int8=TIMED)
    assert found.tokens.keys() == {"fp16"}


def test_accepted_drafts_are_tokens_of_the_same_step():
    found = costs(speculative={**TIMED, **JOULES, "speculation": {"default": 0.5}})
    assert found.watts == {"speculative": pytest.approx(0.1 * 8 * 1.5 / 0.040)}


def test_what_was_not_measured_has_no_weight():
    assert costs(fp16={**TIMED, **JOULES, "decode_j_per_token": [[1, 0.3], [8, 0.0]]}) == ({}, {})
    assert costs(fp16={**TIMED, **JOULES, "decode_j_per_token": [[4, 0.3]]}).watts == {}
    assert token_costs(None, SPECS) == ({}, {})
