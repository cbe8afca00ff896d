"""Claims, notices and waits in asyncio, over the descriptor of a participant or a session."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from gpu_ipc import _threads
from gpu_ipc._errors import Timeout, WouldBlock
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

    def take(self, source: Participant | Session) -> None:
        """Take the notices that are for readers, and wake these if there are new ones."""
        told = [notice for notice in source.notices() if notice.kind != "try_again"]
        self.notices.extend(told)
        if told:
            self._wake(self.readers)

    def _hear(self, source: Participant | Session) -> None:
        self.take(source)
        self._wake(self.askers)

    @staticmethod
    def _wake(queue: "set[asyncio.Future[None]]") -> None:
        for future in queue:
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
    """Give the notices of a participant or a session as they come, to the last. Each goes to one reader."""
    waiters = Waiters.of(source)
    while True:
        waiters.take(source)
        while waiters.notices:
            notice = waiters.notices.popleft()
            yield notice
            if notice.kind in _LAST:
                return
        # Another reader had the last one.
        if source._ended:
            return
        await waiters.wait(source, waiters.readers)


async def participants(session: Session, count: int) -> list[ParticipantId]:
    """Wait until at least `count` participants are connected."""
    waiters = Waiters.of(session)
    while True:
        try:
            return session.wait_for_participants(count, 0)
        except Timeout:
            await waiters.wait(session, waiters.askers)


async def released(session: Session, block: Block) -> None:
    """Wait until no lease on a block is outstanding."""
    waiters = Waiters.of(session)
    while True:
        try:
            return block.wait_released(0)
        except Timeout:
            await waiters.wait(session, waiters.askers)


async def watch(broker: Broker, name: str, seen: int) -> int:
    """Wait for an epoch newer than `seen`, on a thread that ends soon after a cancel.

    The thread is its own: asyncio's default executor has a few for everything, and each watch would keep one.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[int] = loop.create_future()
    ended = threading.Event()

    def settle(give: Callable[[Any], None], value: Any) -> None:
        if not found.done():
            give(value)

    def tell(give: Callable[[Any], None], value: Any) -> None:
        # The loop may be closed by now: nothing waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, give, value)

    def look() -> None:
        try:
            while not ended.is_set():
                newer = broker.watch(name, seen, _ASK_AGAIN)
                if newer is not None:
                    return tell(found.set_result, newer)
        except Exception as error:
            tell(found.set_exception, error)

    _threads.launch(threading.Thread(target=look, name="gpu-ipc-watch", daemon=True))
    try:
        return await found
    finally:
        ended.set()
