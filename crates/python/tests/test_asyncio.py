"""Claims and notices in asyncio."""

import asyncio

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
