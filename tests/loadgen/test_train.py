import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from app.controller.trained_model import OnnxPredictor
from app.routing.policies.learned import FEATURE_NAMES, LearnedPolicy, PredictorRefused
from app.routing.profile import GateOutcome, QualityEvidence
from app.routing.settings import RoutingSettings
from app.routing.tags import Tag
from loadgen.__main__ import make_app
from loadgen.best_mode import Constraint, Constraints
from loadgen.exported_model import write_model
from loadgen.learners import LEARNERS, NothingToLearn, cross_validate, fit, judge, static_choices
from loadgen.paper.tables import load_tables
from loadgen.training_data import (
    LIVE_FEATURES,
    Dataset,
    TrainingDataUnusable,
    paper_dataset,
    paper_features,
    read_training,
    twins,
)

pytest.importorskip("sklearn")
pytest.importorskip("skl2onnx")


def row(group: int, prompt: int, batch: int, *, energy: bool = True, tag: Tag = Tag.NONE) -> dict[str, Any]:
    """int8 is best for long prompts, gptq for short ones; in a batch gptq needs more energy than the reference."""
    features = msgspec.structs.replace(paper_features(prompt, 64, tag), batch_size=batch)
    long = prompt > 500
    cost = {
        "fp16": 100.0 + prompt,
        "int8": (40.0 if long else 90.0) + prompt,
        "gptq": (95.0 if long else 30.0) + prompt,
    }
    used = {"fp16": 10.0, "int8": 8.0, "gptq": 12.0 if batch > 4 else 6.0}
    return {
        "group": f"g{group}",
        "features": msgspec.to_builtins(features),
        "modes": {
            mode: {"latency_ms": latency, "energy_j": used[mode] if energy else None} for mode, latency in cost.items()
        },
    }


