import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadgen.__main__ import make_app
from loadgen.interruption import EXIT_INTERRUPTED
from loadgen.quality_gate import Limits
from loadgen.quality_report import Measured, all_evidence, summary
from loadgen.questioning import Answered
from loadgen.records import Outcome, RecordWriter, RequestRecord, read_records
from loadgen.report.material import Estimate
from tests.loadgen.conftest import finished, lines_in, serve
from tests.loadgen.fake_modes import FakeApplication, four_engines
from tests.loadgen.test_run import run as load

MODES = ("fp16", "int8", "gptq")
POLICIES = (*(f"static:{mode}" for mode in MODES), "cost", "rules")


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a figure looks like is for eyes; drawing it small takes less time."""
    monkeypatch.setattr("loadgen.report.drawing._DPI", 20)


def report(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["report", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def interval(value: float, low: float | None = None, high: float | None = None, pairs: int = 5) -> dict[str, Any]:
    return {"estimate": value, "low": low or 0.9 * value, "high": high or 1.1 * value, "pairs": pairs}


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def sweep(folder: Path, modes: tuple[str, ...] = MODES, energy: bool = False) -> None:
    rng = random.Random(1)
    rows = []
    for workload in ("ss", "sl", "ls", "ll"):
        for streams in (1, 8):
            for mode in modes:
                ratio = interval(1.0 if mode == "fp16" else rng.uniform(0.4, 1.3))
                row = {"workload": workload, "concurrency": streams, "mode": mode}
                row["latency"] = {"median": 100.0, "ratio": ratio}
                if energy:
                    row["energy"] = {"ratio": interval(rng.uniform(0.3, 1.1))}
                rows.append(row)
    write(folder / "sweep.json", {"command": "sweep", "reference": "fp16", "rows": rows})


def run(folder: Path, joules: float | None = 3.0) -> None:
    rng = random.Random(2)
    with RecordWriter(folder) as writer:
        for index in range(60):
            writer.write(
                RequestRecord(
                    index=index,
                    workload=rng.choice(("ss", "ll")),
                    sent_s=index * 0.4,
                    total_ms=rng.lognormvariate(7, 0.5),
                    ttft_ms=rng.lognormvariate(4, 0.5),
                    mode=rng.choice(MODES),
                    outcome=Outcome.OK if index % 20 else Outcome.STALLED,
                    energy_j=joules,
                )
            )
    write(folder / "summary.json", {"command": "run"})


def compare(folder: Path) -> None:
    rng = random.Random(3)
    requests = []
    for policy in POLICIES:
        for rate in ("light", "saturating"):
            for number in range(2):
                for index in range(12):
                    mode = policy.partition(":")[2] or rng.choice(MODES)
                    speed = {"fp16": 1.0, "int8": 1.4, "gptq": 2.0}[mode]
                    name = ("short", "long", "mathematics")[index % 3]
                    row = {"policy": policy, "class": name, "tag": "none", "mode": mode, "rate": rate, "round": number}
                    row |= {"index": index, "status": "ok" if index else "stalled", "started_s": 0.5 * index}
                    row |= {"latency_ms": rng.uniform(900, 1100) / speed, "ttft_ms": rng.uniform(50, 90)}
                    row |= {"energy_j": 20 / speed if mode != "int8" else None, "output_tokens": 24}
                    requests.append(row)
    write(folder / "compare.json", {"command": "compare", "policies": list(POLICIES), "requests": requests})


def confusion(folder: Path) -> None:
    labels = ["gptq", "int8", "fp16"]
    models = [
        {"name": name, "labels": labels, "matrix": [[50, 3, 2], [9, 30, 1], [0, 4, 6]]} for name in ("tree", "forest")
    ]
    write(folder / "confusion.json", {"models": models})


def training(folder: Path) -> None:
    figures = {"requests": 60.0, "match": 0.6, "latency_capture": 0.95, "speedup": 2.2, "unsafe": 0.12}
    pairs = [
        {"oracle": "gptq", "chosen": "int8", "requests": 7.0},
        {"oracle": "fp16", "chosen": "gptq", "requests": 2.0},
    ]
    held = {name: {**figures, "confusion": pairs} for name in ("oracle", "tree, features of the paper")}
    write(folder / "train.json", {"command": "train", "reference": "fp16", "held": held})


def quality(folder: Path) -> None:
    known = {"mode": "gptq", "scope": "mathematics", "outcome": "fail", "metric": "exact match (points)"}
    found = [
        {**known, "delta": -2.5, "low": -5.0, "high": 0.5, "samples": 200},
        {**known, "mode": "int8", "outcome": "pass", "delta": 0.4, "low": -0.9, "high": 1.7, "samples": 200},
        {**known, "mode": "awq", "outcome": "no_signal", "delta": None, "samples": 0},
    ]
    write(folder / "quality.json", found)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    sweep(folder / "sweep")
    run(folder / "run")
    compare(folder / "compare")
    confusion(folder / "train")
    quality(folder / "quality")
    return folder


def page_in(out: Path) -> str:
    return (out / "report.html").read_text(encoding="utf-8")


def test_the_papers_own_measurements(tmp_path: Path) -> None:
    code, words = report("--paper", "--out", tmp_path)
    assert code == 0, words
    names = {path.stem for path in tmp_path.glob("*.png")}
    assert {"figure1_screening_1", "heat_map_1_speedup", "heat_map_1_energy", "figure2_families_1"} <= names
    assert {"figure3_routing_1", "figure5_policies_1"} <= names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    page = page_in(tmp_path)
    assert "<td>short/short</td><td>gptq_prefix_caching</td><td>2.58</td><td>0.40</td><td>1</td>" in page
    assert "83.00 [74.45, 89.11], n=100" in page, "GSM8K with Wilson's interval"
    assert "Not in this report: no train.json: run `loadgen train`" in page


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    report("--paper", "--out", tmp_path)
    page = page_in(tmp_path)
    assert page.count("data:image/png;base64,") == len(list(tmp_path.glob("*.png")))
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "http" not in page


def test_all_results_make_all_sections(results: Path, tmp_path: Path) -> None:
    code, words = report(results, "--out", tmp_path / "out")
    assert code == 0, words
    page = page_in(tmp_path / "out")
    assert "Not in this report" not in page
    assert "Left out" not in page
    assert "-2.50 [-5.00, 0.50], n=200 (fail)" in page
    assert "awq" not in page.split("Quality by mode")[1].split("</table>")[0], "no figure, no row"
    assert "cost, light load, from compare/compare.json" in page
    assert "<th>as the oracle</th><th>breaks a constraint</th>" in page
    names = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert {"figure4_confusion_1", "latencies_1", "timeline_1", "figure2_families_1", "figure5_policies_2"} <= names


@pytest.mark.parametrize(
    ("kept", "shown"),
    [("sweep", 1), ("quality", 1), ("train", 1), ("run", 2), ("compare", 5)],
)
def test_each_result_fills_its_sections_and_the_rest_are_named(
    results: Path, tmp_path: Path, kept: str, shown: int
) -> None:
    code, words = report(results / kept, "--out", tmp_path / "out")
    assert code == 0, words
    assert page_in(tmp_path / "out").count("Not in this report: no ") == 8 - shown
    assert words.count("not in the report") == 8 - shown


def test_damaged_results_are_named_and_the_rest_drawn(results: Path, tmp_path: Path) -> None:
    (results / "compare" / "compare.json").write_text('{"requests": [{"policy": "cost"}], "policies": ["cost"]}')
    (results / "train" / "confusion.json").write_text("{")
    write(results / "train2" / "confusion.json", {"models": [{"name": "a", "labels": ["x"], "matrix": [[1, 2]]}]})
    with (results / "run" / "requests.jsonl").open("a") as lines:
        lines.write('{"index": 1')
    code, words = report(results, "--out", tmp_path / "out")
    assert code == 0, words
    page = page_in(tmp_path / "out")
    for part in ("compare/compare.json: KeyError", "train/confusion.json: JSONDecodeError", "is not 1 by 1"):
        assert part in page
    assert "1 damaged lines of requests.jsonl" in page
    assert "figure1_screening_1" in {path.stem for path in (tmp_path / "out").glob("*.png")}


def test_right_answers_are_shown_by_mode_and_benchmark(tmp_path: Path) -> None:
    """Table 2, from what `quality` writes: percentages of each mode, the reference among them."""

    def answer(suite: str, mode: str, index: int, right: bool) -> Answered:
        ok = Outcome.OK if (mode, index) != ("int8", 0) else Outcome.STALLED
        return Answered(str(index), suite, "en", mode, "number", (suite,), outcome=ok, right=right)

    right = {"fp16": {"gsm8k": 9, "mmlu": 20}, "int8": {"gsm8k": 5, "mmlu": 18}}
    answers = [
        [answer(suite, mode, index, 20 - right[mode][suite] <= index) for mode in right]
        for suite in ("gsm8k", "mmlu")
        for index in range(20)
    ]
    measured, limits = Measured(answers=answers), Limits()
    found = summary(measured, limits, all_evidence(measured, limits))
    write(tmp_path / "results" / "summary.json", {"command": "quality"} | found)
    code, words = report(tmp_path / "results", "--out", tmp_path / "out")
    assert code == 0, words
    page = page_in(tmp_path / "out")
    assert "<th>gsm8k, accuracy (%)</th><th>mmlu, accuracy (%)</th>" in page
    assert "<td>fp16</td><td>45.00 [25.82, 65.79], n=20</td><td>100.00 [83.89, 100.00], n=20</td>" in page
    assert "<td>int8</td><td>26.32 [11.81, 48.79], n=19</td>" in page, "what failed was no question"
    write(tmp_path / "results" / "summary.json", {"command": "quality", "accuracy_pct": [{"suite": "gsm8k"}]})
    assert report(tmp_path / "results", "--out", tmp_path / "out")[0] == 2


def test_names_from_files_stay_text(tmp_path: Path) -> None:
    sweep(tmp_path / "results", ("fp16", "<script>alert(1)</script>", "$x^{", "_hidden"))
    code, words = report(tmp_path / "results", "--out", tmp_path / "out")
    assert code == 0, words
    assert "<script>" not in page_in(tmp_path / "out")
    assert "&lt;script&gt;" in page_in(tmp_path / "out")


def test_energy_gives_the_screening_its_second_axis(tmp_path: Path) -> None:
    sweep(tmp_path / "results", energy=True)
    report(tmp_path / "results", "--out", tmp_path / "out")
    assert "heat_map_1_energy" in {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert "Energy was not measured here" not in page_in(tmp_path / "out")


def test_a_training_shows_its_policies_and_what_the_trained_ones_confuse(tmp_path: Path) -> None:
    training(tmp_path / "results")
    code, words = report(tmp_path / "results", "--out", tmp_path / "out")
    assert code == 0, words
    page = page_in(tmp_path / "out")
    assert "<td>oracle</td><td>60</td><td>2.20</td><td>95 %</td><td>60 %</td><td>7</td>" in page
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == {"figure4_confusion_1", "figure5_policies_1"}


def test_a_real_training_gives_intervals_and_the_time_of_a_decision(tmp_path: Path) -> None:
    """Table 3 and figure 5 from what `train` writes, here of the paper's table."""
    pytest.importorskip("sklearn")
    pytest.importorskip("skl2onnx")
    out = tmp_path / "results"
    trained = CliRunner().invoke(make_app(), ["train", "--learner", "tree", "--no-confusion", "--out", str(out)])
    assert trained.exit_code == 0, trained.output
    code, words = report(out, "--out", tmp_path / "out")
    assert code == 0, words
    page = page_in(tmp_path / "out")
    found = json.loads((out / "train.json").read_text())
    tree, p50_us = found["held"]["tree, live signals too"], found["exported"]["tree"]["p50_us"]
    speedup, energy = (Estimate.read(tree[name]).words for name in ("speedup_interval", "energy_ratio"))
    assert "[" in speedup
    assert f"<td>tree, live signals too</td><td>605</td><td>{speedup}</td><td>{energy}</td>" in page
    assert f"<td>{p50_us / 1000:.3g}</td>" in page.split("tree, live signals too")[1].split("</tr>")[0]
    assert "95 % bootstrap intervals over n = 11 prompt groups each" in page
    assert "One measurement each" not in page


