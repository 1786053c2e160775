"""Writing to a client, and stopping the work when it leaves."""

import asyncio

import pytest

from app.controller.streaming import ClientGone, EventStream, unless_gone


class Client:
    """The other end of an ASGI connection."""

    def __init__(self):
        self.sent = []
        self.gone = asyncio.Event()

    async def send(self, message):
        self.sent.append(message)

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def text(self):
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def test_all_frames_are_written_and_the_stream_is_closed():
    async def source():
        for text in ("a", "b"):
            yield text

    client = Client()
    await EventStream(source(), {"x-modeswitch-mode": "fp16"})({}, client.receive, client.send)
    headers = dict(client.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"x-modeswitch-mode"] == b"fp16"
    assert b"content-length" not in headers
    assert client.text == "ab"
    assert client.sent[-1]["more_body"] is False


async def test_the_source_is_closed_when_the_client_leaves():
    closed = asyncio.Event()

    async def source():
        try:
            yield "a"
            await asyncio.sleep(60)
        finally:
            closed.set()

    client = Client()
    writing = asyncio.create_task(EventStream(source(), {})({}, client.receive, client.send))
    await asyncio.sleep(0.01)
    client.gone.set()
    await asyncio.wait_for(writing, 1)
    assert closed.is_set()


async def test_work_is_cancelled_when_the_client_leaves():
    client, cancelled = Client(), asyncio.Event()

    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    waiting = asyncio.create_task(unless_gone(client.receive, work()))
    await asyncio.sleep(0.01)
    client.gone.set()
    with pytest.raises(ClientGone):
        await waiting
    assert cancelled.is_set()


@pytest.mark.parametrize("ends", ["before", "after"])
async def test_a_result_that_comes_as_the_caller_is_cancelled_is_discarded(ends):
    discarded = []

    async def discard(result):
        discarded.append(result)

    async def work():
        if ends == "before":
            asyncio.get_running_loop().call_soon(waiting.cancel)
        else:
            asyncio.current_task().add_done_callback(lambda _: waiting.cancel())
        return "a stream"

    waiting = asyncio.create_task(unless_gone(Client().receive, work(), discard))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert discarded == ["a stream"]


async def test_a_result_and_a_fault_pass_through():
    async def fault():
        raise KeyError("x")

    assert await unless_gone(Client().receive, asyncio.sleep(0, "done")) == "done"
    with pytest.raises(KeyError):
        await unless_gone(Client().receive, fault())


async def test_the_source_is_told_even_if_the_client_left_before_the_first_frame():
    closed = asyncio.Event()

    async def source():
        try:
            yield "a"
        finally:
            closed.set()

    async def broken(message):
        raise ConnectionResetError("the client is gone")

    with pytest.raises(ConnectionResetError):
        await EventStream(source(), {})({}, Client().receive, broken)
    assert closed.is_set()
