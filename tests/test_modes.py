"""The catalogue is consistent, and grouping shares an engine exactly when the settings are equal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.modes import CATALOGUE, REFERENCE, Mode, compose, group_into_engines, kv_cache_changes

PAPER_MODES = """
    fp16 int8 gptq awq speculative prefix_caching chunked_prefill continuous_batching cuda_graphs kv_cache_compression
    gptq_prefix_caching int8_continuous_batching
""".split()
platforms = st.sampled_from(["cpu", "cuda"])
modes = st.lists(st.sampled_from(list(CATALOGUE.values())), min_size=1, unique_by=lambda mode: mode.name)


def test_all_modes_of_the_paper_are_there():
    assert set(PAPER_MODES) <= set(CATALOGUE)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_every_mode_differs_from_fp16_or_says_why_not(platform):
    for mode in CATALOGUE.values():
        differs = bool(
            mode.weights != "fp16" or mode.prefix_reuse or mode.delta(platform) or platform in mode.draft_model
        )
        if mode.name == "fp16" or platform in mode.unsupported:
            continue
        alias = mode.alias_of.get(platform)
        assert differs or alias, f"{mode.name} is fp16 on {platform} and does not say so"
        if alias:
            target, reason = alias
            assert reason
            other = CATALOGUE[target]
            assert (mode.weights, mode.prefix_reuse, mode.delta(platform)) == (
                other.weights,
                other.prefix_reuse,
                other.delta(platform),
            )


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_delta_changes_reference_settings_to_other_values(platform):
    for mode in CATALOGUE.values():
        for key, value in mode.delta(platform).items():
            assert REFERENCE[platform][key] != value


@given(modes, platforms)
def test_sharing_groups_equal_settings_and_loses_no_mode(chosen, platform):
    engines = group_into_engines(chosen, platform)
    carried = [mode.name for engine in engines for mode in engine.modes]
    assert sorted(carried) == sorted(mode.name for mode in chosen)
    keys = [(engine.weights, engine.draft_model, repr(sorted(engine.delta.items()))) for engine in engines]
    assert len(set(keys)) == len(keys)
    for engine in engines:
        assert engine.name == engine.modes[0].name
        assert engine.prefix_caching == any(mode.prefix_reuse for mode in engine.modes)


@given(modes, platforms)
def test_without_sharing_every_mode_has_its_own_engine(chosen, platform):
    engines = group_into_engines(chosen, platform, share=False)
    assert [engine.name for engine in engines] == [mode.name for mode in chosen]


def test_a_composed_mode_equals_the_paper_hybrid():
    composed = compose("mine", [CATALOGUE["gptq"], CATALOGUE["prefix_caching"]])
    hybrid = CATALOGUE["gptq_prefix_caching"]
    assert (composed.weights, composed.prefix_reuse, composed.lossless) == (
        hybrid.weights,
        hybrid.prefix_reuse,
        hybrid.lossless,
    )


@pytest.mark.parametrize(
    ("parts", "lossless"),
    [
        (["speculative", "prefix_caching"], False),
        (["prefix_caching", "speculative_draft"], False),
        (["speculative_ngram", "wide_kv"], False),
        (["prefix_caching", "wide_kv"], False),
        (["chunked_prefill", "prefix_caching", "speculative"], False),
        (["chunked_prefill", "speculative"], True),
        (["chunked_prefill", "prefix_caching"], True),
        (["speculative_draft", "speculative"], True),
        (["int8", "prefix_caching"], False),
    ],
)
def test_techniques_that_share_the_kv_cache_are_not_lossless_together(parts, lossless):
    """vllm#43559: prefix caching with speculative decoding loses accuracy."""
    known = {**CATALOGUE, "wide_kv": Mode("wide_kv", "Wide KV", engine_args={"kv_cache_dtype": "float32"})}
    assert compose("mine", [known[name] for name in parts]).lossless is lossless


def test_no_mode_of_the_catalogue_is_called_lossless_with_two_changes_of_the_kv_cache():
    assert kv_cache_changes(CATALOGUE["gptq_prefix_caching"]) == {"reuse"}
    assert all(len(kv_cache_changes(mode)) < 2 for mode in CATALOGUE.values() if mode.lossless)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["gptq", "int8"], "different weights"),
        ([], "composed of nothing"),
        (["chunked_prefill", "odd"], "disagree on max_num_batched_tokens"),
    ],
)
def test_parts_that_contradict_are_refused(parts, message):
    known = {**CATALOGUE, "odd": Mode("odd", "Odd", engine_args={"max_num_batched_tokens": 1})}
    with pytest.raises(ValueError, match=message):
        compose("mine", [known[name] for name in parts])


def test_a_mode_named_twice_is_refused():
    with pytest.raises(ValueError, match="named twice"):
        group_into_engines([CATALOGUE["fp16"], CATALOGUE["fp16"]], "cpu")


def test_a_mode_this_platform_lacks_is_refused_with_its_reason():
    mode = Mode("tensor", "Tensor", unsupported={"cpu": "needs a tensor core"})
    with pytest.raises(ValueError, match="needs a tensor core"):
        group_into_engines([mode], "cpu")
