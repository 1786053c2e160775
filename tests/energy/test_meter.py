"""The meter from reports to answers, on a scripted GPU: figures add up to the counter and survive every change."""

import sqlite3
from dataclasses import replace

import pynvml
import pytest

from app.energy.activity import ActivityBatch, Slice, Work
from app.energy.attribution import TokenWeights
from app.energy.ledger import Fenced
from app.energy.queries import UnknownRequest
from app.energy.rows import RequestRecord
from app.energy.settings import EnergySettings
from tests.energy.nvml_stub.stub_library import Function
from tests.energy.schedules import IDLE_W, Burst, true_joules
from tests.energy.world import WALL_OFFSET_S, World

TWO_ENGINES = [
    Burst("A", 4.0, 6.0, 300, ("alice:1",)),
    Burst("B", 7.0, 9.0, 150, ("bob:1",)),
    Burst("A", 10.0, 14.0, 300, ("alice:2", "bob:2")),
    Burst("B", 11.0, 16.0, 150, ("alice:3",)),
    Burst("A", 18.0, 18.05, 300, ("bob:3",)),
]
TRUE_J = {"A": 300 * 6.05, "B": 150 * 7}


@pytest.fixture
def world(stub, tmp_path):
    return World(stub, tmp_path / "energy.sqlite", TWO_ENGINES)


def shares(totals, group):
    return {share.name: share.energy_j for share in totals.by[group]}


def test_totals_add_up_to_the_counter(world):
    meter = world.start_meter()
    world.run(22)
    totals = world.totals(meter)
    assert totals.methods == ("nvml_counter",)
    assert totals.measured_j == pytest.approx(totals.idle_j + totals.credited_j + totals.residual_j)
    assert abs(totals.residual_j) <= 0.01 * totals.measured_j
    assert shares(totals, "engine") == {name: pytest.approx(joules, rel=0.02) for name, joules in TRUE_J.items()}
    assert shares(totals, "mode").keys() == {"A_mode", "B_mode"}
    for group in ("mode", "engine", "tenant", "class"):
        assert sum(shares(totals, group).values()) == pytest.approx(totals.credited_j)
    assert sum(share.decode_tokens for share in totals.by["engine"]) == pytest.approx(tokens_of(TWO_ENGINES))


def tokens_of(bursts):
    from tests.energy.schedules import slices

    return sum(work.decode_tokens for burst in bursts for piece in slices(burst) for work in piece.work)


def test_requests_add_up_to_their_engine_and_become_final(world):
    meter = world.start_meter()
    world.run(22)
    energies = {name: meter.energy(name) for name in ("alice:1", "alice:2", "alice:3", "bob:1", "bob:2", "bob:3")}
    assert {energy.status for energy in energies.values()} == {"final"}
    credited_j = world.totals(meter).credited_j
    assert sum(energy.energy_j for energy in energies.values()) == pytest.approx(credited_j)
    assert energies["alice:1"].energy_j == pytest.approx(600, rel=0.02)
    assert energies["bob:3"].energy_j == pytest.approx(15, rel=0.1)
    assert energies["alice:1"].j_per_output_token == pytest.approx(600 / energies["alice:1"].decode_tokens, rel=0.02)
    assert energies["alice:1"].method == "nvml_counter"
    assert "whole GPU GPU-0" in energies["alice:1"].scope


def test_a_running_request_is_partial(world):
    meter = world.start_meter()
    world.run(12.5)
    assert meter.energy("alice:2").status == "partial"
    assert meter.energy("alice:1").status == "final"
    assert meter.energy("nobody") is None


def test_a_request_with_its_record(world):
    meter = world.start_meter()
    world.run(22)
    decision = {"mode": "A_mode", "why": "rule 7"}
    meter.record([RequestRecord("alice:1", world.wall(), "A_mode", "A", "alice", "standard", "ok", decision=decision)])
    found = meter.request("alice:1")
    assert found["record"]["decision"] == decision
    assert found["energy"]["status"] == "final"
    with pytest.raises(UnknownRequest, match="no request 'nobody'"):
        meter.request("nobody")


@pytest.mark.parametrize("status", ["failed", "aborted"])
def test_a_request_that_ended_badly_keeps_its_joules(stub, tmp_path, status):
    world = World(stub, tmp_path / "e.sqlite", [Burst("A", 4, 5, 300, ("alice:1",))])
    meter = world.start_meter()
    world.run(5.2)
    meter.record([RequestRecord("alice:1", world.wall(), "A_mode", "A", "alice", "standard", status)])
    world.run(9)
    found = meter.request("alice:1")
    assert (found["record"]["status"], found["energy"]["status"]) == (status, "final")
    assert found["energy"]["energy_j"] == pytest.approx(300, rel=0.02)
    assert shares(world.totals(meter), "tenant") == {"alice": pytest.approx(300, rel=0.02)}


