"""An HTTP proxy before a store's server, which harms chosen requests: ``with FaultProxy(server.port) as proxy: ...``.

It understands requests whole (``Content-Length``, chunked bodies, ``Expect: 100-continue``), so that a fault can be
aimed at one operation. Connections to the server are never shared between requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["status", "reset", "reset_reading", "lost", "black_hole", "stop_reading", "flip", "delay"]
_PIECE = 64 << 10


@dataclass
class Fault:
    """What happens to requests that match.

    Attributes:
        kind: ``status`` answers with ``code`` without forwarding; ``reset`` cuts the connection after ``after`` bytes
            of the request's body; ``reset_reading`` after ``after`` bytes of the answer's; ``lost`` forwards the
            request and cuts the connection instead of answering; ``black_hole`` reads the request and never answers;
            ``stop_reading`` reads ``after`` bytes of the body and no more; ``flip`` changes a bit of the body on its
            way to the server; ``delay`` waits ``seconds`` first.
        method: The method, or several with ``|`` between; empty for any.
        target: A regular expression that is searched for in the path and query.
        least: Bytes that the body has at least.
        skip: Matching requests to let through first.
        times: How many requests it happens to.
    """

    kind: Kind
    method: str = ""
    target: str = ""
    least: int = 0
    skip: int = 0
    times: float = 1
    code: int = 503
    body: bytes = b""
    after: int = 0
    seconds: float = 0.0
    met: int = field(default=0, init=False)

    def meets(self, request: Request) -> bool:
        if self.method and request.method not in self.method.split("|"):
            return False
        if re.search(self.target, request.target) is None or request.length < self.least:
            return False
        self.met += 1
        return self.skip < self.met <= self.skip + self.times


@dataclass
class Request:
    """One request as the proxy met it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    length: int
    chunked: bytes | None = None
    counted: bool = False
    fault: str | None = None
    status: int | None = None

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")


