import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.engines.checkpoints import embedded
from app.engines.store import Scheme, checkpoint_folder
from loadgen.__main__ import make_app

pytest.importorskip("skl2onnx")


@pytest.fixture(autouse=True)
def few_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.decision_bench.MANY_PREFIXES", 20_000)


def bench(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["decision-bench", "--json", "--repeats", "20", *map(str, arguments)])
    return result.exit_code, result.output


def test_prints_percentiles_of_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODESWITCH_HOME", str(tmp_path))
    code, output = bench()
    assert code == 0, output
    figures = json.loads(output)
    assert {f"policy.{name}" for name in ("rules", "rules_published", "cost", "learned", "static:fp16")} <= set(figures)
    assert {"features", "features+cost", "features+learned", "prefix_index"} <= set(figures)
    assert "tokenising" not in figures, "nothing is prepared"
    assert figures["features+cost"]["p50_us"] > 0
    assert figures["prefix_index"]["megabytes"] > 0


def test_times_the_embedded_models_tokenizer_once_it_is_prepared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_folder: Path
) -> None:
    monkeypatch.setenv("MODESWITCH_HOME", str(tmp_path))
    folder = checkpoint_folder(embedded.REFERENCE, Scheme.FP16, tmp_path)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(model_folder)
    code, output = bench()
    assert code == 0, output
    assert json.loads(output)["tokenising"]["p50_us"] > 0


@pytest.mark.parametrize("option", ["--tokenizer", "--trained-model"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("neither")
    code, output = bench(option, tmp_path / "file")
    assert (code, str(tmp_path / "file") in output) == (2, True), output