def test_a_request_whose_engine_died_keeps_its_joules(stub, tmp_path):
    """Nobody tells its end; when the engine has not been heard of for a minute, what it used is final."""
    world = World(stub, tmp_path / "e.sqlite", [Burst("A", 4, 5, 300, ("alice:1",))])
    world._ends.clear()
    meter = world.start_meter()
    world.run(5.3)
    world.senders.clear()
    meter.record([RequestRecord("alice:1", world.wall(), "A_mode", "A", "alice", "standard", "failed")])
    world.run(15)
    before = meter.energy("alice:1")
    assert before.status == "partial"
    assert before.energy_j == pytest.approx(300, rel=0.02)
    world.run(75)
    assert meter.energy("alice:1") == replace(before, status="final")


def test_a_time_range(world):
    meter = world.start_meter()
    world.run(22)
    first = world.totals(meter, WALL_OFFSET_S, WALL_OFFSET_S + 9.9)
    rest = world.totals(meter, WALL_OFFSET_S + 9.9)
    assert first.measured_j + rest.measured_j == pytest.approx(world.totals(meter).measured_j)
    assert shares(first, "engine")["A"] == pytest.approx(600, rel=0.02)
    assert world.totals(meter, WALL_OFFSET_S - 100, WALL_OFFSET_S).measured_j is None


def test_a_crash_loses_nothing_that_the_counter_saw(world):
    crashed = world.start_meter()
    world.run(12.0)
    world.forget_meter(crashed)
    world.run(13.0)
    meter = world.start_meter()
    world.run(22)
    totals = world.totals(meter)
    assert shares(totals, "engine") == {name: pytest.approx(joules, rel=0.02) for name, joules in TRUE_J.items()}
    assert totals.measured_j == pytest.approx(IDLE_W * 21 + sum(TRUE_J.values()), rel=0.02)
    assert abs(totals.residual_j) <= 0.01 * totals.measured_j
    assert meter.energy("alice:1").energy_j == pytest.approx(600, rel=0.02)
    assert meter.state()["lost_reports"] == 0


def test_two_meters_overlapping_count_once(world):
    old = world.start_meter()
    world.run(12.0)
    new = world.start_meter()
    world.run(22)
    assert old.fenced is not None
    with pytest.raises(Fenced):
        old.record([])
    totals = world.totals(new)
    assert shares(totals, "engine") == {name: pytest.approx(joules, rel=0.02) for name, joules in TRUE_J.items()}
    assert totals.measured_j == pytest.approx(IDLE_W * 21 + sum(TRUE_J.values()), rel=0.02)
    assert abs(totals.residual_j) <= 0.01 * totals.measured_j
    old.close()


def test_an_orderly_restart_goes_on_with_what_was_learned(world):
    first = world.start_meter()
    world.run(17.0)
    world.stop_meter(first)
    second = world.start_meter()
    (device,) = second.state()["devices"]
    assert device["idle_w"] == pytest.approx(IDLE_W, rel=0.02)
    assert device["engine_watts"] == {"A": pytest.approx(300, rel=0.03), "B": pytest.approx(150, rel=0.05)}
    assert second.generation == 2


def test_a_profiles_weights_split_requests_and_begin_the_powers(stub, tmp_path):
    bursts = [Burst("A", 4, 8, 300, ("alice:1", "bob:1")), Burst("B", 4, 8, 150, ("bob:2",))]
    world = World(stub, tmp_path / "e.sqlite", bursts)
    meter = world.start_meter()
    meter.weigh({"A": TokenWeights(0.5, 0.1)}, {"A": 290.0, "B": 148.0})
    world.run(4.4)
    world.recorders["A"].step(4.35, 4.4, [Work("alice:1", 40, 0)])
    world.run(12)
    assert shares(world.totals(meter), "engine") == {
        n: pytest.approx(j, rel=0.05) for n, j in true_joules(bursts).items()
    }
    alice, bob = meter.energy("alice:1"), meter.energy("bob:1")
    # 40 prompt tokens of 0.5 J in one slice; by the settings' weights they would be 4 output tokens.
    assert alice.energy_j > bob.energy_j + 0.05 * alice.energy_j
    assert meter.state()["token_weights_j"] == {"A": {"prefill": 0.5, "decode": 0.1}}


