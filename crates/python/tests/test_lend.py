"""Loans: an array that is shared again and again, and what is taken back."""

import gc
import os
import signal
import subprocess
import sys

import numpy
import pytest
from conftest import WATCHDOG, settled, until

import gpu_ipc
from gpu_ipc._gpu_ipc import _PlainMemory

FOREIGN = 1 << 16


def foreign(value: int = 1) -> "numpy.ndarray":
    """Make an array in memory of another allocator, which a session adopts."""
    array = numpy.from_dlpack(_PlainMemory(FOREIGN, "host:0"))
    array[:] = value
    return array


def values(received: gpu_ipc.Received) -> "numpy.ndarray":
    return numpy.from_dlpack(received)


@pytest.mark.parametrize("kind", ["block", "array in a block", "foreign", "copied", "empty"])
def test_a_broadcast_of_a_loan_is_claimed_again_and_again_by_everybody(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant, kind: str
) -> None:
    block = session.alloc(FOREIGN)
    numpy.from_dlpack(block)[:] = 7
    x, copy = {
        "block": (block, False),
        "array in a block": (numpy.from_dlpack(block).reshape(256, -1)[3], False),
        "foreign": (foreign(7), False),
        "copied": (numpy.full(16, 7, numpy.uint8), True),
        "empty": (numpy.zeros((0, 3), numpy.float32), False),
    }[kind]
    loan = session.lend(x, copy=copy)
    descriptor = loan.share(session.ticket(None), meta=b"again")
    with gpu_ipc.connect(session.path) as second:
        held = []
        for claimer in (participant, second) * 3:
            received = claimer.claim(descriptor, timeout=WATCHDOG)
            assert received.meta == b"again" and (values(received) == 7).all()
            assert received.shape == (x.shape if isinstance(x, numpy.ndarray) else (FOREIGN,))
            # Every other one is dropped before the next claim.
            held += [received] if len(held) % 2 else []
        assert session.stats().tickets == 1
        loan.release()
        with pytest.raises(gpu_ipc.Revoked):
            second.claim(descriptor, timeout=WATCHDOG)
        with pytest.raises(gpu_ipc.Invalid, match="released"):
            loan.share()
        assert all((values(one) == 7).all() for one in held)
        del received, held
        gc.collect()
        loan.wait_released(WATCHDOG)
    del block, x
    gc.collect()
    until(lambda: settled(session), "nothing is held")