class FaultProxy:
    """A proxy on 127.0.0.1.

    Attributes:
        port: Where it listens, by default a free port.
        faults: What is to happen. May be changed at any time.
        log: Every request, in order of arrival.
        held: Connections that a fault holds now, or whose client hasn't ended them.
        busy, most_busy: Requests whose body has at least ``counted_from`` bytes that it is at work on, now and at most.
        latency: Seconds before each request is forwarded.
        bytes_per_second: Limit for each connection and direction; 0 for none.
    """

    def __init__(
        self,
        server_port: int,
        *faults: Fault,
        latency: float = 0.0,
        bytes_per_second: float = 0.0,
        port: int = 0,
    ) -> None:
        self.port = port
        self.faults = list(faults)
        self.log: list[Request] = []
        self.held = 0
        self.busy = self.most_busy = self.counted_from = 0
        self.latency = latency
        self.bytes_per_second = bytes_per_second
        self._server_port = server_port
        self._tasks: set[asyncio.Task[Any] | None] = set()  # a loop holds its tasks weakly
        self._released = False

    def __enter__(self) -> FaultProxy:
        listening = socket.create_server(("127.0.0.1", self.port))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _PIECE)  # else a body goes into it unseen
        self.port = listening.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, sock=listening, limit=_PIECE))
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def until(self, condition: Callable[[FaultProxy], bool], seconds: float = 10.0) -> bool:
        """Wait until ``condition`` holds; whether it did in time."""
        deadline = time.monotonic() + seconds
        while not condition(self):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _close(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(asyncio.current_task())
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether another may follow on this connection."""
        start, headers = await _head(reader)
        if not start:
            return False
        method, target, _ = start.split(" ", 2)
        request = Request(method, target, headers, 0)
        if request.header("expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in request.header("transfer-encoding").lower():
            request.chunked = await _chunked(reader)
            request.length = len(request.chunked)
        else:
            request.length = int(request.header("content-length") or 0)
        fault = next((fault for fault in self.faults if fault.meets(request)), None)
        request.fault = fault.kind if fault else None
        self.log.append(request)
        request.counted = request.length >= self.counted_from
        self.busy += request.counted
        self.most_busy = max(self.busy, self.most_busy)
        try:
            return await self._meet(request, fault, reader, writer)
        finally:
            self._over(request)

    def _over(self, request: Request) -> None:
        self.busy -= request.counted
        request.counted = False

    async def _meet(
        self, request: Request, fault: Fault | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        kind = fault.kind if fault else None
        body = self._body(reader, request)
        if fault is not None and kind in ("reset", "stop_reading", "black_hole", "status"):
            most = fault.after if kind in ("reset", "stop_reading") else request.length
            async for piece in body:
                most -= len(piece)
                if most <= 0 and kind != "status":
                    break
            if kind == "reset":
                return _reset(writer)
            if kind != "status":
                await self._hold(reader, writer)
                return False
            request.status = fault.code
            head = f"HTTP/1.1 {fault.code} Fault\r\nContent-Length: {len(fault.body)}\r\nContent-Type: text/plain\r\n"
            writer.write(f"{head}\r\n".encode() + (b"" if request.method == "HEAD" else fault.body))
            await writer.drain()
            return True
        if fault is not None and kind == "delay":
            await asyncio.sleep(fault.seconds)
        if kind == "flip":
            body = _flipped(body, request.length * 3 // 4)
        if self.latency:
            await asyncio.sleep(self.latency)
        status, answered, answer = await self._forward(request, body)
        request.status = int(status.split(" ")[1])
        self._over(request)  # once it is answered, the client may send the next one
        if kind == "lost":
            return _reset(writer)
        empty = request.method == "HEAD" or request.status in (204, 304)
        writer.write(_encode(status, answered, None if empty else len(answer)))
        if fault is not None and kind == "reset_reading":
            writer.write(answer[: fault.after])
            await writer.drain()
            return _reset(writer)
        await self._paced(writer, answer)
        await writer.drain()
        return True

    async def _forward(self, request: Request, body: AsyncIterator[bytes]) -> tuple[str, list[tuple[str, str]], bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port, limit=1 << 20)
        try:
            headers = [(key, value) for key, value in request.headers if key.lower() not in ("expect", "connection")]
            headers.append(("Connection", "close"))
            start = f"{request.method} {request.target} HTTP/1.1"
            has_body = request.length or request.method in ("PUT", "POST", "PATCH")
            writer.write(_encode(start, headers, request.length if has_body else None))
            async for piece in body:
                writer.write(piece)
                await writer.drain()
            status, answered = await _head(reader)
            if not status:
                raise ConnectionResetError("the server closed the connection")
            code = int(status.split(" ")[1])
            empty = request.method == "HEAD" or code in (204, 304)
            return status, answered, b"" if empty else await _whole_body(reader, answered)
        finally:
            writer.close()

    async def _body(self, reader: asyncio.StreamReader, request: Request) -> AsyncIterator[bytes]:
        """The request's body piece by piece, no faster than the limit allows."""
        if request.chunked is not None:
            yield request.chunked
            return
        left = request.length
        while left:
            piece = await reader.read(min(left, _PIECE))
            if not piece:
                raise EOFError
            left -= len(piece)
            yield piece
            if self.bytes_per_second:
                await asyncio.sleep(len(piece) / self.bytes_per_second)

    async def _paced(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if not self.bytes_per_second:
            writer.write(data)
            return
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(len(piece) / self.bytes_per_second)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do nothing until the client is gone, or `release`; then wait for the client's end."""
        connection = writer.get_extra_info("socket")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        self.held += 1
        established = 1
        while not self._released and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == established:
            await asyncio.sleep(0.02)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            while await reader.read(_PIECE):
                pass
        self.held -= 1

    def release(self) -> None:
        """Read again: of a client that is gone there is no more to see than its end."""
        self._released = True


async def _head(reader: asyncio.StreamReader) -> tuple[str, list[tuple[str, str]]]:
    """The first line and the headers of a message; an empty line where the connection ended."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return "", []
    start, *lines = text.rstrip("\r\n").split("\r\n")
    if re.match(r"HTTP/1\.\d 100 ", start):
        return await _head(reader)
    return start, [(key, value.strip()) for key, _, value in (line.partition(":") for line in lines)]


async def _whole_body(reader: asyncio.StreamReader, headers: list[tuple[str, str]]) -> bytes:
    names = {key.lower(): value for key, value in headers}
    if "chunked" in names.get("transfer-encoding", "").lower():
        return await _chunked(reader)
    if "content-length" in names:
        return await reader.readexactly(int(names["content-length"]))
    return await reader.read()


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    pieces = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # trailers
    return b"".join(pieces)


async def _flipped(body: AsyncIterator[bytes], place: int) -> AsyncIterator[bytes]:
    async for piece in body:
        if 0 <= place < len(piece):
            changed = bytearray(piece)
            changed[place] ^= 0x10
            piece = bytes(changed)
        place -= len(piece)
        yield piece


def _encode(start: str, headers: list[tuple[str, str]], length: int | None) -> bytes:
    """The head of a message whose body has ``length`` bytes; None leaves its headers as they are."""
    dropped = () if length is None else ("transfer-encoding", "content-length")
    lines = [f"{key}: {value}" for key, value in headers if key.lower() not in dropped]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([start, *lines, "", ""]).encode("latin-1")


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Cut the connection with a reset, not an orderly end."""
    with contextlib.suppress(OSError):
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
