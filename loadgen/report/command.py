"""The command `report`. Drawing is imported when it is asked for: matplotlib takes a second to load."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadgen.console import results_console
from loadgen.paper.tables import TablesDamaged, load_tables
from loadgen.report.material import Material

_PAGE = "report.html"


class NothingToReport(Exception):
    """There is no result to draw; the message says where it was looked for."""


def _material(folder: Path | None, paper: bool) -> Material:
    """Raises NothingToReport, TablesDamaged."""
    if paper:
        from loadgen.report.paper_material import paper_material

        return paper_material(load_tables())
    from loadgen.report.results import read_results

    if folder is None or not folder.is_dir():
        raise NothingToReport(f"{folder} is no folder of results" if folder else "give a folder of results, or --paper")
    return read_results(folder)


def _write(material: Material, out: Path, console: Console) -> None:
    """Raises NothingToReport, OSError."""
    from loadgen.report.page import page, pictures, sections

    found = sections(material)
    for line in material.unreadable:
        console.print(f"left out: {line}", style="yellow", markup=False)
    for section in found:
        if not section.exhibits:
            console.print(f"{section.heading}: not in the report, {section.missing}", style="yellow", markup=False)
    drawn = pictures(found)
    if not any(section.exhibits for section in found):
        raise NothingToReport("no result of any command was found")
    out.mkdir(parents=True, exist_ok=True)
    for picture in drawn:
        (out / f"{picture.name}.png").write_bytes(picture.png)
    (out / _PAGE).write_text(page(material, found), encoding="utf-8")
    console.print(f"{out / _PAGE}, and its {len(drawn)} figures as PNGs beside it", markup=False)


def register(app: typer.Typer) -> None:
    """Adds `report`."""

    @app.command()
    def report(
        results: Annotated[
            Path | None, typer.Argument(help="Folder with the results of sweep, run, compare, train and quality.")
        ] = None,
        out: Annotated[Path, typer.Option(help="Folder for the page and the PNGs.")] = Path("results/report"),
        paper: Annotated[bool, typer.Option("--paper", help="Draw the paper's own measurements instead.")] = False,
    ) -> None:
        """The paper's tables and figures from one's own results, as one HTML page and PNGs."""
        console = results_console()
        try:
            _write(_material(results, paper), out, console)
        except ModuleNotFoundError as error:
            console.print(f"report needs {error.name}: pip install 'modeswitch[report]'", style="red", markup=False)
            raise typer.Exit(2) from error
        except (NothingToReport, TablesDamaged) as error:
            console.print(f"report: {error}", style="red", markup=False)
            raise typer.Exit(2) from error
        except OSError as error:
            console.print(f"report: cannot write {out}: {error.strerror or error}", style="red", markup=False)
            raise typer.Exit(2) from error