def test_the_oracle_of_a_comparison_is_one_of_its_policies(tmp_path: Path) -> None:
    """Each request in the mode that was fastest for it: speed-ups of 4 and 2, of 1 where the reference was."""
    latencies_ms = {"static:fp16": (400.0, 400.0, 400.0), "static:gptq": (100.0, 200.0, 500.0), "cost": (400.0,) * 3}
    joules = {"static:fp16": (10.0, 10.0, 10.0), "static:gptq": (5.0, None, 2.0), "cost": (10.0,) * 3}
    requests = []
    for policy in latencies_ms:
        for index, (took_ms, spent) in enumerate(zip(latencies_ms[policy], joules[policy], strict=True)):
            row = {"policy": policy, "class": "short", "tag": "none", "mode": policy.removeprefix("static:")}
            row |= {"rate": "light", "round": 0, "index": index, "status": "ok", "started_s": 0.5 * index}
            row |= {"latency_ms": took_ms, "ttft_ms": 9.0, "energy_j": spent, "output_tokens": 24}
            requests.append(row)
    content = {"command": "compare", "policies": list(latencies_ms), "requests": requests}
    write(tmp_path / "results" / "compare.json", content)
    code, words = report(tmp_path / "results", "--out", tmp_path / "out")
    assert code == 0, words
    cells = page_in(tmp_path / "out").split("<td>hindsight oracle</td>")[1].split("</tr>")[0]
    shown = re.findall("<td>(.*?)</td>", cells)
    assert (shown[0], shown[1], shown[2].split()[0]) == ("3", "unknown", "2.00")
    assert shown[3].split()[0] == "0.71", "the geometric mean of 5/10 and 10/10; one is unknown"
    assert shown[4] == "100 %"