def test_lost_reports_are_counted_and_their_joules_are_residual(world):
    meter = world.start_meter()
    world.run(4.6)
    world.lose_next = 4
    world.run(22)
    assert meter.state()["lost_reports"] == 4
    totals = world.totals(meter)
    assert totals.measured_j == pytest.approx(totals.idle_j + totals.credited_j + totals.residual_j)
    assert totals.residual_j > 0.03 * totals.measured_j


def test_reports_that_no_meter_took_are_told_to_the_next_one(world):
    sender = world.senders["A"]
    sender._keep = 4
    world.run(7.0)
    meter = world.start_meter()
    world.run(8.0)
    assert sender.dropped_batches > 4
    state = meter.state()
    assert (state["lost_reports"], state["dropped_reports"]) == (0, sender.dropped_batches)


def test_no_meter_is_null_everywhere(world):
    world.settings = EnergySettings(source="none")
    meter = world.start_meter()
    world.run(22)
    totals = world.totals(meter)
    assert (totals.measured_j, totals.idle_j, totals.credited_j, totals.residual_j) == (None, None, None, None)
    meter.record([RequestRecord("alice:1", world.wall(), "A_mode", "A", "alice", "standard", "ok")])
    energy = meter.request("alice:1")["energy"]
    assert (energy["energy_j"], energy["status"]) == (None, "unmeasured")
    assert meter.state()["passed_over"] == ["energy.source is none"]
    assert all(len(sender._kept) == 0 for sender in world.senders.values())


def test_a_device_lost_and_found(world):
    for function in (Function.COUNTER, Function.HANDLE):
        world.stub.fault(0, function, pynvml.NVML_ERROR_GPU_IS_LOST, 7.5, 10.5)
    meter = world.start_meter()
    world.run(22)
    totals = world.totals(meter)
    assert meter.state()["sampler_events"] == {"lost": 1, "recovered": 1}
    # The counter went on, so the sum is right, and only the split inside the gap is coarser.
    assert totals.measured_j == pytest.approx(IDLE_W * 21 + sum(TRUE_J.values()), rel=0.02)
    assert sum(shares(totals, "engine").values()) == pytest.approx(sum(TRUE_J.values()), rel=0.02)


def test_a_counter_reset_is_unmeasured_time_and_no_energy_is_made_up(world):
    world.stub.reset_counter(0, 5.02)
    meter = world.start_meter()
    world.run(22)
    totals = world.totals(meter)
    assert 0 < totals.unmeasured_s < 0.5
    assert totals.measured_j < IDLE_W * 21 + sum(TRUE_J.values())
    assert shares(totals, "engine")["B"] == pytest.approx(TRUE_J["B"], rel=0.02)


def test_an_engine_on_two_gpus_gets_joules_of_both_and_its_tokens_once(stub, tmp_path):
    bursts = [Burst("A", 4, 8, 300, ("alice:1",))]
    world = World(stub, tmp_path / "e.sqlite", bursts, devices={"GPU-0": bursts, "GPU-1": bursts})
    world.recorders["A"].devices = ("GPU-0", "GPU-1")
    meter = world.start_meter()
    world.run(12)
    totals = world.totals(meter)
    assert set(totals.devices) == {"GPU-0", "GPU-1"}
    assert shares(totals, "engine") == {"A": pytest.approx(2400, rel=0.02)}
    assert totals.by["engine"][0].decode_tokens == pytest.approx(tokens_of(bursts))
    energy = meter.energy("alice:1")
    assert (energy.energy_j, energy.decode_tokens) == (pytest.approx(2400, rel=0.02), pytest.approx(tokens_of(bursts)))


def test_with_several_gpus_a_report_must_name_its_own(stub, tmp_path):
    bursts = [Burst("A", 4, 8, 300, ("alice:1",))]
    world = World(stub, tmp_path / "e.sqlite", bursts, devices={"GPU-0": bursts, "GPU-1": []})
    meter = world.start_meter()
    world.run(9)
    assert set(meter.state()["refused_reports"]) == {"no_device"}
    assert "names none of them" in world.senders["A"].refused


def test_an_engine_on_another_gpu_gets_no_joules_of_this_one(stub, tmp_path):
    bursts = [Burst("A", 4, 8, 300, ("alice:1",))]
    settings = EnergySettings(source="nvml", devices=("GPU-1",))
    world = World(stub, tmp_path / "e.sqlite", bursts, settings, devices={"GPU-0": bursts, "GPU-1": []})
    world.recorders["A"].devices = ("GPU-0",)
    meter = world.start_meter()
    world.run(12)
    assert set(meter.state()["refused_reports"]) == {"other_device"}
    assert "runs on GPU-0, and measured are GPU-1" in world.senders["A"].refused
    assert world.totals(meter).credited_j == 0


