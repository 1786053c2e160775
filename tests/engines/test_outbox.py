"""Nothing is lost or reordered between an engine and its one reader, and what is ready travels together."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from app.engines.outbox import Outbox, Stream


async def collect(outbox, until_closed):
    texts, closed, messages = {}, set(), 0
    async for message in outbox.messages():
        messages += 1
        for key, text, last, *_ in message.frames:
            assert key not in closed
            texts[key] = texts.get(key, "") + text
            if last:
                closed.add(key)
        if closed == until_closed:
            return texts, messages
    return None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_every_frame_arrives_once_and_in_order(script):
    async def scenario():
        outbox = Outbox()
        streams = {key: Stream(str(key)) for key in range(4)}
        sent = {str(key): "" for key in range(4)}
        received = {}
        for stream in streams.values():
            outbox.put(stream, "<")
            received[stream.key] = outbox.begin(stream).frames
        reading = asyncio.create_task(collect(outbox, set(sent)))
        for index, (key, turns) in enumerate(script):
            outbox.put(streams[key], f"{index};")
            sent[str(key)] += f"{index};"
            for _ in range(turns):
                await asyncio.sleep(0)
        for stream in streams.values():
            outbox.put(stream, "", last=True)
        texts, _ = await reading
        assert {key: received[key] + texts[key] for key in sent} == {key: "<" + text for key, text in sent.items()}

    asyncio.run(scenario())


async def test_frames_of_one_step_share_a_message():
    outbox = Outbox()
    streams = [Stream(str(i)) for i in range(8)]
    for stream in streams:
        outbox.put(stream, "first")
        outbox.begin(stream)
    messages = outbox.messages()
    reading = asyncio.create_task(anext(messages))
    await asyncio.sleep(0)
    for stream in streams:
        outbox.put(stream, "token")
    assert [frames.text for frames in (await reading).frames] == ["token"] * 8


def test_what_is_ready_before_the_start_goes_with_it():
    outbox, stream = Outbox(), Stream("a")
    for text in ("role", "first"):
        outbox.put(stream, text)
    outbox.put(stream, "", last=True)
    started = outbox.begin(stream)
    assert (started.frames, started.last) == ("rolefirst", True)


async def test_an_aborted_stream_sends_nothing_more():
    outbox, stream, other = Outbox(), Stream("a"), Stream("b")
    for each in (stream, other):
        outbox.put(each, "x")
        outbox.begin(each)
        outbox.put(each, "y")
    outbox.drop("a")
    message = await anext(outbox.messages())
    assert [frames.key for frames in message.frames] == ["b"]
