"""The controller's replica: files once the hardware is known, live settings that are kept when they are bad."""

import asyncio
import json
import sqlite3

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from app.config import load_settings
from app.controller import deployment
from app.controller.deployment import Controller
from app.device import Reading
from app.energy.queries import PastRow
from app.routing.classes import Shape
from app.routing.tags import Tag
from app.telemetry import NoTelemetry
from app.wire import Endpoint
from tests.controller.conftest import PlayedEngine
from tests.routing.conftest import profile_content


class PlayedDevice:
    """Stands where the device's handle stands."""

    def __init__(self):
        self.known = asyncio.Event()
        self.reading = Reading(7, 10)

        class Identify:
            async def remote(_):
                await self.known.wait()
                return "box"

        class Read:
            async def remote(_):
                if isinstance(self.reading, Exception):
                    raise self.reading
                return self.reading or await asyncio.sleep(60)

        self.identify, self.read = Identify(), Read()


class PlayedMeter:
    """Stands where the meter's handle stands; tells of the past once it is there."""

    def __init__(self):
        self.there = asyncio.Event()
        self.rows = []
        self.asked = []

        class Past:
            async def remote(_, model, limit):
                self.asked.append((model, limit))
                await self.there.wait()
                if isinstance(self.rows, Exception):
                    raise self.rows
                return self.rows

        self.past = Past()


@pytest.fixture
async def device():
    return PlayedDevice()


@pytest.fixture
async def meter():
    return PlayedMeter()


@pytest.fixture
async def start(device, meter, monkeypatch):
    monkeypatch.setattr(deployment, "RayTelemetry", lambda table: NoTelemetry())
    monkeypatch.setattr(deployment, "_READ_DEVICE_EVERY_S", 0.01)
    started = []

    def make(**args):
        settings = load_settings({"preset": "cpu", "knowledge": {"profile": None}, **args})
        handles = {spec.name: PlayedEngine(spec.name) for spec in settings.engine_specs}
        started.append(Controller(settings, handles, device, meter))
        return started[-1]

    yield make
    for controller in started:
        for task in controller._running:
            task.cancel()


async def until(condition):
    async with asyncio.timeout(2):
        while not condition():
            await asyncio.sleep(0.005)


async def test_what_needs_files_decides_once_they_are_read(start, device):
    controller = start(live={"policy": "static:int8", "shadows": ["rules"]})
    router = controller._service.router
    assert router.live.policy == "cost"
    device.known.set()
    await until(lambda: router.live.policy == "static:int8")
    assert router.policies.knowledge.hardware == "box"
    await until(lambda: router.device_bytes == (10, 7))


@pytest.mark.parametrize("reading", [ConnectionError("it is gone"), None])
async def test_memory_of_a_device_that_tells_nothing_more_is_unknown(start, device, monkeypatch, reading):
    monkeypatch.setattr(deployment, "_READ_DEVICE_WITHIN_S", 0.02)
    monkeypatch.setattr(deployment, "_ASK_AGAIN_AFTER_S", 0.01)
    router = start()._service.router
    device.known.set()
    await until(lambda: router.device_bytes == (10, 7))
    assert router.snapshot(0.0).device_free_share() == 0.7
    device.reading = reading
    await until(lambda: router.device_bytes == (None, None))
    assert router.snapshot(0.0).device_free_share() is None
    device.reading = Reading(3, 10)
    await until(lambda: router.device_bytes == (10, 3))


async def test_a_policy_without_its_file_leaves_cost_and_says_why(start, device):
    controller = start(live={"policy": "learned"})
    device.known.set()
    await until(lambda: controller._service.settings_error)
    assert "trained model" in controller._service.settings_error
    assert controller._service.router.live.policy == "cost"


async def test_the_meter_is_told_what_the_profile_measured(start, device, tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile_content(model="embedded")))
    told = []
    controller = start(knowledge={"profile": str(file)})
    controller._weights.put = lambda tokens, watts: told.append((tokens, watts))
    device.known.set()
    await until(lambda: told)
    ((tokens, watts),) = told
    assert tokens.keys() == watts.keys() == {"fp16", "int8", "gptq", "speculative"}


def past_row(conversation, mode="int8"):
    features = b'{"tag":"code","prompt_shape":"short","max_tokens":500,"sequences":1}'
    decision = json.dumps({"conversation": [conversation, f"{conversation} on"]}).encode()
    return PastRow(100.0, mode, "ok", features, decision, b'{"usage":{"output_tokens":9,"accepted_tokens":0}}')