def test_one_round_has_no_interval(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    rows = [
        {"workload": "ss", "concurrency": 1, "mode": mode, "latency": {"median": 1.0, "ratio": ratio}}
        for mode, ratio in (
            ("fp16", interval(1.0)),
            ("int8", interval(0.5, float("-inf"), float("inf"), 1)),
            ("gptq", None),
        )
    ]
    write(folder / "sweep.json", {"reference": "fp16", "rows": rows})
    code, words = report(folder, "--out", tmp_path / "out")
    assert code == 0, words
    assert "<td>int8</td><td>2.00</td><td>unknown</td><td>1</td>" in page_in(tmp_path / "out")


def test_unknown_joules_are_no_power(tmp_path: Path) -> None:
    run(tmp_path / "results", joules=None)
    report(tmp_path / "results", "--out", tmp_path / "out")
    assert "so power is unknown" in page_in(tmp_path / "out")


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_real_run_shows_the_power_of_its_requests(
    model_folder: Path, tmp_path: Path, interrupted: bool
) -> None:
    """Joules come after the run, when its lines are written: they are in its results all the same."""
    server = await serve(FakeApplication(four_engines(), energy=True).app())
    out = tmp_path / "results" / "run"
    more = ("--tokenizer", str(model_folder), "--workload", "ss", "--requests", "200" if interrupted else "4")
    with load(str(server.make_url("")), out, *more, "--warmup", "1") as process:
        if interrupted:
            await lines_in(out / "requests.jsonl", 6)
            process.send_signal(signal.SIGINT)
        words = await finished(process)
    await server.close()
    assert process.returncode == (EXIT_INTERRUPTED if interrupted else 0), words
    read = read_records(out / "requests.jsonl")
    answered = [record for record in read.records if record.outcome is Outcome.OK and not record.warmup]
    total = json.loads((out / "summary.json").read_text())["groups"]["all"]
    assert len(answered) == total["energy_requests"] == total["outcomes"]["ok"]
    joules = sum(record.energy_j or 0.0 for record in answered)
    assert joules / sum(record.output_tokens or 0 for record in answered) == total["j_per_output_token"]
    assert [record.index for record in read.records if record.warmup] == [0], "the warm-up's lines stay"
    code, said = report(tmp_path / "results", "--out", tmp_path / "out")
    assert code == 0, said
    assert f"{len(answered)} of {len(answered)} requests have theirs" in page_in(tmp_path / "out")


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ((), "give a folder of results"),
        (("/nowhere",), "is no folder of results"),
        ((tmp_path / "empty",), "no result of any command"),
        (("--paper", "--out", "/proc/nowhere"), "cannot write"),
    ):
        code, said = report(*arguments)
        assert (code, words in said) == (2, True), said
