"""Connections on which nothing is asked: they end, and do not keep others from being answered."""

import asyncio

import pytest
import uvicorn

from fedprotip.serve import connections
from fedprotip.serve.limits import Limits
from fedprotip.serve.server import Server


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@pytest.fixture
def told():
    """told(work, seconds): what work(address) brings back from a server that waits so long."""

    def run(work, seconds):
        async def main():
            protocol = connections.connection(Limits(seconds=seconds))
            server = Server(uvicorn.Config(hello, port=0, http=protocol, lifespan="off", log_level="critical"))
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                return await asyncio.wait_for(work(server.servers[0].sockets[0].getsockname()), 60)
            finally:
                server.should_exit = True
                await serving

        return asyncio.run(main())

    return run


async def ended(reader):
    """Whether the other end has closed it; what it said before is read."""
    try:
        while await reader.read(1000):
            pass
    except ConnectionError:
        pass
    return True


REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHo", REQUEST + b"GET / HT", REQUEST + REQUEST[:-2]])
def test_who_begins_no_request_is_not_waited_for(told, sent):
    async def work(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        found = await ended(reader)
        writer.close()
        return found

    assert told(work, 0.2)


def test_a_head_that_trickles_in_has_no_more_time(told):
    async def work(address):
        reader, writer = await asyncio.open_connection(*address)
        waiting = asyncio.create_task(ended(reader))
        writer.write(b"GET / HTTP/1.1\r\n")
        while not waiting.done():
            writer.write(b"a: b\r\n")
            await asyncio.sleep(0.01)
        writer.close()
        return waiting.result()

    assert told(work, 0.2)


def test_where_too_many_wait_the_oldest_makes_room(told, monkeypatch):
    monkeypatch.setattr(connections, "WAITING", 2)

    async def work(address):
        lines = [await asyncio.open_connection(*address) for _ in range(4)]
        closed = [await ended(reader) for reader, _ in lines[:2]]
        reader, writer = lines[3]
        writer.write(REQUEST)
        said = await reader.readuntil(b"hi")
        for _, writer in lines:
            writer.close()
        return closed, said

    closed, said = told(work, 60)
    assert closed == [True, True]
    assert said.startswith(b"HTTP/1.1 200")


def test_a_head_without_end_is_refused(told):
    async def work(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nlong: " + b"a" * 200_000)
        said = await reader.read(100)
        writer.close()
        return said

    assert told(work, 60).startswith(b"HTTP/1.1 400")
