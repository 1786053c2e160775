import json
from pathlib import Path

import pytest

from loadgen.trace import TraceError, TraceRow, read_trace

GOOD = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}


def write(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_mooncake_trace(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "", {**GOOD, "timestamp": 27482.5})
    assert read_trace(path) == [TraceRow(27.482, 6955, 52, (46, 47)), TraceRow(27.4825, 6955, 52, (46, 47))]
    assert len(read_trace(path, limit=1)) == 1


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({**GOOD, "timestamp": 5}, "sort the trace"),
        ({**GOOD, "timestamp": -1}, "timestamp -1 is not a time"),
        ({**GOOD, "timestamp": "NaN"}, "is not a time"),
        ({**GOOD, "timestamp": None}, "float"),
        ({**GOOD, "input_length": 0}, "must be at least 1"),
        ({**GOOD, "output_length": -3}, "must be at least 1"),
        ({"timestamp": 30000}, "no field 'input_length'"),
        ('{"timestamp": 30000, "input_length": 1e400, "output_length": 5}', "infinity"),
        ("[1, 2]", "not a JSON object"),
        ("{broken", "property name"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, second: object, words: str) -> None:
    with pytest.raises(TraceError, match="line 2") as caught:
        read_trace(write(tmp_path, GOOD, second))
    assert words in str(caught.value)


def test_no_trace_at_all(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(write(tmp_path, ""))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot read"):
        read_trace(tmp_path / "binary")
