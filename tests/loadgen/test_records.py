from pathlib import Path

import pytest

from loadgen.records import Outcome, OutputUnwritable, RecordWriter, RequestRecord, read_records


def record(index: int) -> RequestRecord:
    return RequestRecord(index=index, workload="ss", frame_ms=[10.0, 20.0, 50.0], output_tokens=5, text="secret")


def test_records_come_back_without_their_text(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "new" / "folder") as writer:
        writer.write(record(0))
        writer.write(record(1))
    assert "secret" not in writer.path.read_text()
    back = read_records(writer.path)
    assert [item.index for item in back.records] == [0, 1]
    assert back.records[0].outcome is Outcome.OK
    assert back.damaged_lines == 0


def test_a_line_cut_by_a_kill_costs_that_line_only(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        for index in range(3):
            writer.write(record(index))
        assert len(read_records(writer.path).records) == 3, "readable while the run goes on"
    writer.path.write_bytes(writer.path.read_bytes()[:-20])
    back = read_records(writer.path)
    assert ([item.index for item in back.records], back.damaged_lines) == ([0, 1], 1)


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputUnwritable, match=r"file/results/requests\.jsonl"):
        RecordWriter(tmp_path / "file" / "results")


def test_time_between_tokens_counts_tokens_not_frames() -> None:
    assert record(0).between_tokens_ms == 10.0
    assert record(0).frame_gaps_ms == [10.0, 30.0]
    assert RequestRecord(output_tokens=1, frame_ms=[1.0]).between_tokens_ms is None
