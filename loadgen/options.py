"""Options that commands have in common."""

import math
from typing import Annotated

import typer

ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Where the server has keys.")
]


def finite(value: float | None) -> float | None:
    """A callback for options that are numbers: a range with a lower end alone lets `inf` pass. Raises BadParameter."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value
