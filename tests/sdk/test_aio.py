"""The asyncio client: what differs from the blocking one, above all cancellation."""

import asyncio

import grpc
import pytest

import fastserve
from fastserve import AsyncClient, RetryPolicy

from .conftest import RunningFake, endless, fails, tokens

FAST_RETRY = RetryPolicy(max_attempts=3, initial_backoff_s=0.001, max_backoff_s=0.002)
GONE_S = 10


def make(server: RunningFake) -> AsyncClient:
    return AsyncClient(server.address, retry=FAST_RETRY)


async def ended(server: RunningFake, calls: int = 1) -> bool:
    for _ in range(calls):
        if not await asyncio.to_thread(server.fake.ended.acquire, True, GONE_S):
            return False
    return True


async def test_generate_and_stream(server: RunningFake) -> None:
    server.fake.script = tokens("a", "b")
    async with make(server) as client:
        assert (await client.generate("hi")).finish.reason == "length"
        chunks = [chunk async for chunk in client.stream("hi")]
    assert [c.text for c in chunks] == ["a", "b"]
    assert chunks[-1].usage == fastserve.Usage(5, 2)


async def test_the_small_calls(server: RunningFake) -> None:
    async with make(server) as client:
        assert await client.abort("live")
        assert (await client.model_info()).policy == "fcfs"
        assert await client.tokenize("ab") == [97, 98]
        assert await client.detokenize([97, 98]) == "ab"


async def test_unavailable_is_retried_and_what_was_heard_is_not_asked_for_again(server: RunningFake) -> None:
    unavailable = grpc.StatusCode.UNAVAILABLE
    async with make(server) as client:
        server.fake.script = fails(2, unavailable, tokens("a"))
        stream = client.stream("hi")
        assert [c.text async for c in stream] == ["a"]
        assert stream.request_id == server.fake.requests[-1].request_id
        assert len(server.fake.requests) == 3

        server.fake.script = fails(1, unavailable, tokens("a", "b"), after=1)
        stream = client.stream("hi")
        assert (await anext(stream)).text == "a"
        assert (await anext(stream)).text == "a", "this server says the same again"
        first, again = server.fake.requests[3:]
        assert first.request_id == again.request_id == stream.request_id
        assert list(again.delivered.ids) == [0]
        await stream.aclose()

        server.fake.script = fails(1, unavailable, tokens("a", "b"), after=1)
        stream = client.stream("hi", n=2)
        assert (await anext(stream)).text == "a"
        with pytest.raises(fastserve.UnavailableError):
            await anext(stream)
        assert len(server.fake.requests) == 6, "several answers do not go on"

        server.fake.script = fails(99, unavailable, tokens("a"))
        with pytest.raises(fastserve.UnavailableError):
            await client.generate("hi")


async def test_typed_errors(server: RunningFake) -> None:
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    server.fake.script = fails(99, full, tokens("x"), trailers=(("retry-after-ms", "250"),))
    async with make(server) as client:
        with pytest.raises(fastserve.ResourceExhaustedError) as caught:
            await client.generate("hi")
        assert caught.value.retry_after_s == 0.25
        with pytest.raises(fastserve.ResourceExhaustedError):
            await anext(client.stream("hi"))


async def test_the_deadline_ends_the_call_on_both_sides(server: RunningFake) -> None:
    server.fake.script = endless
    async with make(server) as client:
        stream = client.stream("hi", timeout=0.2)
        await anext(stream)
        with pytest.raises(TimeoutError):
            await anext(stream)
    assert await ended(server)


async def test_leaving_the_block_aborts(server: RunningFake) -> None:
    server.fake.script = endless
    async with make(server) as client:
        async with client.stream("hi") as stream:
            await anext(stream)
        assert await ended(server)
        assert [chunk async for chunk in stream] == []


async def test_cancelling_the_task_aborts(server: RunningFake) -> None:
    server.fake.script = endless
    got_one = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream("hi"):
            got_one.set()

    async with make(server) as client:
        task = asyncio.create_task(read())
        await got_one.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await ended(server)


async def test_cancelling_a_waiting_generate_aborts(server: RunningFake) -> None:
    server.fake.script = endless
    async with make(server) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.generate("hi")
        assert await ended(server)


async def test_another_task_can_close_a_waiting_stream(server: RunningFake) -> None:
    server.fake.script = endless
    async with make(server) as client:
        stream = client.stream("hi")
        await anext(stream)
        waiting = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)  # let it wait on the call
        await stream.aclose()
        assert await waiting is None
        assert await ended(server)


async def test_closing_the_client_ends_its_streams(server: RunningFake) -> None:
    server.fake.script = endless
    client = make(server)
    stream = client.stream("hi")
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)  # let it wait on the call
    await client.close()
    with pytest.raises(fastserve.AbortedError):
        await waiting
    assert await ended(server)


async def test_many_cancelled_streams_leave_no_task_behind(server: RunningFake) -> None:
    """grpc #22874: calls that were cancelled at any point must not leave tasks that wait for ever."""
    server.fake.script = tokens(*"abcdefgh")
    async with make(server) as client:
        await client.model_info()
        before = len(asyncio.all_tasks())

        async def read(stop_after: int) -> None:
            async with client.stream("hi") as stream:
                for _ in range(stop_after):
                    await anext(stream)

        tasks = [asyncio.create_task(read(i % 8)) for i in range(100)]
        for task in tasks[::3]:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        async with asyncio.timeout(GONE_S):
            while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - nothing announces the end of a task
                await asyncio.sleep(0.01)