def test_a_cpu_meter_is_every_engines(tmp_path, stub):
    world = World(stub, tmp_path / "e.sqlite", [Burst("A", 1, 2, 300)], EnergySettings(source="modelled"))
    world.recorders["A"].devices = ("GPU-0",)
    assert world.start_meter().report(world.recorders["A"].take()).refused is None


def test_idle_can_be_shared_by_residency(stub, tmp_path):
    settings = EnergySettings(source="nvml", idle_sharing="residency")
    world = World(stub, tmp_path / "e.sqlite", TWO_ENGINES, settings)
    world.recorders["A"].resident_bytes, world.recorders["B"].resident_bytes = 3, 1
    meter = world.start_meter()
    world.run(22)
    totals = world.totals(meter)
    idle = {share.name: share.idle_share_j for share in totals.by["engine"]}
    assert idle["A"] / idle["B"] == pytest.approx(3, rel=0.1)
    assert sum(idle.values()) == pytest.approx(totals.idle_j, rel=0.1)
    assert sum(share.energy_j for share in totals.by["engine"]) == pytest.approx(totals.credited_j)


def test_reports_that_cannot_be_believed_are_refused(world):
    meter = world.start_meter()
    good = world.recorders["A"].take()
    assert meter.report(replace(good, boot="another")).refused.startswith("other_host")
    for piece in (Slice(5, 4, 1, ()), Slice(4, 1e9, 1, ()), Slice(float("nan"), 4, 1, ())):
        assert meter.report(replace(good, slices=(piece,))).refused.startswith("garbage")
    assert meter.state()["refused_reports"] == {"other_host": 1, "garbage": 3}
    assert meter.report(good).refused is None


def test_a_ledger_that_cannot_be_written_is_waited_for(world, monkeypatch):
    meter = world.start_meter()
    world.run(5)
    write = meter._file.ledger.write

    def full(*rows):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(meter._file.ledger, "write", full)
    world.run(12)
    assert meter.state()["ledger"]["backlog"] >= 3
    assert "disk is full" in meter.state()["ledger"]["message"]
    assert meter.energy("alice:1").energy_j == pytest.approx(600, rel=0.02)
    monkeypatch.setattr(meter._file.ledger, "write", write)
    world.run(22)
    assert shares(world.totals(meter), "engine") == {n: pytest.approx(joules, rel=0.02) for n, joules in TRUE_J.items()}


def test_a_ledger_that_breaks_is_set_aside_and_serving_goes_on(world, monkeypatch):
    meter = world.start_meter()
    world.run(5)

    def broken(*rows):
        raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(meter._file.ledger, "write", broken)
    world.run(22)
    assert "set aside as energy.corrupt-" in meter.state()["ledger"]["message"]
    assert shares(world.totals(meter), "engine")["B"] == pytest.approx(TRUE_J["B"], rel=0.02)
    assert len(list(world.ledger_path.parent.glob("energy.corrupt-*.sqlite"))) == 1


def test_the_meter_takes_little_of_a_core(world):
    meter = world.start_meter()
    world.run(22)
    # 2 % of a core is the limit. Time is virtual here, so it is CPU time over the time played.
    assert 0 < meter.state()["cpu_share"] <= 0.02


def test_all_that_the_meters_thread_does_counts(world):
    meter = world.start_meter()
    world.run(2.0)
    before = meter.state()["cpu_share"]
    world.meter_cpu_s += 0.5  # an answer to someone
    assert meter.state()["cpu_share"] == pytest.approx(before + 0.25)


def test_reading_again_and_again_writes_no_more(world, monkeypatch):
    meter = world.start_meter()
    world.run(5.0)
    flushes = []
    flush = meter.flush
    monkeypatch.setattr(meter, "flush", lambda: flushes.append(flush()))
    for _ in range(10):
        world.totals(meter)
    assert len(flushes) <= 1


def test_an_overtaken_meter_rests(world):
    old = world.start_meter()
    world.run(3.0)
    world.start_meter()
    world.run(6.0)
    assert old.fenced is not None
    assert old.tick() >= 1.0
    old.catch_up()


def test_a_batch_of_a_stranger_without_slices_is_harmless(world):
    meter = world.start_meter()
    batch = ActivityBatch("X", "x", 0, 0.0, True, boot=world.recorders["A"].take().boot)
    assert meter.report(batch).refused is None
    world.run(2)
    assert world.totals(meter).credited_j == 0
