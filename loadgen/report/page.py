"""Material to sections, and sections to one self-contained page."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from loadgen.report import load_figures, mode_figures, policy_figures, tables
from loadgen.report.drawing import Picture
from loadgen.report.material import Material
from loadgen.report.tables import DataTable

Exhibit = DataTable | Picture


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what belongs under it; `missing` says what would fill it when there is nothing."""

    heading: str
    missing: str
    exhibits: Sequence[Exhibit] = field(default_factory=tuple)


def sections(material: Material) -> list[Section]:
    """All sections of the report, in the paper's order; those without material have no exhibits."""
    return [
        Section(heading, missing, list(exhibits))
        for heading, missing, exhibits in (
            ("Fixed modes (table 1, figure 1)", "no sweep.json: run `loadgen sweep`", _modes(material)),
            ("Quality (table 2)", "no quality.json: run `loadgen quality`", _quality(material)),
            ("The controller by kind of request (figure 2)", _NO_COMPARISON, _families(material)),
            ("Routing behaviour (figure 3)", _NO_COMPARISON, _routing(material)),
            ("Policies (table 3, figure 5)", _NO_COMPARISON, _policies(material)),
            ("Trained routers (figure 4)", "no train.json: run `loadgen train`", _confusions(material)),
            ("Latencies", "no summary.json of `loadgen run`, and no compare.json", _latencies(material)),
            ("A run in time", "no summary.json of `loadgen run`, and no compare.json", _timelines(material)),
        )
    ]


_NO_COMPARISON = "no compare.json: run `loadgen compare`"


def _modes(material: Material) -> Iterator[Exhibit]:
    for number, found in enumerate(material.screenings, 1):
        if found.modes:
            yield tables.fastest_modes(found)
            yield mode_figures.screening(found, f"figure1_screening_{number}")
            yield from mode_figures.heat_maps(found, f"heat_map_{number}")


def _quality(material: Material) -> Iterator[Exhibit]:
    return (tables.accuracy(source, found) for source, found in material.accuracies)


def _families(material: Material) -> Iterator[Exhibit]:
    for number, found in enumerate(material.controlled, 1):
        yield policy_figures.by_family(found, f"figure2_families_{number}")


def _routing(material: Material) -> Iterator[Exhibit]:
    for number, found in enumerate(material.controlled, 1):
        if any(family.choices for family in found.families):
            yield policy_figures.routing(found, f"figure3_routing_{number}")


def _policies(material: Material) -> Iterator[Exhibit]:
    for number, found in enumerate(material.comparisons, 1):
        yield tables.policies(found)
        yield policy_figures.comparison(found, f"figure5_policies_{number}")


def _confusions(material: Material) -> Iterator[Exhibit]:
    for number, source in enumerate(dict.fromkeys(found.source for found in material.confusions), 1):
        of_source = [found for found in material.confusions if found.source == source]
        yield policy_figures.confusions(of_source, f"figure4_confusion_{number}")


def _latencies(material: Material) -> Iterator[Exhibit]:
    for number, found in enumerate(material.latencies, 1):
        yield load_figures.distributions(found, f"latencies_{number}")


def _timelines(material: Material) -> Iterator[Exhibit]:
    for number, found in enumerate(material.timelines, 1):
        yield load_figures.timeline(found, f"timeline_{number}")


def page(material: Material, found: Sequence[Section]) -> str:
    """HTML with its pictures inside it. Names that came from files are escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(title=material.title, sections=found, unreadable=material.unreadable)


def pictures(found: Sequence[Section]) -> list[Picture]:
    return [exhibit for section in found for exhibit in section.exhibits if isinstance(exhibit, Picture)]
