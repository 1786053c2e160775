"""`python -m loadgen <command>`: load, measurements and replay, against this server or any OpenAI-compatible one."""

import importlib
import importlib.util
import sys

import typer

# A command module is imported when the program starts, so it keeps heavy imports inside its functions.
COMMAND_MODULES = (
    "overhead",
    "idle_cost",
    "run",
    "replay",
    "oracle",
    "sweep",
    "energy",
    "report",
    "calibrate",
    "compare",
    "decision_bench",
    "quality",
    "lm_eval_tasks",
    "train",
    "null_server",
)


def make_app() -> typer.Typer:
    """The program with every command that this installation has."""
    app = typer.Typer(
        name="loadgen", help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False
    )
    app.callback()(_together)
    for name in COMMAND_MODULES:
        if importlib.util.find_spec(f"loadgen.{name}") is not None:
            importlib.import_module(f"loadgen.{name}").register(app)
    return app


def _together() -> None:
    """Load, measurements and replay, against this server or any OpenAI-compatible one."""


if __name__ == "__main__":
    try:
        make_app()()
    except KeyboardInterrupt:
        # While modules are imported; every command ends in order by itself.
        print("interrupted before it began", file=sys.stderr)
        sys.exit(130)
