import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from app.controller.trained_model import OnnxPredictor
from loadgen.__main__ import make_app
from loadgen.decision_bench import write_example_model
from loadgen.logged_decisions import LedgerUnreadable, RowRange, ranges, rows
from loadgen.policy_replay import Tally
from loadgen.replay_ledger import Job, _defaults, replay_all
from tests.loadgen import synthetic_ledger as synthetic

Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    synthetic.write(path, synthetic.rows(60))
    synthetic.write_profile(tmp_path / "profile.json")
    return path


def replay(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["replay", "ledger", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def changed(path: Path, change: Change, *, every: int = 1) -> None:
    """Writes a ledger in which the decision of every so-maniest row is another."""

    def row(number: int, values: dict[str, Any]) -> dict[str, Any]:
        if number % every:
            return values
        return values | {"decision": json.dumps(change(json.loads(values["decision"])))}

    synthetic.write(path, (row(number, values) for number, values in enumerate(synthetic.rows(12))))


def tally_of(path: Path, *policies: str, profile: Path | None = None, verify: bool = False) -> Tally:
    job = Job(path, policies, _defaults(path, [profile] if profile else []), verify)
    return list(replay_all(job, 1))[-1]


def test_the_policy_that_decided_agrees_and_costs_the_same(ledger: Path) -> None:
    found = tally_of(ledger, "cost", "static:fp16", profile=ledger.with_name("profile.json"))
    cost, fp16 = found.policies["cost"], found.policies["static:fp16"]
    assert (found.rows, cost.asked, cost.agreed, cost.latency_ms.n) == (60, 60, 60, 60)
    assert cost.latency_ms.policy_sum == cost.latency_ms.executed_sum > 0
    assert fp16.choices == {"fp16": 60}
    assert fp16.agreed == found.executed["fp16"] < 60
    assert fp16.latency_ms.policy_sum > fp16.latency_ms.executed_sum == pytest.approx(cost.latency_ms.policy_sum)
    assert fp16.energy_j.n == 60


def test_a_cost_taken_from_the_decision_equals_the_one_predicted(ledger: Path) -> None:
    profile = ledger.with_name("profile.json")
    alone = tally_of(ledger, "rules", profile=profile).policies["rules"]
    after_cost = tally_of(ledger, "cost", "rules", profile=profile).policies["rules"]
    assert alone.as_json() == after_cost.as_json()


def test_without_a_profile_costs_are_unknown_and_not_zero(ledger: Path) -> None:
    found = tally_of(ledger, "rules").policies["rules"].as_json()
    assert found["predicted_latency_ms"] == {"n": 0, "policy_mean": None, "executed_mean": None, "ratio": None}
    code, words = replay(ledger, "--policy", "rules")
    assert code == 0
    assert "unknown" in words
    assert "no predicted costs" in words


def test_pieces_add_up_to_the_whole(ledger: Path) -> None:
    job = Job(ledger, ("cost", "rules"), _defaults(ledger, [ledger.with_name("profile.json")]), True)
    whole, sum_of_pieces = job.piece(RowRange(1, 60)), Tally()
    spans = ranges(ledger, 7)
    assert (spans[0], spans[-1], len(spans)) == (RowRange(1, 7), RowRange(57, 60), 9)
    for span in spans:
        sum_of_pieces.merge(job.piece(span))
    assert (sum_of_pieces.rows, sum_of_pieces.verified, sum_of_pieces.executed) == (60, 60, whole.executed)
    for name, item in whole.policies.items():
        other = sum_of_pieces.policies[name]
        assert (other.asked, other.choices) == (item.asked, item.choices)
        assert other.energy_j.policy_sum == pytest.approx(item.energy_j.policy_sum)


def test_two_processes_give_what_one_gives(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.replay_ledger._ROWS_A_PIECE", 25)
    job = Job(ledger, ("rules",), _defaults(ledger), True)
    one, two = (list(replay_all(job, processes))[-1] for processes in (1, 2))
    assert one.policies["rules"].as_json() == two.policies["rules"].as_json()
    assert (two.rows, two.unverifiable) == (60, {"profile p1 was not given": 60})


@pytest.mark.parametrize("policy", ["cost", "rules", "rules_published", "static:gptq"])
def test_every_policy_is_verified(tmp_path: Path, policy: str) -> None:
    synthetic.write(tmp_path / "l.sqlite", synthetic.rows(20, policy=policy))
    profile = synthetic.write_profile(tmp_path / "profile.json")
    found = tally_of(tmp_path / "l.sqlite", profile=profile, verify=True)
    assert (found.verified, found.mismatched) == (20, 0)


def test_a_decision_that_does_not_come_out_again_is_listed(tmp_path: Path) -> None:
    def other_mode(decision: dict[str, Any]) -> dict[str, Any]:
        decision["decision"]["terms"]["queue_ms"] += 1.0
        return decision | {"decision": decision["decision"] | {"mode": "int8_continuous_batching"}}

    changed(tmp_path / "l.sqlite", other_mode, every=6)
    profile = synthetic.write_profile(tmp_path / "profile.json")
    code, words = replay(tmp_path / "l.sqlite", "--verify", "--profile", profile, "--out", tmp_path / "out.json")
    assert code == 1
    assert "verified 12 decisions: 2 came out otherwise" in words
    assert "r0 (cost): mode: int8_continuous_batching -> " in words
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["interrupted"] is False
    assert [item["request_id"] for item in found["mismatches"]] == ["r0", "r6"]
    assert any(part.startswith("terms.queue_ms: ") for part in found["mismatches"][0]["differences"])


def test_refusals_and_requests_without_a_decision(tmp_path: Path) -> None:
    def busy(values: dict[str, Any]) -> dict[str, Any]:
        refusal = {
            "code": "queue_full",
            "request_class": "standard",
            "policy": "cost",
            "settings_version": "v",
            "by_mode": {"fp16": "queue_full"},
        }
        return values | {"decision": refusal}

    changed(tmp_path / "l.sqlite", busy, every=6)
    with sqlite3.connect(tmp_path / "l.sqlite") as connection:
        connection.execute("UPDATE requests SET mode = NULL WHERE request_id IN ('r0', 'r6')")
        connection.execute("UPDATE requests SET decision = '{}', features = '{}' WHERE request_id = 'r1'")
    found = tally_of(tmp_path / "l.sqlite", "static:fp16")
    assert (found.rows, found.undecided, found.executed["refused"]) == (12, 1, 2)
    assert found.policies["static:fp16"].asked == 11


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("features", "{"),
        ("features", '{"prompt_tokens": "many"}'),
        ("features", "null"),
        ("snapshot", '{"engines": []}'),
        ("snapshot", "\x00"),
        ("decision", '{"decision": {"mode": 3}, "settings": {}, "modes": []}'),
        ("decision", '["cost"]'),
    ],
)
def test_damaged_rows_are_counted_and_the_rest_replayed(ledger: Path, column: str, value: str) -> None:
    with sqlite3.connect(ledger) as connection:
        connection.execute(f"UPDATE requests SET {column} = ? WHERE request_id IN ('r3', 'r4')", (value,))
    code, words = replay(ledger, "--policy", "rules")
    assert code == 0
    assert "2 rows are damaged and left out" in words
    assert "60 rows" in words
    assert tally_of(ledger, "rules").policies["rules"].asked == 58


def test_rows_that_do_not_say_how_they_were_made(tmp_path: Path) -> None:
    changed(tmp_path / "l.sqlite", lambda values: {"decision": values["decision"]})
    code, words = replay(tmp_path / "l.sqlite", "--policy", "rules")
    assert (code, "12 x: the row names no settings; give --settings FILE" in words) == (0, True)
    (tmp_path / "settings.json").write_text("{}")
    listed = [msgspec.to_builtins(mode) for mode in synthetic.MODES]
    (tmp_path / "modes.json").write_text(json.dumps(listed))
    served = {"data": [item | {"id": item["name"], "object": "mode"} for item in listed]}
    served["data"][-1] |= {"engine_delta": {"speculative_config": {"method": "ngram"}}}
    (tmp_path / "served.json").write_text(json.dumps(served))
    for modes in ("modes.json", "served.json"):
        given = ("--settings", tmp_path / "settings.json", "--modes", tmp_path / modes)
        profile = synthetic.write_profile(tmp_path / "profile.json")
        code, words = replay(tmp_path / "l.sqlite", "--verify", "--profile", profile, *given)
        assert (code, "verified 12 decisions: 0 came out otherwise" in words) == (0, True), words


def test_refusals_are_verified_with_the_profile_that_decided(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    synthetic.write_as_served(path, synthetic.rows(8, queue_limit=0))
    code, words = replay(path, "--verify")
    assert (code, "verified 8 decisions: 0 came out otherwise" in words, "not verified" in words) == (0, True, False)
    assert tally_of(path, "cost").policies["cost"].refusals == {"queue_full": 8}


def test_a_damaged_profile_of_a_context_is_said(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    synthetic.write_as_served(path, synthetic.rows(8), profile={"version": "p1"})
    code, words = replay(path, "--verify", "--policy", "rules")
    assert (code, "not verified: 8 decisions 8 x: the profile in its context is no profile" in words) == (1, True)
    assert "no decision could be verified" in words


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("skl2onnx")
    path = tmp_path_factory.mktemp("trained") / "tree.onnx"
    return write_example_model(path, "tree-1", model="tiny", hardware="box")


def learned(path: Path, trained: Path, **context: Any) -> Path:
    decided = synthetic.rows(12, policy="learned", predictor=OnnxPredictor(trained))
    synthetic.write_as_served(path, decided, **({"trained_model": "tree-1"} | context))
    return path


def test_learned_decisions_are_verified_with_their_model(tmp_path: Path, trained: Path) -> None:
    path = learned(tmp_path / "l.sqlite", trained)
    code, words = replay(path, "--verify", "--policy", "learned", "--trained-model", trained)
    assert (code, "verified 12 decisions: 0 came out otherwise" in words, "not verified" in words) == (0, True, False)
    assert "learned 12 0 100.0 %" in words


def test_without_their_model_learned_decisions_are_said_to_be_unverified(tmp_path: Path, trained: Path) -> None:
    path = learned(tmp_path / "l.sqlite", trained)
    code, words = replay(path, "--verify")
    why = "12 x: trained model tree-1 was not given"
    assert (code, "verified 0 decisions" in words, f"not verified: 12 decisions {why}" in words) == (1, True, True)
    other = write_example_model(tmp_path / "other.onnx", "tree-2", model="tiny", hardware="box")
    code, words = replay(path, "--verify", "--trained-model", other)
    assert (code, f"not verified: 12 decisions {why}" in words) == (1, True)


def test_a_model_trained_for_something_else_is_not_asked(tmp_path: Path, trained: Path) -> None:
    path = learned(tmp_path / "l.sqlite", trained, hardware="another box")
    code, words = replay(path, "--verify", "--trained-model", trained, "--policy", "learned")
    assert (code, words.count("12 x: The trained model is for hardware 'box', but 'another box' serves")) == (1, 2)


def test_a_context_that_rows_share_says_how_they_were_made(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    synthetic.write_as_served(path, synthetic.rows(12))
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO contexts VALUES ('damaged', 1, '{')")
    code, words = replay(path, "--verify")
    assert (code, "verified 12 decisions: 0 came out otherwise" in words, "not verified" in words) == (0, True, False)
    found = tally_of(path, "cost").policies["cost"]
    assert (found.agreed, found.latency_ms.n) == (12, 12)


def test_a_mode_that_was_not_deployed_is_said(ledger: Path) -> None:
    code, words = replay(ledger, "--policy", "static:awq")
    assert (code, "60 x: Mode 'awq' is not deployed" in words) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/nowhere.sqlite",), "no ledger that can be read"),
        (("{folder}/text.sqlite",), "no ledger that can be read"),
        (("{ledger}", "--policy", "best"), "no policy 'best'"),
        (("{ledger}", "--profile", "/nowhere.json"), "is no profile"),
        (("{ledger}", "--profile", "{folder}/text.sqlite"), "is no profile"),
        (("{ledger}", "--settings", "{folder}/text.sqlite"), "no routing settings"),
        (("{ledger}", "--modes", "{folder}/text.sqlite"), "no list of modes"),
        (("{ledger}", "--policy", "learned"), "learned needs --trained-model"),
        (("{ledger}", "--trained-model", "/nowhere.onnx"), "is no trained model"),
        (("{ledger}", "--trained-model", "{folder}/text.sqlite"), "is no ONNX model"),
        (("{ledger}", "--out", "/proc/nowhere/out.json"), "cannot write"),
    ],
)
def test_what_is_wrong_is_said(ledger: Path, arguments: tuple[str, ...], words: str) -> None:
    (ledger.parent / "text.sqlite").write_text("It is no database, and no JSON either. " * 100)
    code, said = replay(*(item.format(folder=ledger.parent, ledger=ledger) for item in arguments))
    assert (code, words in said) == (2, True), said


# Only the first piece of 20 rows ends. Workers import the module, so that they do the same.
_STUCK = """
    import signal, time
    from multiprocessing import parent_process
    from loadgen.replay_ledger import Job

    class Stuck(Job):
        __slots__ = ()

        def piece(self, span):
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            assert (signal.SIGINT in blocked) is (parent_process() is not None), blocked
            if span.first > 20:
                time.sleep(3600)
            return super().piece(span)
"""
_PROGRAM = """
    import sys
    from loadgen import replay_ledger
    from loadgen.__main__ import make_app
    from stuck import Stuck

    def told(job, processes, replay_all=replay_ledger.replay_all):
        for tally in replay_all(job, processes):
            yield tally
            print(tally.rows, "rows are taken", flush=True)

    replay_ledger.Job, replay_ledger.replay_all, replay_ledger._ROWS_A_PIECE = Stuck, told, 20
    make_app()(["replay", "ledger", *sys.argv[1:]])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("processes", [1, 3])  # of three, one has nothing to do
def test_an_interruption_keeps_what_was_replayed(ledger: Path, number: signal.Signals, processes: int) -> None:
    (ledger.parent / "stuck.py").write_text(textwrap.dedent(_STUCK))
    out = ledger.parent / "out.json"
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(ledger), "--verify", "--policy", "rules"]
    command += ["--profile", str(ledger.parent / "profile.json"), "--processes", str(processes), "--out", str(out)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ledger.parent), *sys.path])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, **pipes, text=True, env=env, start_new_session=True) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert lines == ["0 rows are taken\n", "20 rows are taken\n"]
        # A terminal sends Ctrl-C to the workers too; what ends a command by SIGTERM tells the command alone.
        (os.killpg if number is signal.SIGINT else os.kill)(process.pid, number)
        words = " ".join(process.stdout.read().split())  # until every worker has ended as well
    assert process.returncode == 130, words
    assert "Traceback" not in words
    assert "verified 20 decisions: 0 came out otherwise" in words
    assert "interrupted; the figures are of the rows replayed until then" in words
    found = json.loads(out.read_text())
    assert (found["interrupted"], found["rows"], found["policies"]["rules"]["asked"]) == (True, 20, 20)


def test_an_empty_ledger_and_one_without_the_table(tmp_path: Path) -> None:
    synthetic.write(tmp_path / "l.sqlite", islice(synthetic.rows(1), 0))
    code, words = replay(tmp_path / "l.sqlite")
    assert (code, "0 rows" in words) == (0, True)
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE a (b)")
    with pytest.raises(LedgerUnreadable, match="no such table"):
        list(rows(tmp_path / "other.sqlite", RowRange(0, 1)))
