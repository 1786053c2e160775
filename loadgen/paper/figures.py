"""The paper's figures, computed from the measured rows alone; what was published is looked at afterwards."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from loadgen.best_mode import Constraints, Score, best_mode, score
from loadgen.paper.tables import DENSE_RUN, FP16, PaperTables

_HYBRIDS = (
    # names and modes of the single one and of the hybrid, whether both batch, the family they are compared on or all
    (
        "continuous batching",
        "continuous_batching",
        "INT8 + continuous batching",
        "int8_plus_continuous_batching",
        True,
        None,
    ),
    (
        "prefix caching",
        "prefix_caching",
        "GPTQ + prefix caching",
        "gptq_plus_prefix_caching",
        False,
        "shared_prefix_chat",
    ),
)


def headline(tables: PaperTables) -> dict[str, float]:
    """The online run and its oracle: means over families, each family once."""
    online, synthetic, benchmarks = tables.online, tables.synthetic, tables.benchmarks
    return {
        "synthetic speed-up": fmean(online[family].speedup for family in synthetic),
        "synthetic energy ratio": fmean(online[family].energy_ratio for family in synthetic),
        "benchmark speed-up": fmean(online[family].speedup for family in benchmarks),
        "benchmark energy ratio": fmean(online[family].energy_ratio for family in benchmarks),
        "benchmark accuracy change (points)": fmean(online[family].quality_delta for family in benchmarks),
        "by-family speed-up": fmean(row.speedup for row in online.values()),
        "by-family energy reduction (%)": 100 * (1 - fmean(row.energy_ratio for row in online.values())),
        "oracle by-family speed-up": fmean(row.speedup for row in tables.oracle.values()),
        "oracle by-family energy reduction (%)": fmean(row.energy_reduction_pct for row in tables.oracle.values()),
    }


def hybrids(tables: PaperTables) -> dict[str, float]:
    """Each hybrid beside the single mode it extends, on the families that it is meant for."""
    found: dict[str, float] = {}
    for single_name, single, hybrid_name, hybrid, batched, only in _HYBRIDS:
        dense = tables.dense(batched=batched)
        families = [only] if only else tables.synthetic
        for name, mode in ((single_name, single), (hybrid_name, hybrid)):
            rows = [dense[family][mode] for family in families]
            found[f"{name} (ms)"] = fmean(row.latency_ms for row in rows)
            found[f"{name} (tokens/s)"] = fmean(_known(row.tokens_per_s for row in rows))
            found[f"{name} (J/token)"] = fmean(_known(row.energy_j_per_token for row in rows))
    return found


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def policies_605(tables: PaperTables, *, with_overhead: bool = True) -> dict[str, Score]:
    """The authors' policies on the 605 requests, by the fixed modes' measurements on each request's family."""
    return {
        name: score(
            {family: row.choices[name] for family, row in tables.families.items()},
            tables.dense(),
            _counts(tables),
            FP16,
            Constraints(),
            overhead_ms=overhead_ms if with_overhead else 0.0,
        )
        for name, overhead_ms in tables.overheads_ms.items()
    }


def _counts(tables: PaperTables) -> dict[str, int]:
    return {family: row.requests for family, row in tables.families.items()}


def computed(tables: PaperTables) -> dict[str, float]:
    """Every figure of the paper that its rows allow to compute, by name."""
    found = {**headline(tables), **hybrids(tables)}
    for name, result in policies_605(tables).items():
        found[f"605 requests, {name}: speed-up"] = result.speedup
        if result.energy_ratio is not None:
            found[f"605 requests, {name}: energy ratio"] = result.energy_ratio
    return found


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure beside what was published; either may be missing."""

    name: str
    computed: float | None
    published: str | None

    @property
    def verdict(self) -> str:
        """`equal` to every printed digit, else the difference in percent of the published value."""
        if self.computed is None:
            return "cannot be computed from the rows"
        if self.published is None:
            return "not published"
        printed = float(self.published)
        decimals = len(self.published.partition(".")[2])
        if abs(self.computed - printed) <= 0.5 * 10**-decimals + 1e-9:
            return "equal"
        return f"{100 * (self.computed / printed - 1):+.2f} %"


def compare(found: Mapping[str, float], published: Mapping[str, str]) -> list[Compared]:
    """All figures of either side, the computed ones first."""
    names = [*found, *(name for name in published if name not in found)]
    return [Compared(name, found.get(name), published.get(name)) for name in names]


def against_graphs(tables: PaperTables) -> float:
    """The headline against FP16 with CUDA graphs instead of eager FP16: mean over the synthetic families.

    The controller's run has no such baseline. Its stand-in is prefix caching on prompts that share nothing, which is
    FP16 with graphs; for memory pressure, which that run lacks, the dense run's ratio of the two is taken.
    """
    dense = tables.dense()
    ratios = []
    for family in tables.synthetic:
        row = tables.online[family]
        same_run = [
            measured.latency_ms
            for (run, mode, workload), measured in tables.fixed.items()
            if run != DENSE_RUN and mode == "prefix_caching" and workload.startswith(_VARIANTS.get(family, family))
        ]
        scaled = row.fp16_ms * dense[family]["prefix_caching"].latency_ms / dense[family][FP16].latency_ms
        ratios.append((fmean(same_run) if same_run else scaled) / row.controller_ms)
    return fmean(ratios)


# The controller's run names the variants of one family in its own way.
_VARIANTS = {"shared_prefix_chat": "SHARED_v", "memory_pressure_long_context": "MP_v"}


def static_modes(tables: PaperTables, families: Iterable[str]) -> dict[str, Score]:
    """Every mode that was measured on all `families`, used for all of them, each family once."""
    counts, dense = dict.fromkeys(families, 1), tables.dense()
    modes = dict.fromkeys(mode for by_mode in dense.values() for mode in by_mode)
    return {
        mode: score(dict.fromkeys(counts, mode), dense, counts, FP16, Constraints())
        for mode in modes
        if all(mode in dense[family] for family in counts)
    }


def table_oracle(tables: PaperTables) -> dict[str, str]:
    """The fastest mode of each family in the dense run under the paper's constraints."""
    return {family: best_mode(by_mode, FP16, Constraints()) for family, by_mode in tables.dense().items()}


def score_choices(tables: PaperTables, choices: Mapping[str, str]) -> Score:
    """A policy's choices by family, each family once, under the paper's constraints."""
    return score(choices, tables.dense(), dict.fromkeys(tables.families, 1), FP16, Constraints())
