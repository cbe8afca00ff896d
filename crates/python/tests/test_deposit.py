"""File descriptors that a session keeps under names until they are fetched."""

import contextlib
import multiprocessing
import os
import resource
import uuid
from multiprocessing.connection import Connection

import pytest
from conftest import WATCHDOG, until

import gpu_ipc


def file(content: bytes) -> int:
    """Return a descriptor with a content, of which there is no other."""
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    return reader


def content(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as opened:
        return opened.read()


def name() -> bytes:
    return uuid.uuid4().bytes


def test_what_a_participant_deposits_is_fetched_once(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    first, second, third = name(), name(), name()
    mine = file(b"one")
    participant.deposit(first, mine, timeout=WATCHDOG)
    assert session.deposits == 1
    # The number given stays its caller's.
    os.close(mine)
    assert content(session.fetch(first)) == b"one"
    with pytest.raises(gpu_ipc.Invalid, match="it was fetched, or its depositor is gone"):
        session.fetch(first)

    session.deposit(second, mine := file(b"two"))
    os.close(mine)
    assert content(participant.fetch(second, timeout=WATCHDOG)) == b"two"
    with pytest.raises(gpu_ipc.Refused, match="no descriptor is kept under the name"):
        participant.fetch(third, timeout=WATCHDOG)
    until(lambda: session.deposits == 0, "the fetch does not end")


def test_wrong_names_and_numbers_are_refused(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    open_file = file(b"")
    for keeper in (session, participant):
        for short in (b"", b"15 bytes of it.", b"17 bytes of it..."):
            with pytest.raises(gpu_ipc.Invalid, match="16 bytes"):
                keeper.deposit(short, open_file)
            with pytest.raises(gpu_ipc.Invalid, match="16 bytes"):
                keeper.fetch(short)
        with pytest.raises(gpu_ipc.Invalid, match="that of an open file"):
            keeper.deposit(name(), -1)
        with pytest.raises(gpu_ipc.SystemFailed, match="dup"):
            keeper.deposit(name(), 1 << 30)
    taken = name()
    session.deposit(taken, open_file)
    with pytest.raises(gpu_ipc.Invalid, match="no other descriptor"):
        session.deposit(taken, open_file)
    with pytest.raises(gpu_ipc.Refused, match="another descriptor is kept"):
        participant.deposit(taken, open_file, timeout=WATCHDOG)
    os.close(open_file)


def test_a_closed_session_and_one_that_is_gone_say_so(path: str) -> None:
    session = gpu_ipc.Session("host:0", path)
    participant = gpu_ipc.connect(path)
    session.close()
    opened = file(b"")
    with pytest.raises(gpu_ipc.Closed):
        session.deposit(name(), opened)
    with pytest.raises((gpu_ipc.ProducerGone, gpu_ipc.Refused)):
        participant.deposit(name(), opened, timeout=WATCHDOG)
    os.close(opened)


def deposit_and_wait(path: str, ids: list[bytes], pipe: Connection) -> None:
    participant = gpu_ipc.connect(path, name="the depositor")
    for one in ids:
        participant.deposit(one, file(one), timeout=WATCHDOG)
    pipe.send("deposited")
    pipe.recv()


def test_a_killed_processes_deposits_end_with_the_proof_of_its_death(session: gpu_ipc.Session) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ids = [name() for _ in range(3)]
    process = context.Process(target=deposit_and_wait, args=(session.path, ids, theirs), daemon=True)
    process.start()
    assert ours.poll(WATCHDOG) and ours.recv() == "deposited"
    assert content(session.fetch(ids[0])) == ids[0]
    assert session.deposits == 2
    process.kill()
    process.join()
    until(lambda: session.deposits == 0, "what the dead deposited is kept")
    with pytest.raises(gpu_ipc.Invalid):
        session.fetch(ids[1])
    left = [notice for notice in session.notices() if notice.kind == "left"]
    assert [(notice.name, notice.how) for notice in left] == [("the depositor", "died")]


def starve(path: str, pipe: Connection) -> None:
    with gpu_ipc.Session("host:0", path) as session:
        pipe.send("open")
        pipe.recv()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        taken: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        pipe.send("starved")
        pipe.recv()
        for fd in taken:
            os.close(fd)
        pipe.send("fed")
        pipe.recv()
        pipe.send(session.deposits)
        pipe.recv()


def test_a_session_without_a_free_descriptor_is_asked_again(path: str) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=starve, args=(path, theirs), daemon=True)
    process.start()

    def says(word: object) -> None:
        assert ours.poll(WATCHDOG) and ours.recv() == word

    says("open")
    participant, kept, fd = gpu_ipc.connect(path), name(), file(b"kept")
    ours.send("starve")
    says("starved")
    with pytest.raises(gpu_ipc.Timeout):
        participant.deposit(name(), fd, timeout=0.3)
    ours.send("feed")
    says("fed")
    # The session serves as before, and what gave up is not kept.
    participant.deposit(kept, fd, timeout=WATCHDOG)
    ours.send("count")
    says(1)
    assert content(participant.fetch(kept, timeout=WATCHDOG)) == b"kept"
    os.close(fd)
    participant.close(WATCHDOG)
    ours.send("end")
    process.join(WATCHDOG)
    assert process.exitcode == 0
