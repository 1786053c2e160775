"""Where the files lie."""

from pathlib import Path

import pytest

import app

ROOT = Path(app.__file__).parents[1]


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def cluster():
    return ROOT / "cluster"
