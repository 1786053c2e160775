import io
import json

from rich.console import Console

from loadgen.records import Outcome, RequestRecord
from loadgen.summary import Slo, counts_line, rates_table, summarise_run


def good(ttft_ms: float = 50.0, tokens: int = 11) -> RequestRecord:
    frames = [ttft_ms + 10.0 * index for index in range(tokens)]
    return RequestRecord(
        ttft_ms=ttft_ms,
        total_ms=frames[-1] + 1,
        frame_ms=frames,
        output_tokens=tokens,
        prompt_tokens=100,
        cached_tokens=25,
        mode="fp16",
        late_ms=0.5,
    )


RECORDS = [
    good(),
    good(ttft_ms=900.0),
    RequestRecord(outcome=Outcome.DROPPED, error="gone", output_tokens=3, total_ms=5.0),
    RequestRecord(outcome=Outcome.CANCELLED, ttft_ms=1.0, frame_ms=[1.0, 2.0]),
]


def test_only_successes_have_latencies_and_everything_is_counted() -> None:
    summary = summarise_run(RECORDS, wall_s=2.0, slo=Slo(ttft_ms=100.0))
    assert summary.outcomes == {"ok": 2, "dropped": 1, "cancelled": 1}
    assert (summary.requests, summary.errors) == (4, 1)
    ttft = summary.latencies["ttft_ms"]
    assert ttft is not None
    assert (ttft.n, ttft.largest) == (2, 900.0)
    assert summary.output_tokens_per_s == 11.0
    assert (summary.requests_per_s, summary.goodput_per_s) == (1.0, 0.5)
    assert summary.frames_per_token == 1.0
    assert summary.cached_prompt_share == 0.25
    assert summary.modes == {"fp16": 2}
    assert counts_line(summary, planned=6) == "2 ok, 1 errors, 1 cancelled, 2 never sent"
    assert json.loads(json.dumps(summary.as_json()))["between_tokens_ms"]["mean"] == 10.0


def test_what_was_not_measured_is_none_and_holds_no_limit() -> None:
    summary = summarise_run([RequestRecord(output_tokens=4, total_ms=3.0)], 1.0, Slo())
    assert summary.latencies["ttft_ms"] is None
    assert summary.goodput_per_s is None
    assert summary.frames_per_token is None
    assert summary.cached_prompt_share is None
    assert not Slo(ttft_ms=100.0).held_by(RequestRecord(total_ms=3.0))
    assert Slo(total_ms=3.0).held_by(RequestRecord(total_ms=3.0))


def test_tokens_that_the_server_does_not_count_are_unknown_and_not_zero() -> None:
    summary = summarise_run([good(), RequestRecord(total_ms=3.0, frame_ms=[1.0, 2.0])], 1.0, Slo())
    assert (summary.output_tokens_per_s, summary.frames_per_token, summary.requests_per_s) == (None, None, 2.0)
    assert summary.as_json()["output_tokens_per_s"] is None
    console = Console(file=io.StringIO(), width=120)
    console.print(rates_table({"all": summary}))
    assert isinstance(console.file, io.StringIO)
    assert "unknown" in console.file.getvalue().split("2.00")[0]
    failed = RequestRecord(outcome=Outcome.DROPPED)
    assert summarise_run([good(), failed], 1.0, Slo()).output_tokens_per_s == 11.0


def test_joules_are_of_the_requests_whose_joules_are_known() -> None:
    first, second, failed = good(), good(), RequestRecord(outcome=Outcome.DROPPED, output_tokens=3)
    assert summarise_run([first, second], 1.0, Slo()).j_per_output_token is None, "unknown is not 0"
    first.energy_j, failed.energy_j = 22.0, 99.0
    summary = summarise_run([first, second, failed], 1.0, Slo())
    assert (summary.j_per_output_token, summary.energy_requests) == (2.0, 1)
    assert summary.as_json()["j_per_output_token"] == 2.0
    assert json.loads(first.to_json())["energy_j"] == 22.0


def test_a_run_that_sent_nothing() -> None:
    summary = summarise_run([], 0.0, Slo())
    assert (summary.requests, summary.output_tokens_per_s) == (0, 0.0)
    assert counts_line(summary, planned=3) == "0 ok, 0 errors, 3 never sent"
