from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner

from loadgen.__main__ import make_app
from loadgen.options import finite


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "--rate-light", "inf"),
        ("compare", "--rate-saturating", "inf"),
        ("sweep", "--tolerance", "inf"),
        ("quality", "--kl-max", "inf"),
        ("null-server", "--tokens-per-s", "nan"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(arguments: tuple[str, str, str]) -> None:
    result = CliRunner().invoke(make_app(), list(arguments))
    assert result.exit_code == 2, result.output
    words = " ".join(result.output.replace("│", " ").split())
    assert arguments[1] in words
    assert f"{arguments[2]} is no finite number" in words


def commands(app: typer.Typer) -> Iterator[Callable[..., Any]]:
    yield from (command.callback for command in app.registered_commands if command.callback is not None)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from commands(group.typer_instance)


def test_no_option_that_is_a_number_is_left_out() -> None:
    hints = [hint for of in commands(make_app()) for hint in get_type_hints(of, include_extras=True).values()]
    options = [found for hint in hints if (found := get_args(hint))]
    numbers = [found for found in options if found[0] is float or float in get_args(found[0])]
    infos = [info for found in numbers for info in found if isinstance(info, OptionInfo)]
    assert len(infos) == len(numbers) > 15
    assert all(info.callback is finite for info in infos)
