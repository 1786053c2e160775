import json

import pytest
from typer.testing import CliRunner

from loadgen.__main__ import make_app


def test_prints_percentiles_of_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.decision_bench.MANY_PREFIXES", 20_000)
    result = CliRunner().invoke(make_app(), ["decision-bench", "--json", "--repeats", "20"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert {"features", "policy.rules", "policy.cost", "features+cost", "prefix_index"} <= set(figures)
    assert figures["features+cost"]["p50_us"] > 0
    assert figures["prefix_index"]["megabytes"] > 0
