"""The small HTTP client against a socket that answers exactly these bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from fastserve._http import HttpClient, HttpError, SseLines

#: Pieces to write for each request on a connection; None closes it.
Answers = Sequence[Sequence[bytes] | None]


@asynccontextmanager
async def serving(*connections: Answers) -> AsyncIterator[tuple[str, list[bytes]]]:
    """One tuple of answers per connection, in order. Yields the URL and the heads of the requests seen."""
    seen: list[bytes] = []
    left = list(connections)

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in left.pop(0):
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head)
            if b"Content-Length: " in head:
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0]))
            for piece in answer or ():
                writer.write(piece)
                await writer.drain()
            if answer is None:
                break
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix/", seen


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_get_post_and_keep_alive() -> None:
    async with serving(([OK], [OK])) as (url, seen):
        client = HttpClient(url, {"Authorization": "Bearer k"})
        assert bytes((await client.send(client.payload("GET", "/v1/models"))).body) == b"hi"
        assert (await client.send(client.payload("POST", "/x", b"body"))).ok
        await client.close()
    assert seen[0].startswith(b"GET /prefix/v1/models HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer k\r\n" in seen[0]
    assert seen[1].startswith(b"POST /prefix/x HTTP/1.1\r\n")


@pytest.mark.parametrize("cut", [1, 3, 1000])
async def test_events_survive_any_cut(cut: int) -> None:
    body = b'data: {"a": 1}\n\n: comment\n\nevent: x\r\ndata:{"b": 2}\r\n\r\ndata: [DONE]\n\n'
    parts = [body[i : i + cut] for i in range(0, len(body), cut)]
    wire = CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"
    pieces = [wire[i : i + cut] for i in range(0, len(wire), cut)]
    got: list[bytes] = []
    async with serving((pieces,)) as (url, _):
        client = HttpClient(url)
        response = await client.send(client.payload("GET", "/"), SseLines(got.append).feed)
        await client.close()
    assert got == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]
    assert (response.status, bytes(response.body)) == (200, b"")


async def test_the_body_of_a_refusal_does_not_reach_the_sink() -> None:
    got: list[bytes] = []
    async with serving(([b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull"],)) as (url, _):
        client = HttpClient(url)
        response = await client.send(client.payload("GET", "/"), got.append)
        await client.close()
    assert (response.status, bytes(response.body), response.ok, got) == (429, b"full", False, [])


async def test_a_body_can_end_with_the_connection() -> None:
    async with serving(([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhi"],)) as (url, _):
        client = HttpClient(url)
        assert bytes((await client.send(client.payload("GET", "/"))).body) == b"hi"


async def test_a_kept_connection_that_closes_unanswered_is_replaced() -> None:
    async with serving(([OK], None), ([OK],)) as (url, seen):
        client = HttpClient(url)
        for _ in range(2):
            assert (await client.send(client.payload("GET", "/"))).ok
        await client.close()
    assert len(seen) == 3  # the second request was written twice


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "closed the connection"),
        ([CHUNKED + b"5\r\nhal"], "closed the connection"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi"], "closed the connection"),
        ([b"SSH-2.0-OpenSSH\r\n"], "Http"),
    ],
)
async def test_broken_answers(answer: Sequence[bytes] | None, said: str) -> None:
    async with serving((answer,)) as (url, _):
        client = HttpClient(url)
        with pytest.raises(HttpError, match=said):
            await client.send(client.payload("GET", "/"))


async def test_nobody_listening() -> None:
    client = HttpClient("http://127.0.0.1:1")
    with pytest.raises(HttpError, match="cannot connect"):
        await client.send(client.payload("GET", "/"))


async def test_cancelling_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b""
        closed.set()
        writer.close()

    async with await asyncio.start_server(on_connection, "127.0.0.1", 0) as server:
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.send(client.payload("GET", "/"))
        await asyncio.wait_for(closed.wait(), 10)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", ""])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected http"):
        HttpClient(url)


@pytest.mark.parametrize("make", [lambda: {"X-A": "b\r\nX-C: d"}, lambda: {"X\n": "b"}])
def test_headers_cannot_be_smuggled(make: Callable[[], dict[str, str]]) -> None:
    with pytest.raises(ValueError, match="control characters"):
        HttpClient("http://localhost", make())
