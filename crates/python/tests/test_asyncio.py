"""Claims and notices in asyncio."""

import asyncio
import concurrent.futures
import threading
from typing import Any

import numpy
import pytest
from conftest import WATCHDOG, settled, until

import gpu_ipc


def test_claims_run_beside_each_other(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    async def main() -> list[int]:
        blocks = [session.alloc(n + 1) for n in range(200)]
        tickets = [session.share(block) for block in blocks]
        async with asyncio.timeout(WATCHDOG):
            received = await asyncio.gather(*map(participant.claim_async, tickets))
        return [len(one) for one in received]

    assert asyncio.run(main()) == [n + 1 for n in range(200)]
    # Another loop, the same participant.
    assert asyncio.run(main()) == [n + 1 for n in range(200)]
    until(lambda: settled(session), "nothing is held")


def test_a_claim_that_is_cancelled_loses_nothing(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    ticket = session.share(session.alloc(8))

    async def main() -> gpu_ipc.Received:
        first = asyncio.create_task(participant.claim_async(ticket))
        await asyncio.sleep(0)
        first.cancel()
        try:
            return await first
        except asyncio.CancelledError:
            async with asyncio.timeout(WATCHDOG):
                return await participant.claim_async(ticket)

    assert numpy.from_dlpack(asyncio.run(main())).shape == (8,)


def test_an_error_is_raised_where_it_is_awaited(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    block = session.alloc(8)
    ticket = session.share(block, to=session.ticket(None))
    block.release()

    async def main() -> None:
        async with asyncio.timeout(WATCHDOG):
            await participant.claim_async(ticket)

    with pytest.raises((gpu_ipc.Revoked, gpu_ipc.Stale)):
        asyncio.run(main())


def test_notices_come_until_the_producer_is_gone(path: str) -> None:
    session = gpu_ipc.Session("host:0", path)
    participant = gpu_ipc.connect(path)
    block = session.alloc(8)
    descriptor = session.share(block, to=participant.id)

    async def main() -> list[str]:
        kinds = []
        async with asyncio.timeout(WATCHDOG):
            async for notice in participant.notices_async():
                kinds.append(notice.kind)
                if notice.kind == "revoked":
                    assert notice.concerns(descriptor)
                    # The last that holds the session: its end is what comes next.
                    session.close()
                if notice.kind == "closing":
                    break
        return kinds

    assert session.cancel(block, descriptor)
    assert asyncio.run(main()) == ["revoked", "closing"]


def test_every_reader_of_notices_ends_when_the_producer_is_gone(path: str) -> None:
    session = gpu_ipc.Session("host:0", path)
    participant = gpu_ipc.connect(path)

    async def read() -> list[str]:
        return [notice.kind async for notice in participant.notices_async()]

    async def main() -> list[list[str]]:
        nonlocal session
        async with asyncio.timeout(WATCHDOG):
            readers = [asyncio.create_task(read()) for _ in range(3)]
            await asyncio.sleep(0)
            session.close()
            del session
            return await asyncio.gather(*readers)

    heard = asyncio.run(main())
    assert sorted(kind for kinds in heard for kind in kinds) == ["closing", "producer_gone"]
    # One that begins after the end, in another loop, has nothing to wait for.
    assert asyncio.run(asyncio.wait_for(read(), WATCHDOG)) == []


def test_every_reader_of_a_sessions_notices_ends_when_it_is_closed(session: gpu_ipc.Session) -> None:
    async def read() -> list[str]:
        return [notice.kind async for notice in session.notices_async()]

    async def main() -> list[list[str]]:
        async with asyncio.timeout(WATCHDOG):
            readers = [asyncio.create_task(read()) for _ in range(2)]
            await asyncio.sleep(0)
            session.close()
            return await asyncio.gather(*readers)

    assert sorted(kind for kinds in asyncio.run(main()) for kind in kinds) == ["closed"]
    assert asyncio.run(asyncio.wait_for(read(), WATCHDOG)) == []
    # What was read without a loop has ended as well.
    assert session.notices() == []


def test_participants_are_waited_for_as_long_as_the_session_is_open(session: gpu_ipc.Session) -> None:
    async def main() -> None:
        async with asyncio.timeout(WATCHDOG):
            waiting = asyncio.create_task(session.wait_for_participants_async(1))
            await asyncio.sleep(0)
            with gpu_ipc.connect(session.path) as participant:
                assert await waiting == [participant.id]
                more = asyncio.create_task(session.wait_for_participants_async(2))
                await asyncio.sleep(0)
                session.close()
                with pytest.raises(gpu_ipc.Closed):
                    await more
        with pytest.raises(gpu_ipc.Closed):
            await session.wait_for_participants_async(1)

    asyncio.run(main())
    with pytest.raises(gpu_ipc.Closed):
        session.wait_for_participants(1)
    with pytest.raises(gpu_ipc.Closed):
        session.wait_for_participants(1, timeout=WATCHDOG)


def test_watches_leave_the_default_executor_to_others(broker: gpu_ipc.Broker) -> None:
    class Refuses(concurrent.futures.ThreadPoolExecutor):
        def submit(self, *_what: object, **_more: object) -> concurrent.futures.Future[Any]:
            raise AssertionError("a watch took a worker")

    async def main() -> list[int]:
        asyncio.get_running_loop().set_default_executor(Refuses(1))
        async with asyncio.timeout(WATCHDOG):
            watches = [asyncio.create_task(broker.watch_async("model")) for _ in range(16)]
            cancelled = asyncio.create_task(broker.watch_async("model"))
            await asyncio.sleep(0)
            cancelled.cancel()
            broker.put("model", {"a": numpy.zeros(4)})
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            return await asyncio.gather(*watches)

    assert asyncio.run(main()) == [1] * 16
    until(lambda: all(thread.name != "gpu-ipc-watch" for thread in threading.enumerate()), "their threads end")
    broker.close()
    with pytest.raises(gpu_ipc.Invalid, match="connect again"):
        asyncio.run(broker.watch_async("model"))
