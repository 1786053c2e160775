"""What the README names exists: commands and their options, settings, modes, paths of the API, files."""

import importlib.util
import json
import re
import shlex
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml

import app
from app.config import load_live, load_settings
from app.controller.routes import create_app
from app.engines import prepare
from app.modes import CATALOGUE
from loadgen.__main__ import make_app

ROOT = Path(app.__file__).parents[1]
README = (ROOT / "README.md").read_text()
PLATFORMS = {"cpu": "cpu", "cuda": "a100-40gb"}
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SUBSTITUTED = re.compile(r"\$\([^)]*\)")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def shell_lines():
    """Commands of all shell blocks and of the text, continued lines joined."""
    texts = [*blocks("sh"), *SPAN.findall(README)]
    return [line.strip() for text in texts for line in text.replace("\\\n", " ").splitlines()]


def calls_of(module):
    """The arguments of every `python -m <module> ...`."""
    start = f"python -m {module} "
    found = [SUBSTITUTED.sub("X", line.partition(start)[2]) for line in shell_lines() if start in line]
    return [[word for word in shlex.split(line, comments=True) if word != "&"] for line in found]


def parse(command, args):
    """Let a command read its arguments, without running it; what it does not know fails."""
    while subcommands := getattr(command, "commands", None):
        command, args = subcommands[args[0]], args[1:]
    return command.make_context(command.name, list(args))


@pytest.fixture(scope="module")
def loadgen_command():
    return typer.main.get_command(make_app())


def test_the_measuring_commands_take_what_is_written(loadgen_command):
    calls = [call for call in calls_of("loadgen") if not call[0].startswith(("<", "--"))]
    assert len(calls) > 6
    for call in calls:
        parse(loadgen_command, call)


def test_every_measuring_command_of_the_table_exists(loadgen_command):
    section = README.partition("## Measuring")[2].partition("```")[0]
    named = [span for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for span in SPAN.findall(row)]
    assert len(named) > 10
    for call in named:
        name, *args = [__file__ if word == "FILE" else word for word in shlex.split(call)]
        assert name in loadgen_command.commands
        if args:  # A name alone stands for a command that may need more.
            parse(loadgen_command, [name, *args])


def test_prepare_takes_what_is_written():
    command = typer.Typer()
    command.command()(prepare.main)
    calls = calls_of("app.engines.prepare")
    assert calls
    for call in calls:
        parse(typer.main.get_command(command), call)


def test_modules_and_make_targets_exist():
    for module in set(re.findall(r"python -m ((?:app|loadgen)[\w.]*)", README)):
        assert importlib.util.find_spec(module), module
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {found[1] for line in shell_lines() if (found := re.match(r"make ([\w-]+)", line))}
    assert {"serve", "test"} <= named <= targets


def test_settings_are_valid():
    for block in blocks("yaml"):
        written = yaml.safe_load(textwrap.dedent(block))
        for application in written.get("applications", [written]):
            settings = load_settings(application["args"])
            for deployment in application.get("deployments", ()):
                load_live(settings.live, deployment["user_config"])
    named = [
        yaml.safe_load(span) for span in SPAN.findall(README) if re.match(r"(energy|device|knowledge|auth): ", span)
    ]
    assert len(named) > 2
    for setting in named:
        load_settings(setting)


def test_programs_compile_and_bodies_are_json():
    assert [compile(block, "README.md", "exec") for block in blocks("python")]
    bodies = [body for block in blocks("sh") for body in re.findall(r"-d '(\{.*?\})'", block, re.DOTALL)]
    assert [json.loads(body)["model"] for body in bodies] == ["auto", "auto"]


def test_paths_of_the_api_are_those_that_are_served():
    service = SimpleNamespace(settings=load_settings({"preset": "cpu"}))
    served = {route.path.replace("{name:path}", "{id}") for route in create_app(service, None).routes}
    rows = re.findall(r"^\| (`(?:GET|POST) .*?) \|", README, re.MULTILINE)
    named = {span.split()[-1].partition("?")[0] for row in rows for span in SPAN.findall(row)}
    assert named == served


def test_files_that_are_named_are_there():
    spans = [span for span in SPAN.findall(README) if re.fullmatch(r"(app|loadgen|requirements)/[\w./-]*", span)]
    links = re.findall(r"\]\(((?:app|loadgen)/[^)]*)\)", README)
    assert len(spans) > 10
    for name in (*spans, *links):
        assert (ROOT / name).exists(), name


def mode_rows():
    """Each mode's cells: what differs, on a CPU, on a GPU."""
    section = README.partition("## Modes")[2].partition("## ")[0]
    for names, *cells in re.findall(r"^\| (`.*?) \| (.*?) \| (.*?) \| (.*?) \|$", section, re.MULTILINE):
        for name in SPAN.findall(names):
            yield name, cells


@pytest.mark.parametrize(("platform", "column"), [("cpu", 1), ("cuda", 2)])
def test_the_table_of_modes_is_the_catalogue(platform, column):
    default = {mode.name for mode in load_settings({"preset": PLATFORMS[platform]}).resolved_modes}
    rows = dict(mode_rows())
    assert set(rows) == set(CATALOGUE)
    for name, cells in rows.items():
        said = cells[column]
        assert said.startswith("ready by default") == (name in default), name
        if name not in default:
            assert said.startswith("alias") == (platform in CATALOGUE[name].alias_of), name
