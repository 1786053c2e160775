"""Options that commands have in common."""

from typing import Annotated

import typer

ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Where the server has keys.")
]