def test_a_loan_is_shared_with_any_addressee_and_tells_what_is_out(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    with session.lend(foreign(3)) as loan:
        assert (loan.nbytes, loan.outstanding, loan.released) == (FOREIGN, 0, False)
        given = [loan.share(participant.id), loan.share(participant), loan.share(), loan.share(session.ticket(2))]
        held = [participant.claim(one, timeout=WATCHDOG) for one in given]
        # The second claim of the last ticket is left.
        assert loan.outstanding == 5
        with pytest.raises(gpu_ipc.Timeout):
            loan.wait_released(0)
        assert session.revoke(given[-1])
        assert repr(loan) == f"<gpu_ipc.Loan {FOREIGN} bytes>"
    assert (loan.outstanding, loan.released) == (None, True)
    assert repr(loan) == f"<gpu_ipc.Loan {FOREIGN} bytes, released>"
    loan.release()
    with pytest.raises(gpu_ipc.Timeout):
        loan.wait_released(0)
    del held
    gc.collect()
    loan.wait_released(WATCHDOG)


def test_no_time_to_live_ends_a_broadcast_of_a_loan_unless_it_was_asked_for(path: str) -> None:
    with gpu_ipc.Session("host:0", path, ttl=0.02) as session, gpu_ipc.connect(path) as participant:
        loan = session.lend(foreign(5))
        lasts, lapses = loan.share(session.ticket(None)), loan.share(session.ticket(None), ttl=0.02)
        addressed = loan.share(participant)
        until(lambda: session.stats().expired == 2, "the others lapse")
        for one in (lapses, addressed):
            with pytest.raises(gpu_ipc.Revoked):
                participant.claim(one, timeout=WATCHDOG)
        assert (values(participant.claim(lasts, timeout=WATCHDOG)) == 5).all()


def test_a_loan_that_is_dropped_is_released_and_lets_its_memory_go(session: gpu_ipc.Session) -> None:
    array = foreign()
    references = sys.getrefcount(array)
    loan = session.lend(array)
    with gpu_ipc.connect(session.path) as participant:
        descriptor = loan.share(session.ticket(None))
        participant.claim(descriptor, timeout=WATCHDOG).release()
        del loan
        with pytest.raises(gpu_ipc.Revoked):
            participant.claim(descriptor, timeout=WATCHDOG)

    def back() -> bool:
        session.collect()
        return sys.getrefcount(array) == references

    until(back, "the array is the program's alone")


def test_a_closed_session_lends_nothing_and_its_loans_end_with_the_last_participant(path: str) -> None:
    with gpu_ipc.Session("host:0", path) as session:
        participant = gpu_ipc.connect(path)
        loan = session.lend(foreign(4))
        descriptor = loan.share(session.ticket(None))
        session.close()
        with pytest.raises(gpu_ipc.Closed):
            session.lend(foreign())
        with pytest.raises(gpu_ipc.Closed):
            loan.share()
        # Those that are connected go on.
        assert (values(participant.claim(descriptor, timeout=WATCHDOG)) == 4).all()
        participant.close()
        until(lambda: session.stats().tickets == 0, "no process is left to claim it")
        loan.release()
        loan.wait_released(WATCHDOG)


READER = """
import sys, gpu_ipc
with gpu_ipc.connect(sys.argv[1], name="reader") as participant:
    held = [participant.claim(bytes.fromhex(sys.argv[2])) for _ in range(3)]
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_reader_that_is_killed_leaves_the_loan_to_the_others(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    loan = session.lend(foreign(6))
    descriptor = loan.share(session.ticket(None))
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, session.path, bytes(descriptor).hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert reader.stdout is not None and reader.stdout.readline() == b"held\n"
    assert loan.outstanding == 3
    reader.kill()
    reader.communicate()
    until(lambda: loan.outstanding == 0, "its leases end")
    assert (values(participant.claim(descriptor, timeout=WATCHDOG)) == 6).all()


PRODUCER = """
import sys, numpy, gpu_ipc
session = gpu_ipc.Session("host:0", sys.argv[1])
block = session.alloc(64)
numpy.from_dlpack(block)[:] = 8
loan = session.lend(block)
print(bytes(loan.share(session.ticket(None))).hex(), flush=True)
sys.stdin.read()
"""


def test_what_is_held_of_a_loan_outlives_its_producer(path: str) -> None:
    producer = subprocess.Popen(
        [sys.executable, "-c", PRODUCER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert producer.stdout is not None
    descriptor = bytes.fromhex(producer.stdout.readline())
    with gpu_ipc.connect(path) as participant:
        received = participant.claim(descriptor, timeout=WATCHDOG)
        producer.kill()
        producer.communicate()
        until(lambda: participant.is_producer_gone, "its death is seen")
        with pytest.raises(gpu_ipc.ProducerGone):
            participant.claim(descriptor, timeout=WATCHDOG)
        assert (values(received) == 8).all() and received.state == "ready_producer_gone"


def test_a_broadcast_that_would_end_with_its_call_is_refused(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    everybody = session.ticket(None)
    for x, copy in [(foreign(), False), (numpy.ones(4), True), (numpy.zeros(0), False)]:
        with pytest.raises(gpu_ipc.Invalid, match="lend"):
            session.share(x, to=everybody, copy=copy)
        with pytest.raises(gpu_ipc.Invalid, match="lend"):
            session.share_many([x], to=[participant, everybody], copy=copy)
    assert session.stats().tickets == 0
    block = session.alloc(16)
    array = numpy.from_dlpack(block)
    array[:] = 9
    for x in (block, array):
        received = participant.claim(session.share(x, to=everybody), timeout=WATCHDOG)
        assert (values(received) == 9).all()
    # The array alone keeps the block.
    block.release()
    received = participant.claim(session.share(array, to=everybody), timeout=WATCHDOG)
    assert (values(received) == 9).all()


def test_an_array_finds_the_block_that_it_was_made_in(session: gpu_ipc.Session, path: str) -> None:
    block = session.alloc(1024)
    array = numpy.from_dlpack(block)
    for x in (block, array, array[3:9], array.view(numpy.float32)[::-1], memoryview(array)):
        found = session.block_of(x)
        assert found is not None and found.data_ptr == block.data_ptr and found.nbytes == 1024
    for x in (foreign(), numpy.ones(3)):
        assert session.block_of(x) is None
    with gpu_ipc.Session("host:0", path + "2") as other:
        assert other.block_of(array) is None
    # It is the block's memory, kept by what was found alone.
    with gpu_ipc.connect(session.path) as participant:
        received = participant.claim(session.share(found := session.block_of(array), to=participant))
        assert found is not None and found.outstanding == 1
        del block, array, x
        gc.collect()
        assert numpy.from_dlpack(found).ctypes.data == found.data_ptr
        del received
    with pytest.raises(gpu_ipc.Error):
        session.block_of("no array")


def test_what_was_shared_without_a_block_is_revoked(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant, path: str
) -> None:
    for to in (participant, session.ticket(1), session.ticket(3)):
        for x, copy in ((foreign(), False), (numpy.ones(8), True)):
            descriptor = session.share(x, to=to, copy=copy)
            assert session.revoke(bytes(descriptor)) and not session.revoke(descriptor)
            with pytest.raises(gpu_ipc.Revoked):
                participant.claim(descriptor, timeout=WATCHDOG)
    descriptor = session.share(foreign(), to=participant)
    received = participant.claim(descriptor)
    assert not session.revoke(descriptor) and (values(received) == 1).all()
    with gpu_ipc.Session("host:0", path + "2") as other, pytest.raises(gpu_ipc.Mismatch):
        other.revoke(descriptor)
    with pytest.raises(gpu_ipc.BadDescriptor):
        session.revoke(b"no descriptor")
    del received
    until(lambda: settled(session), "all is given back")


def test_an_array_that_is_shared_ten_thousand_times_while_it_is_held_is_kept_once(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    memory = _PlainMemory(FOREIGN, "host:0")
    array = numpy.from_dlpack(memory)
    before = sys.getrefcount(array)
    held = participant.claim(session.share(array, to=participant))
    once = sys.getrefcount(array)
    for _ in range(10_000):
        # The next before the last is dropped, so that the reader maps the memory all the time.
        held = participant.claim(session.share(array, to=participant))
    assert sys.getrefcount(array) <= once <= before + 1
    del held
    gc.collect()
    loans = [session.lend(array) for _ in range(3)]
    assert sys.getrefcount(array) <= once
    del loans
    participant.close()

    def back() -> bool:
        session.collect()
        return sys.getrefcount(array) == before

    until(back, "the array is the program's alone")
    assert settled(session)


def test_memory_that_others_hold_is_kept_until_the_last_of_its_shares_is_back(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    array = foreign(2)
    before = sys.getrefcount(array)
    first, second = (participant.claim(session.share(array, to=participant)) for _ in range(2))
    first.release()
    for _ in range(3):
        session.collect()
    assert sys.getrefcount(array) > before and (values(second) == 2).all()
    second.release()


def test_a_fan_out_names_the_addressee_that_is_gone(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    dead = subprocess.Popen(
        [sys.executable, "-c", READER, session.path, ""], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    addressees = session.wait_for_participants(2, WATCHDOG)
    gone = next(one for one in addressees if one != participant.id)
    dead.communicate()
    until(lambda: len(session.participants()) == 1, "it is gone")
    arrays = [foreign(1), foreign(2)]
    while True:
        try:
            shared = session.share_many(arrays, to=list(addressees))
            break
        except gpu_ipc.ParticipantGone as error:
            assert error.participant == gone
            assert session.stats().in_flight == 0, "nothing is granted"
            addressees.remove(error.participant)
    received = participant.claim_many(shared[0])
    assert [values(one)[0] for one in received] == [1, 2]
    with pytest.raises(gpu_ipc.ParticipantGone) as caught:
        session.share(arrays[0], to=gone)
    assert caught.value.participant == gone


def test_a_forked_child_has_no_loans(session: gpu_ipc.Session) -> None:
    loan = session.lend(foreign())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (loan.share, loan.release, loan.wait_released, lambda: session.lend(b"")):
                try:
                    call()
                except gpu_ipc.Forked:
                    continue
                os._exit(2)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not loan.released


def test_ctrl_c_ends_a_wait_for_a_loans_holders(session: gpu_ipc.Session) -> None:
    with gpu_ipc.connect(session.path) as participant:
        loan = session.lend(foreign())
        received = participant.claim(loan.share(participant))
        loan.release()

        def interrupt(*_: object) -> None:
            raise InterruptedError

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(InterruptedError):
                loan.wait_released()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        received.release()
        loan.wait_released(WATCHDOG)


@pytest.mark.parametrize("holds", [True, False])
def test_a_notice_names_who_died_and_outlives_it(session: gpu_ipc.Session, holds: bool) -> None:
    loan = session.lend(foreign())
    descriptor = loan.share(session.ticket(None))
    program = READER if holds else READER.replace("range(3)", "range(0)")
    reader = subprocess.Popen(
        [sys.executable, "-c", program, session.path, bytes(descriptor).hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert reader.stdout is not None and reader.stdout.readline() == b"held\n"
    (number,) = session.participants()
    reader.kill()
    reader.communicate()
    seen: list[gpu_ipc.SessionNotice] = []

    def left() -> bool:
        seen.extend(session.notices())
        return bool(seen) and seen[-1].kind == "left"

    until(left, "the notice of its end")
    assert (seen[-1].participant, seen[-1].name, seen[-1].how) == (number, "reader", "died")
    assert (seen[0].kind, seen[0].name, seen[0].how) == ("joined", None, None)
    assert session.participant_name(number) is None and loan.outstanding == 0
    assert repr(seen[-1]) == f'<gpu_ipc.SessionNotice left {number.value:#x} "reader": died>'


def test_a_notice_tells_a_goodbye_from_a_death(session: gpu_ipc.Session) -> None:
    gpu_ipc.connect(session.path, name="polite").close(WATCHDOG)
    seen: list[gpu_ipc.SessionNotice] = []

    def left() -> bool:
        seen.extend(session.notices())
        return bool(seen) and seen[-1].kind == "left"

    until(left, "the notice of its end")
    assert (seen[-1].name, seen[-1].how) == ("polite", "goodbye")
