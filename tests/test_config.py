"""Presets are valid, what the user says wins, and what cannot be served is refused before anything starts."""

import pytest
import yaml

from app.config import ConfigError, LiveSettings, load_live, load_settings
from app.energy.rows import TEXT_KEYS, RequestRecord, RowRefused
from app.engines.starting import vllm_args


def test_auto_picks_the_preset_by_what_the_cluster_has():
    assert load_settings({}).preset == "cpu"
    assert load_settings({}, has_gpu=True).preset == "a100-40gb"


def test_the_cpu_preset_starts_four_engines_with_the_modes_they_share():
    settings = load_settings({"preset": "cpu"})
    assert {spec.name: [mode.name for mode in spec.modes] for spec in settings.engine_specs} == {
        "fp16": ["fp16", "prefix_caching"],
        "int8": ["int8", "int8_continuous_batching"],
        "gptq": ["gptq", "gptq_prefix_caching"],
        "speculative": ["speculative"],
    }


def test_modes_may_each_have_a_deployment_of_their_own():
    specs = load_settings({"preset": "cpu", "share_engines": False}).engine_specs
    assert [spec.name for spec in specs] == [mode.name for spec in specs for mode in spec.modes]
    assert len(specs) == 7
    assert {spec.name for spec in specs if spec.prefix_caching} == {"prefix_caching", "gptq_prefix_caching"}


def test_engine_settings_merge_key_by_key():
    settings = load_settings({"engines": {"int8": {"engine_args": {"max_num_seqs": 8}, "num_cpus": 0.5}}})
    int8, fp16 = settings.engine_settings("int8"), settings.engine_settings("fp16")
    assert int8.engine_args == {**fp16.engine_args, "max_num_seqs": 8}
    assert (int8.num_cpus, int8.kv_cache_memory_bytes) == (0.5, fp16.kv_cache_memory_bytes)


def test_modes_can_be_composed():
    args = {"modes": ["fp16", {"name": "gptq_fp8_kv", "of": ["gptq", "kv_cache_compression"]}]}
    (_, spec) = load_settings(args).engine_specs
    assert (spec.name, spec.weights, spec.delta) == ("gptq_fp8_kv", "gptq", {"kv_cache_dtype": "fp8"})


@pytest.mark.parametrize("name", sorted(TEXT_KEYS))
def test_a_mode_is_not_named_as_the_ledger_names_texts(name):
    with pytest.raises(RowRefused):
        RequestRecord("r", 1.0, name, name, None, None, "ok", snapshot={"engines": {name: {}}}).columns()
    with pytest.raises(ConfigError, match=f"modes.*cannot be named '{name}'"):
        load_settings({"modes": ["fp16", {"name": name, "of": ["int8"]}]})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"preset": "h100"}, "preset 'h100' is unknown"),
        ({"moodes": ["fp16"]}, "moodes"),
        ({"modes": ["fp32"]}, "'fp32' is unknown; there are fp16"),
        ({"modes": []}, "modes"),
        ({"modes": ["fp16", "fp16"]}, "named twice"),
        ({"live": {"policy": "static:awq"}}, "policy 'static:awq': its mode is not among"),
        ({"live": {"routing": {"accepted_modes": ["int-8"]}}}, "accepted_modes: there is no mode named int-8"),
        ({"live": {"routing": {"reference_mode": "fp61"}}}, "reference_mode: there is no mode named fp61"),
        ({"live": {"routing": {"kv_pressure": 1.5}}}, "live.routing.kv_pressure"),
        ({"energy": {"interval_ms": 1}}, "energy.interval_ms"),
        ({"engines": {"awq": {}}}, "no engine named awq"),
        ({"engines": {"int8": {"num_cpus": -1}}}, "num_cpus"),
        ({"modes": ["fp16", "speculative_draft"]}, "set model.draft"),
        ({"modes": ["fp16", {"name": "int8", "of": ["gptq"]}]}, "is in the catalogue"),
        ({"model": {"checkpoints": {"int9": "x"}}}, "checkpoints"),
    ],
)
def test_what_is_wrong_is_named(args, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(args)


@pytest.mark.parametrize("value", [".inf", ".nan"])
@pytest.mark.parametrize(
    "setting",
    [
        "routing: {{others_weight: {}}}",
        "routing: {{max_energy_ratio: {}}}",
        "deadline_s: {}",
        "tenants: {{blue: {{share: {}}}}}",
        "tenants: {{blue: {{tokens_per_s: {}}}}}",
    ],
)
def test_settings_that_may_change_while_it_serves_are_finite(setting, value):
    changes = yaml.safe_load(setting.format(value))
    with pytest.raises(ConfigError, match="finite number"):
        load_settings({"live": changes})
    with pytest.raises(ConfigError, match="finite number"):
        load_live(LiveSettings(), changes)


def test_memory_fractions_count_for_the_whole_device():
    two = {"preset": "a100-40gb", "modes": ["fp16", "int8"]}
    fits = load_settings({**two, "engine_defaults": {"gpu_memory_utilization": 0.2}})
    assert len(fits.engine_specs) == 2
    with pytest.raises(ConfigError) as refusal:
        load_settings({**two, "engine_defaults": {"gpu_memory_utilization": 0.6}})
    lines = str(refusal.value).splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("fp16", "int8", "sum"))] == ["fp16", "int8", "sum"]
    assert "1.20" in lines[-1]


