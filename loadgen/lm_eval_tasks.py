"""`lm-eval-tasks`: writes tasks for lm-eval from the user's question files, so that it marks the same questions.

A task names the user's file and copies nothing of it. Choices are scored by their likelihoods, as lm-eval's own tasks
do it; a chat endpoint gives none, so for it the model writes a letter.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from loadgen.benchmarks import NUMBER_PATTERN, BenchmarkUnreadable, Marking, Question, read_questions
from loadgen.console import results_console
from loadgen.lm_eval_samples import PREFERRED_FILTER

PREFIX = "local_"
"""lm-eval has tasks named gsm8k and truthfulqa of its own."""
_LETTER_TOKENS = 16


class NoTask(Exception):
    """A file makes no task; the message says which and why."""


def task_of(path: Path, questions: Sequence[Question], *, chat: bool, answer_tokens: int) -> dict[str, Any]:
    """The task of one file, as lm-eval reads it. Raises NoTask."""
    kinds = {(question.suite, question.marking) for question in questions}
    if len(kinds) > 1:
        raise NoTask(f"{path} has questions of several suites or kinds: a task is one of each")
    ((suite, marking),) = kinds
    if marking is Marking.TEXT:
        raise NoTask(f"{path} has no right answers, so lm-eval has nothing to mark")
    asked = "{{prompt}}" if chat else "{{prompt}}\nAnswer:"
    common = {
        "task": PREFIX + suite,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path.resolve())}},
        "test_split": "test",
        "doc_to_target": "reference",
        "metadata": {"version": 1.0},
    }
    if marking is Marking.NUMBER:
        return common | _written(NUMBER_PATTERN.pattern, -1, answer_tokens) | {"doc_to_text": asked}
    if chat:
        labels = "|".join(dict.fromkeys(label for question in questions for label in question.labels))
        return common | _written(rf"\b({labels})\b", 0, _LETTER_TOKENS) | {"doc_to_text": asked}
    return common | {
        "output_type": "multiple_choice",
        "doc_to_text": asked,
        "doc_to_choice": "valid_labels",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def _written(pattern: str, which: int, tokens: int) -> dict[str, Any]:
    """An answer in words, of which the match number `which` counts; numbers are compared without commas and `.0`."""
    return {
        "output_type": "generate_until",
        "generation_kwargs": {"max_gen_toks": tokens, "do_sample": False, "temperature": 0.0, "until": ["Question:"]},
        "filter_list": [
            {
                "name": PREFERRED_FILTER,
                "filter": [
                    {"function": "regex", "regex_pattern": pattern, "group_select": which},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "regexes_to_ignore": [",", r"\.0+$"],
            }
        ],
    }


def lm_eval_command(out: Path, tasks: Sequence[str], base_url: str, *, chat: bool) -> str:
    """A command line for one mode, MODE, of the served model, MODEL."""
    model = "local-chat-completions" if chat else "local-completions"
    url = f"{base_url.rstrip('/')}/v1/{'chat/completions' if chat else 'completions'}"
    words = ["lm_eval", "run", "--model", model, *(["--apply_chat_template"] if chat else [])]
    words += ["--include_path", str(out), "--tasks", ",".join(tasks), "--log_samples"]
    # Without its tokenizer lm-eval cannot tell where a choice begins.
    tokenizer = "" if chat else ",tokenizer=TOKENIZER_FOLDER"
    words += ["--model_args", f"model=MODEL:MODE,base_url={url}{tokenizer}", "--output_path", "results/lm-eval/MODE"]
    return shlex.join(words)


def register(app: typer.Typer) -> None:
    """Adds `lm-eval-tasks`."""

    @app.command("lm-eval-tasks")
    def lm_eval_tasks(
        files: Annotated[list[Path], typer.Argument(help="JSON lines of questions, as `quality` reads them.")],
        chat: Annotated[
            bool, typer.Option("--chat/--completions", help="For lm-eval's local-chat-completions.")
        ] = False,
        answer_tokens: Annotated[int, typer.Option(min=1, help="Longest answer of a calculation.")] = 256,
        base_url: Annotated[str, typer.Option(help="In the command that is shown.")] = "http://127.0.0.1:8000",
        out: Annotated[Path, typer.Option(help="Folder for the tasks.")] = Path("results/lm-eval-tasks"),
    ) -> None:
        """Write lm-eval tasks for question files of yours; `quality --samples` judges what lm-eval then logs."""
        console = results_console()
        try:
            tasks = [task_of(path, read_questions([path]), chat=chat, answer_tokens=answer_tokens) for path in files]
            names = [task["task"] for task in tasks]
            if len(set(names)) < len(names):
                raise NoTask(f"two files are of one suite: {', '.join(sorted(names))}")
            out.mkdir(parents=True, exist_ok=True)
            for task in tasks:
                (out / f"{task['task']}.yaml").write_text(yaml.safe_dump(task, sort_keys=False, allow_unicode=True))
        except (BenchmarkUnreadable, NoTask) as error:
            console.print(f"lm-eval-tasks: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        except OSError as error:
            console.print(f"lm-eval-tasks: cannot write {out}: {error.strerror or error}", style="red", markup=False)
            raise typer.Exit(2) from error
        console.print(f"{out} holds {', '.join(names)}. For each mode:", markup=False)
        console.print(lm_eval_command(out, names, base_url, chat=chat), markup=False, soft_wrap=True)
        console.print(
            "Then: loadgen quality --texts 0 --samples fp16:SCOPE=FILE --samples MODE:SCOPE=FILE, with each mode's "
            "samples_*.jsonl.",
            markup=False,
        )