async def test_a_controller_serves_at_once_and_learns_from_the_ledger_when_the_meter_is_there(
    start, device, meter, caplog
):
    caplog.set_level("INFO", logger="ray.serve")
    controller = start()
    router = controller._service.router
    device.known.set()
    await until(lambda: controller._knows_hardware and meter.asked)
    assert meter.asked == [("embedded", 1000)]
    meter.rows = [past_row("a"), past_row("b")._replace(outcome=b"{"), past_row("c", "awq"), past_row("d", "fp16")]
    meter.there.set()
    await until(lambda: "learned again" in caplog.text)
    (line,) = [record for record in caplog.records if "learned again" in record.getMessage()]
    assert line.levelname == "WARNING"
    told = "from 2 earlier requests; passed over: 1 of modes not deployed, 1 damaged rows"
    assert line.getMessage().endswith(told)
    assert [router._conversations.weights(name) for name in ("a", "a on", "b", "c", "d")] == [
        "int8", "int8", None, None, "fp16",
    ]  # fmt: skip
    assert router._lengths.predict(Tag.CODE, Shape.SHORT, 500).tokens == 9


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (sqlite3.OperationalError("Traceback\n  a line\nunable to open"), "OperationalError: unable to open"),
        (TimeoutError(), "TimeoutError"),
        ([("no", "row")], "AttributeError"),
        (None, "TimeoutError"),
    ],
)
async def test_a_past_that_cannot_be_had_is_told_in_one_line_and_serving_goes_on(
    start, device, meter, monkeypatch, caplog, rows, why
):
    monkeypatch.setattr(deployment, "_REMEMBER_WITHIN_S", 0.05)
    meter.rows = rows
    if rows is not None:
        meter.there.set()
    controller = start()
    device.known.set()
    await until(lambda: "learned again" in caplog.text)
    (line,) = [record.getMessage() for record in caplog.records if "learned again" in record.getMessage()]
    assert why in line
    assert "\n" not in line
    await until(lambda: controller._knows_hardware)
    controller.reconfigure({"policy": "static:int8"})
    assert controller._service.router.live.policy == "static:int8"


async def test_tokens_are_counted_once_the_model_is_prepared(start, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(deployment, "_LOOK_FOR_TOKENIZER_EVERY_S", 0.01)
    model = tmp_path / "model"
    reader = start(model={"reference": str(model)})._service._prompts
    body = {"prompt": "one two three"}
    await until(lambda: "holds no model" in caplog.text)
    assert not (await reader.read(Endpoint.COMPLETION, body)).exact
    model.mkdir()
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text("{}")
    (model / "config.json").write_text("{}")
    await until(lambda: reader.tokenizer is not None)
    prompt = await reader.read(Endpoint.COMPLETION, body)
    assert (prompt.tokens, prompt.exact) == (3, True)
    assert caplog.text.count("holds no model") == 1


async def test_user_config_is_taken_or_refused(start, device):
    controller = start()
    service = controller._service
    device.known.set()
    await until(lambda: controller._knows_hardware)
    controller.reconfigure({"policy": "rules", "queue_limit": 5})
    assert (service.router.live.policy, service.router.live.queue_limit) == ("rules", 5)
    for bad in (
        {"policy": "fastest"},
        {"policy": "static:awq"},
        {"queue_limit": 0},
        {"routing": {"kv_pressure": 7}},
        {"routing": {"accepted_modes": ["int-8"]}},
        {"routing": {"reference_mode": "fp61"}},
        {"unknown": 1},
    ):
        controller.reconfigure(bad)
        assert service.settings_error
        assert service.router.live.policy == "rules"
    controller.reconfigure({"routing": {"accepted_modes": ["int8", "awq"]}})
    assert service.router.live.routing.accepted_modes == {"int8", "awq"}
    controller.reconfigure({})
    assert (service.router.live.policy, service.settings_error) == ("cost", None)


async def test_user_config_that_was_refused_before_the_files_came_is_still_told(start, device):
    controller = start(live={"policy": "static:fp16"})
    controller.reconfigure({"queue_limit": 0})
    device.known.set()
    await until(lambda: controller._service.router.live.policy == "static:fp16")
    assert "queue_limit" in controller._service.settings_error
    controller.reconfigure({"queue_limit": 9})
    assert (controller._service.router.live.queue_limit, controller._service.settings_error) == (9, None)


async def test_user_config_that_comes_before_the_files_is_taken_with_them(start, device):
    controller = start()
    controller.reconfigure({"policy": "static:fp16"})
    device.known.set()
    await until(lambda: controller._service.router.live.policy == "static:fp16")
