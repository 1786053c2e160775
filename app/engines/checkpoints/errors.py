"""Why a checkpoint cannot be used; every message says what to do next."""

from pathlib import Path

_PREPARE = "python -m app.engines.prepare"


class CheckpointError(Exception):
    """No usable checkpoint; the message is fit to be shown to the user."""


class CheckpointMissing(CheckpointError):
    """The checkpoint was never made, or the reference leads nowhere."""


class CheckpointCorrupt(CheckpointError):
    """The checkpoint's folder exists, but is incomplete or changed; prepare rebuilds it."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"The checkpoint {folder} is corrupt: {reason}. Run `{_PREPARE}` again to rebuild it.")
        self.folder = folder
        self.reason = reason


class PrepareError(CheckpointError):
    """A step of the preparation failed; the message names the log where there is one."""
