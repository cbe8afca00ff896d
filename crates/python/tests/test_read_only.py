"""Arrays that their producer shares to be read only."""

import signal
import subprocess
import sys

import numpy
import pytest
from conftest import WATCHDOG

import gpu_ipc
from gpu_ipc._gpu_ipc import _PlainMemory


def flags(received: gpu_ipc.Received) -> tuple[bool, bool, bool]:
    """Whether it is read-only, as it says itself, by the buffer protocol, and by DLPack."""
    by_dlpack = numpy.from_dlpack(received)
    return received.read_only, memoryview(received).readonly, not by_dlpack.flags.writeable


def test_a_share_that_says_so_arrives_read_only(session: gpu_ipc.Session, path: str) -> None:
    block = session.alloc(32)
    numpy.asarray(block)[:] = 7
    with gpu_ipc.connect(path) as participant:
        for to in (participant.id, session.ticket(1), session.ticket(None)):
            received = participant.claim(session.share(block, to=to, read_only=True))
            assert flags(received) == (True, True, True)
            array = numpy.asarray(received)
            assert (array == 7).all()
            with pytest.raises(ValueError):
                array[0] = 8
            received = participant.claim(session.share(block, to=to))
            assert flags(received) == (False, False, False)


def test_a_source_that_is_read_only_arrives_so_unless_told_otherwise(session: gpu_ipc.Session, path: str) -> None:
    block = session.alloc(32)
    array = numpy.asarray(block)
    array[:] = 7
    only_read = memoryview(array).toreadonly()
    with gpu_ipc.connect(path) as participant:

        def claim(**options: object) -> gpu_ipc.Received:
            return participant.claim(session.share(only_read, to=participant.id, **options))  # type: ignore[arg-type]

        assert flags(claim()) == (True, True, True)
        assert flags(claim(read_only=False)) == (False, False, False)
        # A copy is the session's own.
        assert flags(claim(copy=True)) == (False, False, False)
        assert flags(claim(copy=True, read_only=True)) == (True, True, True)
        assert (numpy.asarray(claim()) == 7).all()


def test_the_flag_of_dlpack_is_read(session: gpu_ipc.Session, path: str) -> None:
    array = numpy.asarray(session.alloc(32))
    array.flags.writeable = False
    try:
        array.__dlpack__(max_version=(1, 0))
    except (BufferError, TypeError):
        pytest.skip("this numpy gives out no read-only arrays by DLPack")
    with gpu_ipc.connect(path) as participant:
        assert flags(participant.claim(session.share(array, to=participant.id))) == (True, True, True)


def test_several_arrays_arrive_each_as_it_is(session: gpu_ipc.Session, path: str) -> None:
    blocks = [session.alloc(32) for _ in range(4)]
    views = [memoryview(numpy.asarray(block)) for block in blocks]
    arrays = [views[0].toreadonly(), views[1], views[2].toreadonly(), views[3]]
    with gpu_ipc.connect(path) as participant:
        for read_only, expected in (
            (None, [True, False, True, False]),
            (True, [True] * 4),
            (False, [False] * 4),
        ):
            descriptors = session.share_many(arrays, to=participant.id, read_only=read_only)
            received = participant.claim_many(descriptors)
            assert [one.read_only for one in received] == expected


def test_a_loan_is_read_only_for_all_that_it_is_shared_with(session: gpu_ipc.Session, path: str) -> None:
    block = session.alloc(32)
    with gpu_ipc.connect(path) as participant, session.lend(block, read_only=True) as loan:
        broadcast = loan.share(session.ticket(None))
        for descriptor in (loan.share(participant.id), broadcast, broadcast):
            assert flags(participant.claim(descriptor)) == (True, True, True)
        writable = loan.share(participant.id, read_only=False)
        assert not participant.claim(writable).read_only


def test_what_is_forwarded_stays_read_only(session: gpu_ipc.Session, path: str) -> None:
    block = session.alloc(32)
    with gpu_ipc.connect(path) as first, gpu_ipc.connect(path) as second:
        received = first.claim(session.share(block, to=first.id, read_only=True))
        onward = received.forward(second.id)
        assert flags(second.claim(onward)) == (True, True, True)


READER = """
import sys, numpy, gpu_ipc
with gpu_ipc.connect(sys.argv[1]) as participant:
    received = participant.claim(gpu_ipc.Descriptor(bytes.fromhex(sys.argv[2])))
    assert received.read_only
    array = numpy.asarray(received.without_read_only_flag())
    assert (array == 7).all()
    print("read", flush=True)
    array[0] = 8
    print("written", flush=True)
"""


def test_a_write_past_the_flag_faults(session: gpu_ipc.Session, path: str) -> None:
    block = session.alloc(32)
    array = numpy.asarray(block)
    array[:] = 7
    descriptor = session.share(block, to=session.ticket(1), read_only=True)
    program = [sys.executable, "-c", READER, path, bytes(descriptor).hex()]
    done = subprocess.run(program, capture_output=True, text=True, timeout=WATCHDOG)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stdout == "read\n"
    assert (array == 7).all()


def test_memory_that_is_opened_by_a_handle_is_refused_with_the_remedy(session: gpu_ipc.Session, path: str) -> None:
    array = numpy.from_dlpack(_PlainMemory(1 << 16, "host:0", by_handle=True))
    with gpu_ipc.connect(path) as participant:
        for call in (
            lambda: session.share(array, to=participant.id, read_only=True),
            lambda: session.share_many([array], to=participant.id, read_only=True),
            lambda: session.lend(array, read_only=True).share(participant.id),
            lambda: session.share(memoryview(array).toreadonly(), to=participant.id),
        ):
            with pytest.raises(gpu_ipc.Unsupported, match="read_only=False"):
                call()
        shared = session.share(memoryview(array).toreadonly(), to=participant.id, read_only=False)
        assert not participant.claim(shared).read_only


def test_no_tensors_are_claimed_of_what_is_only_read(session: gpu_ipc.Session, path: str) -> None:
    block = session.alloc(32)
    with gpu_ipc.connect(path) as participant:
        descriptor = session.share(block, to=participant.id, read_only=True)
        with pytest.raises(gpu_ipc.Unsupported, match="without `read_only`"):
            participant.claim_tensors([descriptor])
        # Nothing was spent.
        assert participant.claim(descriptor).read_only
