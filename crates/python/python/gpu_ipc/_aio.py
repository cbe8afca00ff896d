"""Claims and notices in asyncio, over a participant's descriptor."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from gpu_ipc._errors import WouldBlock
from gpu_ipc._gpu_ipc import Notice, Participant, Received

# A claim asks again after this many seconds if nothing woke it: another thread may have taken the notice.
_ASK_AGAIN = 1.0


class Waiters:
    """Who waits for one participant in one event loop. It reads the descriptor only while somebody does."""

    def __init__(self, participant: Participant, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.fd = participant.fileno()
        self.claims: set[asyncio.Future[None]] = set()
        self.readers: set[asyncio.Future[None]] = set()
        self.notices: deque[Notice] = deque()

    @staticmethod
    def of(participant: Participant) -> "Waiters":
        loop = asyncio.get_running_loop()
        known = participant._waiters
        if not isinstance(known, Waiters) or known.loop is not loop:
            known = Waiters(participant, loop)
            participant._waiters = known
        return known

    async def wait(self, participant: Participant, queue: "set[asyncio.Future[None]]") -> None:
        future: asyncio.Future[None] = self.loop.create_future()
        if not self.claims and not self.readers:
            self.loop.add_reader(self.fd, self._hear, participant)
        queue.add(future)
        try:
            async with asyncio.timeout(_ASK_AGAIN):
                await future
        except TimeoutError:
            pass
        finally:
            queue.discard(future)
            if not self.claims and not self.readers:
                self.loop.remove_reader(self.fd)

    def _hear(self, participant: Participant) -> None:
        told = [notice for notice in participant.notices() if notice.kind != "try_again"]
        self.notices.extend(told)
        for future in (*self.claims, *(self.readers if told else ())):
            if not future.done():
                future.set_result(None)


async def claim(participant: Participant, descriptor: Any, stream: Any) -> Received:
    """Claim what a descriptor grants, trying again whenever the producer has said something."""
    while True:
        try:
            return participant.try_claim(descriptor, stream=stream)
        except WouldBlock:
            waiters = Waiters.of(participant)
        await waiters.wait(participant, waiters.claims)


async def notices(participant: Participant) -> AsyncIterator[Notice]:
    """Give the notices of a participant as they come, until its producer is gone."""
    waiters = Waiters.of(participant)
    while True:
        waiters.notices.extend(notice for notice in participant.notices() if notice.kind != "try_again")
        while waiters.notices:
            notice = waiters.notices.popleft()
            yield notice
            if notice.kind == "producer_gone":
                return
        await waiters.wait(participant, waiters.readers)
