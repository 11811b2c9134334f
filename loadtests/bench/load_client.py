"""The load client without a C compiler: the same arguments, the same JSON, slower. See load_client.c."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path

NUMBER = b"########"


class Tally:
    def __init__(self) -> None:
        self.latencies_us: list[int] = []
        self.events = 0
        self.errors: list[str] = []


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Reads one whole answer; returns its events. Raises RuntimeError if it is not 200 or not whole."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(head.split(b"\r\n")[0].decode())
    if b"\r\ntransfer-encoding:" not in head:
        length = head.partition(b"\r\ncontent-length:")[2].split(b"\r\n")[0]
        await reader.readexactly(int(length))
        return 0
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    if b"text/event-stream" not in head:
        return 0
    events = b"\n" + bytes(body)
    if b"\ndata: [DONE]" not in events:
        raise RuntimeError("a stream ended without [DONE]")
    return events.count(b"\ndata: ") - 1


async def connection(
    port: int,
    start: float,
    deadline: float,
    each: int,
    period_s: float,
    body: bytes,
    numbers: itertools.count[int],
    tally: Tally,
) -> None:
    due = start
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    writer: asyncio.StreamWriter | None = None
    sent = 0
    while not each or sent < each:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if time.monotonic() >= deadline:
            break
        due = max(due, time.monotonic()) + period_s if period_s else 0.0
        sent += 1
        begun = time.monotonic()
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request.replace(NUMBER, b"%08d" % next(numbers)))
            seen = await read_answer(reader)  # not `tally.events += await`: that adds to the sum of before the wait
            tally.events += seen
            tally.latencies_us.append(int((time.monotonic() - begun) * 1e6))
        except (OSError, EOFError, RuntimeError) as failure:
            tally.errors.append(str(failure))
            if writer is not None:
                writer.close()
            writer = None
            await asyncio.sleep(0.01)
    if writer is not None:
        writer.close()


async def main(
    port: int, connections: int, seconds: float, each: int, stagger_us: int, body: bytes, period_us: int
) -> None:
    start, tally, numbers = time.monotonic(), Tally(), itertools.count()
    deadline = start + seconds if seconds else float("inf")
    await asyncio.gather(
        *(
            connection(port, start + i * stagger_us / 1e6, deadline, each, period_us / 1e6, body, numbers, tally)
            for i in range(connections)
        )
    )
    ordered = sorted(tally.latencies_us) or [0]
    summary = {
        "answers": len(tally.latencies_us),
        "events": tally.events,
        "errors": len(tally.errors),
        "first_error": tally.errors[0] if tally.errors else "",
        "seconds": time.monotonic() - start,
        "p50_us": ordered[len(ordered) // 2],
        "p99_us": ordered[len(ordered) * 99 // 100],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    a = sys.argv
    asyncio.run(
        main(int(a[1]), int(a[2]), float(a[3]), int(a[4]), int(a[5]), Path(a[6]).read_bytes(), int([*a, "0"][7]))
    )
