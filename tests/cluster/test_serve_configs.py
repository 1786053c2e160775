"""Serve configs are ones that Serve and the application take, and their engines fit on the device they name."""

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

import app
from app.config import load_settings
from app.engines.starting import vllm_args

SERVE = Path(app.__file__).parents[1] / "cluster" / "serve"
WEIGHTS_GB = {"fp16": 16.1, "int8": 8.6, "gptq": 5.8}
OVERHEAD_GB = 2.5
"""CUDA context, graphs and activations of an engine."""
DEVICE_GB = {"a100": 42.3, "a100_one_deployment_per_mode": 85.9}


def settings_of(path):
    config = yaml.safe_load(path.read_text())
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert (application.import_path, application.route_prefix) == ("app.main:build", "/")
    return load_settings(application.args)


@pytest.mark.parametrize("path", sorted(SERVE.glob("*.yaml")), ids=lambda path: path.stem)
def test_serve_and_the_application_take_it(path):
    settings = settings_of(path)
    assert settings.platform == ("cpu" if path.stem == "cpu" else "cuda")
    # In a container another host than its own would reach nothing.
    assert yaml.safe_load(path.read_text())["http_options"]["host"] == "0.0.0.0"


def test_every_mode_has_a_deployment_where_the_name_says_so():
    settings = settings_of(SERVE / "a100_one_deployment_per_mode.yaml")
    assert [spec.name for spec in settings.engine_specs] == list(settings.modes)
    assert all(len(spec.modes) == 1 for spec in settings.engine_specs)


@pytest.mark.parametrize("name", DEVICE_GB)
def test_engines_fit_on_the_device_and_each_finds_what_vllm_wants_free(name):
    settings = settings_of(SERVE / f"{name}.yaml")
    free_gb = DEVICE_GB[name]
    for spec in settings.engine_specs:
        args = vllm_args(spec, settings)
        assert args["gpu_memory_utilization"] * DEVICE_GB[name] <= free_gb, spec.name
        free_gb -= WEIGHTS_GB[spec.weights] + args["kv_cache_memory_bytes"] / 1e9 + OVERHEAD_GB
    assert free_gb >= 0