def rows(count: int = 60, **more: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [row(index // 2, int(rng.integers(100, 1000)), int(rng.integers(1, 9)), **more) for index in range(count)]


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in found))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return read_training(write(tmp_path / "training.jsonl", rows()), "fp16")


def test_reads_rows_and_the_oracle_keeps_to_energy(data: Dataset) -> None:
    assert data.features().shape == (60, len(FEATURE_NAMES))
    assert data.modes == ("fp16", "int8", "gptq")
    assert len(set(data.groups)) == 30
    batch, prompt = FEATURE_NAMES.index("batch_size"), FEATURE_NAMES.index("prompt_tokens")
    for example, label in zip(data.examples, data.labels(Constraints()), strict=True):
        short_alone = example.vector[prompt] <= 500 and example.vector[batch] <= 4
        assert label == ("gptq" if short_alone else "int8")


def test_without_live_signals_their_columns_are_empty(data: Dataset) -> None:
    columns = [FEATURE_NAMES.index(name) for name in LIVE_FEATURES]
    assert data.features()[:, columns].any()
    assert not data.features(live=False)[:, columns].any()


def measured(figures: str) -> str:
    """A row with these figures of a mode."""
    features = '{"prompt_tokens": 1, "expected_output_tokens": 1}'
    return f'{{"group": "g", "features": {features}, "modes": {{"fp16": {figures}}}}}'


@pytest.mark.parametrize(
    "line, why",
    [
        ("{", "training.jsonl"),
        ("{}", "group|features"),
        ('{"group": "g", "features": 3, "modes": {}}', "line 1"),
        (measured('{"latency_ms": 0}'), "latency_ms must be"),
        (measured('{"latency_ms": Infinity}'), "latency_ms must be"),
        (measured('{"latency_ms": 1, "energy_j": NaN}'), "energy_j must be"),
        ("", "no row"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, line: str, why: str) -> None:
    (tmp_path / "t.jsonl").write_text(line + "\n")
    with pytest.raises(TrainingDataUnusable, match=why):
        read_training(tmp_path / "t.jsonl", "fp16")


def test_rows_without_the_reference_are_left_out(tmp_path: Path) -> None:
    found = rows(4)
    del found[0]["modes"]["fp16"]
    found[1]["modes"] = {"fp16": found[1]["modes"]["fp16"]}
    assert len(read_training(write(tmp_path / "t.jsonl", found), "fp16").examples) == 2
    with pytest.raises(TrainingDataUnusable, match="awq"):
        read_training(tmp_path / "t.jsonl", "awq")
    found[2]["modes"]["int8"]["latency_ms"] = 0
    with pytest.raises(TrainingDataUnusable, match="above 0"):
        read_training(write(tmp_path / "t.jsonl", found), "fp16")


def judged(mode: str, outcome: str, scope: str = "any") -> QualityEvidence:
    return QualityEvidence(mode=mode, scope=scope, outcome=GateOutcome(outcome), metric="accuracy_points")


def test_a_fast_mode_that_fails_is_no_label_where_it_fails(tmp_path: Path) -> None:
    found = [row(index, 200, 1, tag=Tag.CODE if index % 2 else Tag.NONE) for index in range(8)]
    data = read_training(write(tmp_path / "t.jsonl", found), "fp16")
    assert set(data.labels(Constraints())) == {"gptq"}
    evidence = [judged("gptq", "fail", "none"), judged("gptq", "pass", "code"), judged("int8", "pass")]
    passing = data.passing(evidence)
    assert passing.labels(Constraints()) == ["int8", "gptq"] * 4
    assert data.allowing(["int8"]).labels(Constraints()) == ["int8"] * 8
    # What nobody judged is as little chosen as where it serves; what is lossless is until it fails.
    assert data.passing([judged("int8", "pass")]).modes == ("fp16", "int8")
    for item in found:
        item["modes"]["speculative"] = {"latency_ms": 1.0, "energy_j": 1.0}
    more = read_training(write(tmp_path / "t.jsonl", found), "fp16")
    assert set(more.passing(evidence).labels(Constraints())) == {"speculative"}
    assert more.passing([*evidence, judged("speculative", "fail", "none")]).labels(Constraints())[:2] == [
        "int8",
        "speculative",
    ]
    for restrict in (lambda: data.passing([judged("gptq", "fail")]), lambda: data.allowing(["fp16"])):
        with pytest.raises(TrainingDataUnusable, match="no mode but fp16"):
            restrict()
    with pytest.raises(TrainingDataUnusable, match="with awq; there are fp16, int8, gptq"):
        data.allowing(["awq"])


def test_limits_that_were_not_measured_are_counted(tmp_path: Path) -> None:
    found = rows(4)
    found[0]["modes"]["int8"]["energy_j"] = None
    data = read_training(write(tmp_path / "t.jsonl", found), "fp16")
    assert data.not_judged(Constraints()) == {Constraint.QUALITY: 4, Constraint.ENERGY: 1, Constraint.MEMORY: 4}


@pytest.mark.timeout(120)
def test_the_command_learns_no_mode_that_fails_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    file, out = write(tmp_path / "t.jsonl", rows()), tmp_path / "out"
    quality = tmp_path / "quality.json"
    quality.write_text(
        json.dumps([judged(*one).model_dump(mode="json") for one in (("gptq", "fail"), ("int8", "pass"))])
    )
    arguments = ["train", str(file), "--model", "m", "--hardware", "h", "--learner", "cost", "--out", str(out)]
    for more, labels, limits in (
        ([], {"gptq", "int8"}, {"quality": 60, "memory": 60}),
        (["--quality", str(quality)], {"int8"}, {"memory": 60}),
        (["--allow", "gptq"], {"gptq", "fp16"}, {"memory": 60}),
    ):
        result = CliRunner().invoke(make_app(), [*arguments, *more])
        assert result.exit_code == 0, result.output
        found = json.loads((out / "train.json").read_text())
        assert {item["oracle"] for item in found["held"]["oracle"]["confusion"]} == labels
        assert found["not_judged"] == limits
        words = " ".join(result.output.split())
        assert "memory in 60 of 60 requests" in words
        assert ("quality in 60 of 60 requests" in words) == (not more)
        assert set(OnnxPredictor(out / "cost.onnx").modes) == labels | {"fp16"}


@pytest.mark.parametrize("learner", LEARNERS)
def test_live_signals_help_on_prompts_that_were_not_seen(data: Dataset, learner: str) -> None:
    seen, blind = (cross_validate(learner, data, Constraints(), live=live) for live in (True, False))
    assert seen.match > 0.8
    assert seen.match > blind.match
    assert sum(seen.confusion.values()) == seen.requests == 60


@pytest.mark.parametrize("learner", LEARNERS)
def test_the_exported_model_chooses_as_the_trained_one(data: Dataset, learner: str, tmp_path: Path) -> None:
    fitted = fit(learner, data, data.features(), Constraints())
    found = write_model(tmp_path / "m.onnx", fitted, data, model="m", hardware="h")
    assert found.agreement > 0.98
    assert found.p50_us > 0
    assert fitted.kind == ("cost_energy" if learner == "cost" else "probability")


def test_without_energy_only_latency_is_predicted(tmp_path: Path) -> None:
    data = read_training(write(tmp_path / "t.jsonl", rows(energy=False)), "fp16")
    fitted = fit("cost", data, data.features(), Constraints())
    assert fitted.kind == "cost"
    assert write_model(tmp_path / "m.onnx", fitted, data, model="m", hardware="h").agreement > 0.98


def test_a_mode_that_was_not_measured_is_not_chosen(tmp_path: Path) -> None:
    found = rows()
    for item in found:
        if item["features"]["prompt_tokens"] <= 500:
            del item["modes"]["gptq"]
    data = read_training(write(tmp_path / "t.jsonl", found), "fp16")
    scores = fit("cost", data, data.features(), Constraints()).scores(data.features())
    for example, row_scores in zip(data.examples, scores, strict=True):
        if "gptq" not in example.modes:
            assert row_scores[data.modes.index("gptq")] > min(row_scores)


def test_one_best_mode_leaves_nothing_to_imitate(data: Dataset) -> None:
    short = Dataset(
        [item for item, label in zip(data.examples, data.labels(Constraints()), strict=True) if label == "int8"], "fp16"
    )
    with pytest.raises(NothingToLearn, match="static:int8"):
        fit("tree", short, short.features(), Constraints())
    assert cross_validate("tree", short, Constraints()).match == pytest.approx(1)
    with pytest.raises(NothingToLearn, match="one group"):
        cross_validate("tree", Dataset(data.examples[:2], "fp16"), Constraints())


def test_the_papers_table_is_eleven_points_with_605_requests() -> None:
    data = paper_dataset(load_tables())
    assert len(data.examples) == 11
    assert data.weights().sum() == 605
    scores = static_choices(data, Constraints())
    assert scores["oracle"].match == pytest.approx(1)
    assert scores["oracle"].unsafe == 0
    assert scores["always fp16"].speedup == pytest.approx(1)
    assert judge("x", data, data.labels(Constraints()), Constraints()).latency_capture == pytest.approx(1)


def test_energy_is_compared_where_every_mode_has_joules(tmp_path: Path) -> None:
    """Prompts are resampled, not the requests that repeat them."""
    found = rows()
    found[0]["modes"]["int8"]["energy_j"] = None
    data = read_training(write(tmp_path / "t.jsonl", found), "fp16")
    by_mode = static_choices(data, Constraints())
    int8, gptq = by_mode["always int8"], by_mode["always gptq"]
    assert int8.energy_ratio == pytest.approx((0.8, 0.8, 0.8, 30))
    assert gptq.energy_ratio is not None
    ratios = [item["modes"]["gptq"]["energy_j"] / 10.0 for item in found[1:]]
    assert gptq.energy_ratio.estimate == pytest.approx(sum(ratios) / 59)
    assert gptq.energy_ratio.low < gptq.energy_ratio.estimate < gptq.energy_ratio.high
    assert gptq.speedup_interval.low < gptq.speedup < gptq.speedup_interval.high
    without = read_training(write(tmp_path / "t.jsonl", rows(energy=False)), "fp16")
    assert static_choices(without, Constraints())["oracle"].energy_ratio is None


def test_twins_are_counted() -> None:
    assert twins([(1.0, 2.0)], [(1.0, 2.0), (2.0, 1.0)]) == 1


@pytest.mark.timeout(300)
def test_the_command_trains_on_measurements_and_the_policy_takes_it(tmp_path: Path) -> None:
    from app.routing.mode_info import ModeInfo

    file, out = write(tmp_path / "t.jsonl", rows()), tmp_path / "out"
    arguments = ["train", str(file), "--model", "m", "--hardware", "h", "--out", str(out)]
    result = CliRunner().invoke(make_app(), [*arguments, "--learner", "tree", "--learner", "cost"])
    assert result.exit_code == 0, result.output
    found = json.loads((out / "train.json").read_text())
    assert set(found["exported"]) == {"tree", "cost"}
    assert {item["oracle"] for item in found["held"]["oracle"]["confusion"]} == {"gptq", "int8"}
    modes = [ModeInfo(name, name, name, lossless=True) for name in ("fp16", "int8", "gptq")]
    predictor = OnnxPredictor(out / "tree.onnx")
    assert predictor.version.startswith("tree-")
    LearnedPolicy(predictor, modes, RoutingSettings(), None, model="m", hardware="h")
    with pytest.raises(PredictorRefused, match="hardware"):
        LearnedPolicy(predictor, modes, RoutingSettings(), None, model="m", hardware="other")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_was_judged(tmp_path: Path, number: signal.Signals) -> None:
    file, out = write(tmp_path / "t.jsonl", rows(2000)), tmp_path / "out"
    command = [sys.executable, "-m", "loadgen", "train", str(file), "--model", "m", "--hardware", "h"]
    command += ["--learner", "tree", "--learner", "forest", "--learner", "cost", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()  # what the data is, before anything is fitted
        process.send_signal(number)
        words = first + process.stdout.read()
    assert process.returncode == 130, words
    assert "Traceback" not in words
    assert "interrupted" in words
    found = json.loads((out / "train.json").read_text())
    assert found["interrupted"]
    assert found["exported"] == {}


def test_errors_are_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    good = write(tmp_path / "t.jsonl", rows(4))
    named = ["--model", "m", "--hardware", "h"]
    for arguments, why in (
        ([str(tmp_path / "none"), *named], "cannot read"),
        ([str(tmp_path / "file"), *named, "--out", str(tmp_path / "o")], "line 1"),
        ([str(good)], "--hardware: name"),
        ([str(good), *named, "--learner", "odd"], "odd"),
        ([str(good), *named, "--allow", "awq"], "awq"),
        ([str(good), *named, "--quality", str(tmp_path / "file")], "no list of quality evidence"),
        (["--quality", str(tmp_path / "file")], "--quality is for"),
        ([str(good), *named, "--out", str(tmp_path / "file" / "o")], "cannot write"),
    ):
        result = CliRunner().invoke(make_app(), ["train", *arguments])
        assert result.exit_code == 2, result.output
        assert why in " ".join(result.output.split())
