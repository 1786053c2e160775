"""Where commands tell their results."""

import os

from rich.console import Console

_WIDTH = 140
"""Columns of what is no terminal: a file or a pipe has no width, and in 80 columns the names of modes are cut off."""


def results_console() -> Console:
    """A terminal as wide as it is; anything else as wide as tables need, or as COLUMNS says."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDTH)
