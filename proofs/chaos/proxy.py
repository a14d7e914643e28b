"""A TCP proxy before the box that breaks connections, also in the middle of a body."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
import time
from contextlib import suppress

PIECE_BYTES = 16 * 1024
# A closed socket with this option sends RST: the other side reads "connection reset".
RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Passes bytes between users and a port of this machine, in a thread of its own.

    Attributes:
        port: where it listens.
        num_cut: connections that it has broken.
    """

    def __init__(self, to_port: int) -> None:
        self.num_cut = 0
        self._to_port = to_port
        self._open: set[asyncio.StreamWriter] = set()
        # The bytes that may still pass before the connection that carries the next one is broken.
        self._allowance: int | None = None
        self._loop = asyncio.new_event_loop()
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(listening.getsockname()[1])
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, sock=listening)
        )
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut_all(self) -> int:
        """Break every open connection; return how many there were."""
        return asyncio.run_coroutine_threadsafe(self._cut_all(), self._loop).result()

    def cut_after(self, num_bytes: int, *, within_s: float) -> bool:
        """Break the connection that carries the byte after `num_bytes`; False if none came."""
        before = self.num_cut
        self._loop.call_soon_threadsafe(setattr, self, "_allowance", num_bytes)
        give_up = time.monotonic() + within_s
        while self.num_cut == before and time.monotonic() < give_up:
            time.sleep(0.01)
        self._loop.call_soon_threadsafe(setattr, self, "_allowance", None)
        return self.num_cut > before

    def cut_somewhere(self, rng: random.Random) -> str | None:
        """Break one connection within a body, or all at once; say which, None if none was there."""
        if rng.random() < 0.25:
            broken = self.cut_all()
            return f"{broken} connections" if broken else None
        num_bytes = int(2 ** rng.uniform(6, 19))
        return f"after {num_bytes} bytes" if self.cut_after(num_bytes, within_s=2.0) else None

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:  # the box is down
            self._reset(writer)
            return
        self._open |= {writer, upstream[1]}
        pumps = (self._pump(reader, upstream[1], writer), self._pump(upstream[0], writer, writer))
        await asyncio.gather(*pumps)
        for each in (writer, upstream[1]):
            self._open.discard(each)
            each.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        user: asyncio.StreamWriter,
    ) -> None:
        with suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                if self._allowance is not None:
                    passed = piece[: self._allowance]
                    self._allowance -= len(passed)
                    if len(passed) < len(piece):
                        self._allowance = None
                        self.num_cut += 1
                        writer.write(passed)
                        await writer.drain()
                        self._reset(user)
                        self._reset(writer)
                        return
                writer.write(piece)
                await writer.drain()
        with suppress(OSError, RuntimeError):
            writer.write_eof()

    async def _end(self) -> None:
        self._server.close()
        await self._cut_all()
        ours = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not ours]
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)

    async def _cut_all(self) -> int:
        num_open = len(self._open) // 2
        self.num_cut += num_open
        for writer in list(self._open):
            self._reset(writer)
        self._open.clear()
        return num_open

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        found = writer.get_extra_info("socket")
        if found is not None:
            with suppress(OSError):
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
