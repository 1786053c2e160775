import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from loadgen.__main__ import make_app


def rows(kind: str, **more: Any) -> list[dict[str, Any]]:
    one = {
        "choices": {
            "prompt": "Question: which?\nA. one\nB. two",
            "reference": "B",
            "valid_labels": ["A", "B"],
            "benchmark_suite": "gpqa",
            "evaluation_mode": "multiple_choice_accuracy",
        },
        "numbers": {
            "prompt": "What is 1 and 1?",
            "reference": "2",
            "benchmark_suite": "gsm8k",
            "evaluation_mode": "final_answer_exact_match",
        },
        "words": {"prompt": "Tell me.", "benchmark_suite": "mt_bench", "evaluation_mode": "external_judge"},
    }[kind]
    return [{"id": f"{kind}{index}"} | one | more for index in range(3)]


def write(path: Path, found: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


def tasks(tmp_path: Path, *arguments: str) -> tuple[dict[str, dict[str, Any]], str]:
    result = CliRunner().invoke(make_app(), ["lm-eval-tasks", *arguments, "--out", str(tmp_path / "tasks")])
    assert result.exit_code == 0, result.output
    files = sorted((tmp_path / "tasks").glob("*.yaml"))
    return {path.stem: yaml.safe_load(path.read_text()) for path in files}, result.output


def test_choices_are_scored_by_likelihood_and_numbers_are_extracted(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{kind}.jsonl", rows(kind)) for kind in ("choices", "numbers")]
    found, words = tasks(tmp_path, *files)
    assert set(found) == {"local_gpqa", "local_gsm8k"}
    choice, number = found["local_gpqa"], found["local_gsm8k"]
    assert choice["dataset_kwargs"] == {"data_files": {"test": files[0]}}, "the file stays where it is"
    assert (choice["output_type"], choice["doc_to_choice"]) == ("multiple_choice", "valid_labels")
    assert number["output_type"] == "generate_until"
    (extract,) = number["filter_list"]
    pattern, which = extract["filter"][0]["regex_pattern"], extract["filter"][0]["group_select"]
    assert re.findall(pattern, "1 and 1,000 make -1,001.5.")[which] == "-1,001.5"
    assert "--model local-completions" in words
    assert "tokenizer=" in words
    assert "--tasks local_gpqa,local_gsm8k" in words


def test_a_chat_model_writes_its_letter(tmp_path: Path) -> None:
    found, words = tasks(tmp_path, write(tmp_path / "c.jsonl", rows("choices")), "--chat")
    (extract,) = found["local_gpqa"]["filter_list"]
    assert found["local_gpqa"]["output_type"] == "generate_until"
    assert re.findall(extract["filter"][0]["regex_pattern"], "The answer is B. And A is wrong.")[0] == "B"
    assert "--model local-chat-completions --apply_chat_template" in words


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        (("words",), "no right answers"),
        (("choices", "numbers"), "several suites or kinds"),
    ],
)
def test_what_makes_no_task_is_named(tmp_path: Path, kinds: tuple[str, ...], why: str) -> None:
    file = write(tmp_path / "q.jsonl", [row for kind in kinds for row in rows(kind)])
    result = CliRunner().invoke(make_app(), ["lm-eval-tasks", file, "--out", str(tmp_path / "tasks")])
    assert result.exit_code == 2, result.output
    assert why in " ".join(result.output.split())
    assert not (tmp_path / "tasks").exists()


def test_other_errors_are_said_plainly(tmp_path: Path) -> None:
    first, second = (write(tmp_path / f"{name}.jsonl", rows("choices")) for name in "ab")
    for arguments, why in (
        ([str(tmp_path / "none.jsonl")], "cannot read"),
        ([first, second], "two files are of one suite"),
        ([first, "--out", f"{first}/tasks"], "cannot write"),
    ):
        result = CliRunner().invoke(make_app(), ["lm-eval-tasks", *arguments])
        assert result.exit_code == 2, result.output
        assert why in " ".join(result.output.split())
