"""The lease is granted in order, to one at a time, and a dead holder does not keep it."""

import asyncio
import subprocess
import sys

import psutil
import pytest

from app.config import load_settings
from app.device import Device, Holder, HolderGone, Lease, leased


async def test_one_at_a_time_in_the_order_of_asking():
    lease, here = Lease(), Holder.here("first")
    others = [Holder(name, here.pid, here.created_s) for name in ("second", "third")]
    await lease.acquire(here)
    granted = []

    async def take(holder):
        await lease.acquire(holder)
        granted.append(holder.name)
        await lease.release(holder)

    tasks = [asyncio.create_task(take(holder)) for holder in others]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert granted == []
    await lease.release(here)
    await asyncio.gather(*tasks)
    assert granted == ["second", "third"]
    assert lease.holder is None


def holder_to_kill(monkeypatch):
    """A process, and the holder that it is; who waits looks after it often."""
    monkeypatch.setattr("app.device._LOOK_AT_HOLDER_EVERY_S", 0.01)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    return child, Holder("dying", child.pid, psutil.Process(child.pid).create_time())


async def test_the_lease_of_a_killed_holder_is_taken_back(monkeypatch):
    child, dying = holder_to_kill(monkeypatch)
    lease, next_one = Lease(), Holder.here("next")
    await lease.acquire(dying)
    waiting = asyncio.create_task(lease.acquire(next_one))
    child.kill()
    child.wait()
    await asyncio.wait_for(waiting, 5)
    assert lease.holder == next_one


async def test_a_waiter_that_dies_stops_waiting(monkeypatch):
    child, dying = holder_to_kill(monkeypatch)
    lease, first = Lease(), Holder.here("first")
    await lease.acquire(first)
    waiting = asyncio.create_task(lease.acquire(dying))
    await asyncio.sleep(0)
    child.kill()
    child.wait()
    with pytest.raises(HolderGone, match="dying"):
        await asyncio.wait_for(waiting, 5)
    await lease.release(first)
    assert lease.holder is None


class PlayedLease:
    """A device's handle whose actor is replaced while the lease is held."""

    def __init__(self, release):
        self.acquire, self.release = self, release

    async def remote(self, holder):
        return "reading"


class Refuses:
    async def remote(self, holder):
        raise ConnectionError("the actor died")


class Hangs:
    async def remote(self, holder):
        await asyncio.Event().wait()


@pytest.mark.parametrize("release", [Refuses(), Hangs()])
async def test_a_device_that_is_gone_undoes_nothing(monkeypatch, release):
    monkeypatch.setattr("app.device._RELEASE_WITHIN_S", 0.01)
    async with leased(PlayedLease(release), Holder.here("fp16")) as reading:
        assert reading == "reading"
    with pytest.raises(ValueError, match="its own"):
        async with leased(PlayedLease(release), Holder.here("fp16")):
            raise ValueError("its own")


async def test_releasing_what_one_does_not_hold_changes_nothing():
    lease, here = Lease(), Holder.here("holder")
    await lease.acquire(here)
    await lease.release(Holder("stranger", 1, 0.0))
    assert lease.holder == here


def test_a_reused_process_id_is_not_the_holder():
    here = Holder.here("me")
    assert here.alive()
    assert not Holder("me", here.pid, here.created_s - 1).alive()


async def test_the_first_engine_of_the_configuration_goes_first():
    device, here = Device(load_settings({"preset": "cpu"})), Holder.here("gptq")
    granted = []

    async def take(holder):
        await device.acquire(holder)
        granted.append(holder.name)
        await device.release(holder)

    others = [asyncio.create_task(take(Holder(name, here.pid, here.created_s))) for name in ("gptq", "int8")]
    await asyncio.sleep(0.01)
    assert granted == []
    await take(Holder("fp16", here.pid, here.created_s))
    await asyncio.gather(*others)
    assert granted == ["fp16", "gptq", "int8"]


async def test_the_others_do_not_wait_for_a_first_engine_that_does_not_come(monkeypatch):
    monkeypatch.setattr("app.device._WAIT_FOR_FIRST_S", 0.01)
    device = Device(load_settings({"preset": "cpu"}))
    reading = await asyncio.wait_for(device.acquire(Holder.here("gptq")), 5)
    assert 0 < reading.free_bytes < reading.total_bytes
