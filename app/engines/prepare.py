"""Makes the checkpoints that engines load: `python -m app.engines.prepare`.

Every checkpoint is written beside its place and renamed when it is whole, so the command may be interrupted at any
moment and run again: it keeps what is whole, and removes and rebuilds the rest.
"""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from app.engines import store
from app.engines.checkpoints import build, embedded, sources
from app.engines.checkpoints.errors import CheckpointError
from app.engines.checkpoints.home_lock import home_locked
from app.engines.checkpoints.steps import Steps
from app.engines.store import Scheme

DEFAULT_SCHEMES = [Scheme.FP16, Scheme.INT8, Scheme.GPTQ]


def prepare(reference: str, schemes: list[Scheme], home: Path, steps: Steps) -> None:
    """Bring the checkpoints of `reference` into being, one after another, dense weights first.

    Raises PrepareError, CheckpointMissing for a folder without a model, and OSError, as on a full disk.
    """
    with home_locked(home, lambda holder: steps.say(f"Waiting for another run (process {holder}).")) as lock:
        source = sources.find(reference)
        if source.folder is None:
            source = build.unpacked(source, home, steps)
        for scheme in Scheme:
            if scheme in schemes and scheme is not Scheme.FP16:
                build.quantized(source, scheme, home, steps, lock)


def verify(reference: str, schemes: list[Scheme], home: Path, steps: Steps) -> None:
    """Check every byte of the checkpoints of `reference`. Raises CheckpointMissing or CheckpointCorrupt."""
    for scheme in schemes:
        folder = Path(store.model_path(reference, scheme, home))
        if scheme is Scheme.FP16 and reference != embedded.REFERENCE:
            steps.say(f"{scheme}: {folder} is used as it is; there are no checksums for it.")
            continue
        build.check(folder, scheme, steps)


def main(
    model: Annotated[
        str, typer.Option(help="A local folder, a Hugging Face name, or `embedded`.")
    ] = embedded.REFERENCE,
    scheme: Annotated[
        list[Scheme], typer.Option(help="A weight scheme; give it more than once for several.")
    ] = DEFAULT_SCHEMES,
    home: Annotated[
        Path | None, typer.Option(help="Where to write; default: $MODESWITCH_HOME or the cache folder.")
    ] = None,
    verify_only: Annotated[bool, typer.Option("--verify", help="Check the checksums, and write nothing.")] = False,
) -> None:
    """Prepare the checkpoints that the engines load; what is there and whole is kept."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _exit_on_signal)
    console = Console()
    folder = home.expanduser().absolute() if home else store.default_home()
    try:
        with Steps(console) as steps:
            (verify if verify_only else prepare)(model, scheme, folder, steps)
            for each in scheme:
                steps.say(f"{each}: {store.model_path(model, each, folder)}")
    except (CheckpointError, OSError) as error:
        console.print(f"[red]Failed:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Leave through the `finally` clauses that remove the half-written folder and end the child."""
    sys.exit(128 + number)


if __name__ == "__main__":
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(main)
    command()
