import io
from typing import Any

import pytest
from rich.console import Console

from loadgen.bandwidth import ReadBandwidth
from loadgen.decode_limit import DecodeLimit
from loadgen.energy_facts import EnergySource
from loadgen.sweep_interference import Beside, Interference
from loadgen.sweep_plan import Cell, Results, TrialResult
from loadgen.sweep_report import Found, rows_of, summary_of, tables_of, words_of

WORKLOADS = ("shared_prefix", "memory_pressure")
MODES = ("fp16", "int8_continuous_batching", "gptq_prefix_caching")


def complete() -> Found:
    """Everything measured, under the longest names that there are."""
    results = Results("fp16")
    for place, mode in enumerate(MODES):
        for workload in WORKLOADS:
            for streams in (1, 8):
                for number in range(3):
                    likeness = (0.9, 0.5) if place else (None, None)
                    share = 0.6 if streams == 1 else None
                    trial = TrialResult(1e3 * (place + 1) + number, 1e2, 1e1, 8.25, 0.5 + place, share, *likeness)
                    results.add(Cell(workload, streams), mode, number, trial)
    interference = Interference([Beside(MODES[1], MODES[2], 10.0, 15.0 + number) for number in range(3)], ended="done")
    return Found(
        results,
        list(MODES),
        "the rounds ended",
        EnergySource(True, "modelled", "box"),
        {mode: mode for mode in MODES},
        {mode: DecodeLimit(269 * 10**6, ReadBandwidth(12.3e9, "cpu", 1)) for mode in MODES},
        [{"name": mode, "peak_memory_bytes": 2**30} for mode in MODES],
        interference,
    )


def shown(found: Found) -> str:
    rows = rows_of(found)
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    for table in tables_of(found, rows):
        console.print(table)
    for sentence in words_of(found, rows):
        console.print(sentence)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_quantity_is_in_a_row() -> None:
    found = complete()
    row = next(row for row in rows_of(found) if row["mode"] == MODES[1] and row["concurrency"] == 1)
    assert row["j_per_token"]["median"] == 1.5
    assert row["j_per_token"]["ratio"] == pytest.approx({"estimate": 3.0, "low": 3.0, "high": 3.0, "pairs": 3})
    assert row["rouge_l"]["mean"] == pytest.approx({"estimate": 0.9, "low": 0.9, "high": 0.9, "pairs": 3})
    assert row["same_text"]["median"] == 0.5
    assert (row["peak_memory_bytes"], row["rounds"]) == (2**30, 3)
    assert row["limit_steps_per_s"] == pytest.approx(12.3e9 / 269e6)
    summary: dict[str, Any] = summary_of(found, rows_of(found), {"seed": 0})
    assert summary["energy"] == {"method": "modelled", "scope": "box"}
    assert summary["decode_limits"]["fp16"]["bandwidth"]["threads"] == 1
    assert summary["interference"]["rows"][0]["times_slower"]["estimate"] > 1.5


def test_tables_fit_a_terminal() -> None:
    text = shown(complete())
    for mode in MODES:
        assert mode in text, "no name is cut or wrapped"
    assert "memory_pressure x 8" in text
    assert "3.00 [3.00, 3.00]" in text, "a ratio stands on one line"
    assert "1001 ms" in text, "the reference's own figures are what the ratios are of"
    assert "60 %" in text
    assert "1024" in text
    assert "…" not in text


def test_what_was_not_measured_is_said_and_has_no_table() -> None:
    results = Results("fp16")
    results.add(Cell("ss", 1), "fp16", 0, TrialResult(100.0, None, None, None))
    found = Found(results, ["fp16"], limits={"fp16": DecodeLimit(None, None)})
    text = shown(found)
    assert "The server told no energy." in text
    assert "No memory limit, since their weights' bytes are not known here: fp16." in text
    assert "No texts were compared" in text
    for title in ("Greedy text", "Decoding of one stream", "times slower"):
        assert title not in text
    (row,) = rows_of(found)
    assert row["tokens_per_s"] == row["j_per_token"] == {"median": None, "ratio": None}
    assert row["rouge_l"] == {"median": None, "mean": None}
    assert (row["peak_memory_bytes"], row["limit_steps_per_s"]) == (None, None)


def test_interrupted_before_anything_there_are_no_rows() -> None:
    found = Found(Results("fp16"))
    assert rows_of(found) == []
    assert "ended: interrupted" in shown(found)