def test_every_engine_of_the_gpu_preset_starts_beside_the_others():
    """vLLM asks for its fraction of the device to be free, whatever the KV cache's size in bytes."""
    settings = load_settings({"preset": "a100-40gb"})
    fractions = [vllm_args(spec, settings).get("gpu_memory_utilization") for spec in settings.engine_specs]
    assert len(fractions) == 3
    assert None not in fractions
    assert sum(fractions) <= 1
    # What is free when the last one starts: the device without the weights and caches of those before it, in GB, and
    # 2.5 GB for the context, graphs and activations of each.
    total_gb, kv_gb = 42.3, settings.engine_defaults.kv_cache_memory_bytes / 1e9
    assert fractions[-1] * total_gb <= total_gb - (16.1 + 8.6) - 2 * (kv_gb + 2.5)
    assert 16.1 + 8.6 + 5.8 + 3 * (kv_gb + 2.5) <= total_gb


NEITHER = {"engine_defaults": {"gpu_memory_utilization": None}}


@pytest.mark.parametrize(
    "args",
    [
        NEITHER,
        {"engine_defaults": {"gpu_memory_utilization": None, "kv_cache_memory_bytes": None}},
        {"engine_defaults": {"engine_args": {"gpu_memory_utilization": None}}},
    ],
)
def test_an_unset_fraction_is_vllms_own(args):
    with pytest.raises(ConfigError, match=r"not set, vLLM takes 0\.92") as refusal:
        load_settings({"preset": "a100-40gb", "modes": ["fp16", "int8"], **args})
    assert "1.84" in str(refusal.value)
    assert load_settings({"preset": "a100-40gb", "modes": ["fp16"], **args})
    assert load_settings({"preset": "cpu", "modes": ["fp16", "int8"], **args})


def test_the_fraction_that_counts_is_the_one_vllm_gets():
    two = {"preset": "a100-40gb", "modes": ["fp16", "int8"]}
    with pytest.raises(ConfigError, match=r"0\.15 *1\.25\n.*1\.05"):
        load_settings({**two, "engines": {"fp16": {"engine_args": {"gpu_memory_utilization": 0.9}}}})
    fits = {"engines": {"fp16": {"gpu_memory_utilization": 0.9, "engine_args": {"gpu_memory_utilization": 0.5}}}}
    assert load_settings({**two, **fits})
    with pytest.raises(ConfigError, match="must be in"):
        load_settings({**two, "engine_defaults": {"engine_args": {"gpu_memory_utilization": "half"}}})


def test_home_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MODESWITCH_HOME", str(tmp_path))
    assert load_settings({}).home == tmp_path
