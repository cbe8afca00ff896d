"""Claims, notices and waits in asyncio, over the descriptor of a participant or a session."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from gpu_ipc._errors import Closed, Timeout, WouldBlock
from gpu_ipc._gpu_ipc import Block, Broker, Notice, Participant, ParticipantId, Received, Session, SessionNotice

# Who waits asks again after this many seconds if nothing woke it: another thread may have taken the notice.
_ASK_AGAIN = 1.0

# Nothing comes after these.
_LAST = {"producer_gone", "closed", "failed"}


class Waiters:
    """Who waits for one participant or session in one event loop. It reads the descriptor only while somebody does."""

    def __init__(self, source: Participant | Session, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.fd = source.fileno()
        self.askers: set[asyncio.Future[None]] = set()
        self.readers: set[asyncio.Future[None]] = set()
        self.notices: deque[Any] = deque()

    @staticmethod
    def of(source: Participant | Session) -> "Waiters":
        loop = asyncio.get_running_loop()
        known = source._waiters
        if not isinstance(known, Waiters) or known.loop is not loop:
            known = Waiters(source, loop)
            source._waiters = known
        return known

    async def wait(self, source: Participant | Session, queue: "set[asyncio.Future[None]]") -> None:
        future: asyncio.Future[None] = self.loop.create_future()
        if not self.askers and not self.readers:
            self.loop.add_reader(self.fd, self._hear, source)
        queue.add(future)
        try:
            async with asyncio.timeout(_ASK_AGAIN):
                await future
        except TimeoutError:
            pass
        finally:
            queue.discard(future)
            if not self.askers and not self.readers:
                self.loop.remove_reader(self.fd)

    def take(self, source: Participant | Session) -> bool:
        """Take the notices that are for readers, and say whether there are new ones."""
        told = [notice for notice in source.notices() if notice.kind != "try_again"]
        self.notices.extend(told)
        return bool(told)

    def _hear(self, source: Participant | Session) -> None:
        told = self.take(source)
        for future in (*self.askers, *(self.readers if told else ())):
            if not future.done():
                future.set_result(None)


async def claim(participant: Participant, descriptor: Any, stream: Any) -> Received:
    """Claim what a descriptor grants, trying again whenever the producer has said something."""
    while True:
        try:
            return participant.try_claim(descriptor, stream=stream)
        except WouldBlock:
            waiters = Waiters.of(participant)
        await waiters.wait(participant, waiters.askers)


async def notices(source: Participant | Session) -> AsyncIterator[Notice | SessionNotice]:
    """Give the notices of a participant or a session as they come, to the last."""
    waiters = Waiters.of(source)
    while True:
        waiters.take(source)
        while waiters.notices:
            notice = waiters.notices.popleft()
            yield notice
            if notice.kind in _LAST:
                return
        await waiters.wait(source, waiters.readers)


async def participants(session: Session, count: int) -> list[ParticipantId]:
    """Wait until at least `count` participants are connected."""
    waiters = Waiters.of(session)
    while len(connected := session.participants()) < count:
        if session.closed:
            raise Closed(f"the session was closed when {len(connected)} of {count} participants were connected")
        await waiters.wait(session, waiters.askers)
    return connected


async def released(session: Session, block: Block) -> None:
    """Wait until no lease on a block is outstanding."""
    waiters = Waiters.of(session)
    while True:
        try:
            return block.wait_released(0)
        except Timeout:
            await waiters.wait(session, waiters.askers)


async def watch(broker: Broker, name: str, seen: int) -> int:
    """Wait for an epoch newer than `seen`, on a thread that ends soon after a cancel."""
    while True:
        newer = await asyncio.to_thread(broker.watch, name, seen, _ASK_AGAIN)
        if newer is not None:
            return newer
