"""A camera writes frames, and subscribers read the newest in asyncio, each as fast as it can.

    python camera.py [--device host:0] [--frames 100] [--subscribers 3]

The camera has a few buffers, and writes into one that nobody holds. A frame is one ticket for everybody, announced by a
plain line on the subscribers' standard input.
"""

import argparse
import asyncio
import sys

import gpu_ipc
from arrays import holds, taken, view

ELEMENTS = 64 * 1024
BUFFERS = 8
# Who takes longer hangs.
PATIENCE = 120.0


async def subscribe(path: str) -> None:
    """Read frames until the camera's last line."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    seen = last = 0
    with gpu_ipc.connect(path) as participant:
        print(participant.id.value, flush=True)
        while line := (await reader.readline()).decode().split():
            number, descriptor = int(line[0]), bytes.fromhex(line[1])
            try:
                received = await participant.claim_async(descriptor)
            except (gpu_ipc.Revoked, gpu_ipc.Stale):
                # The buffer was given to a newer frame before this was read.
                continue
            frame = taken(received)
            del received
            assert number > last and holds(frame, float(number)), f"frame {number} after {last}"
            seen, last = seen + 1, number
            del frame
    print(f"{seen} {last}", flush=True)


async def hear(process: asyncio.subprocess.Process) -> str:
    """Read a subscriber's next line."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        return (await process.stdout.readline()).decode().strip()


def free(blocks: list[gpu_ipc.Block]) -> int | None:
    """Find a block that nobody holds, and nobody can claim."""
    return next((place for place, block in enumerate(blocks) if block.outstanding == 0), None)


async def film(options: argparse.Namespace) -> None:
    """Write frames into buffers that nobody looks at."""
    with gpu_ipc.Session(options.device) as session:
        command = [sys.executable, __file__, "--subscribe", session.path]
        pipe = asyncio.subprocess.PIPE
        subscribers = [
            await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe) for _ in range(options.subscribers)
        ]
        for subscriber in subscribers:
            await hear(subscriber)
        blocks = [session.alloc(4 * ELEMENTS) for _ in range(BUFFERS)]
        frames = [view(block, session.device) for block in blocks]
        for number in range(1, options.frames + 1):
            while (place := free(blocks)) is None:
                # Every buffer is looked at; a real camera would drop the frame.
                await asyncio.sleep(0.001)
            frames[place][:] = float(number)
            ticket = session.share(frames[place], to=session.ticket(options.subscribers), ttl=30.0)
            for subscriber in subscribers:
                assert subscriber.stdin is not None
                subscriber.stdin.write(f"{number} {bytes(ticket).hex()}\n".encode())
                await subscriber.stdin.drain()
        told = []
        for subscriber in subscribers:
            assert subscriber.stdin is not None
            subscriber.stdin.close()
            seen, last = map(int, (await hear(subscriber)).split())
            assert last == options.frames, f"a subscriber's last frame is {last}"
            told.append(seen)
            await subscriber.wait()
        del blocks, frames
        report = await asyncio.to_thread(session.close, PATIENCE)
        assert report.clean, report
        print(f"camera: {options.frames} frames of {4 * ELEMENTS >> 10} KiB, seen by the subscribers: {told}")


def main() -> None:
    """Film, or subscribe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="host:0")
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--subscribers", type=int, default=3)
    parser.add_argument("--subscribe", metavar="PATH", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(subscribe(options.subscribe) if options.subscribe else film(options))


if __name__ == "__main__":
    main()
