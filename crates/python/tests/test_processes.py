"""Other processes: started, forked, killed, interrupted, and the end of the interpreter."""

import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from multiprocessing.connection import Connection

import numpy
import pytest
from conftest import WATCHDOG, ends, interrupted, said, settled, until

import gpu_ipc


def hear(pipe: Connection) -> object:
    """Receive a message, and fail when none comes."""
    assert pipe.poll(WATCHDOG), "the other process hangs"
    return pipe.recv()


def read_and_tell(path: str, pipe: Connection) -> None:
    """Be a consumer: tell the sum of each array that comes, and keep the last."""
    kept = None
    with gpu_ipc.connect(path) as participant:
        pipe.send(participant.id)
        while (descriptor := pipe.recv()) is not None:
            kept = numpy.from_dlpack(participant.claim(descriptor, timeout=WATCHDOG))
            pipe.send(int(kept.sum()))
    del kept


def child_of(session: gpu_ipc.Session) -> tuple[multiprocessing.process.BaseProcess, Connection, gpu_ipc.ParticipantId]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_and_tell, args=(session.path, theirs), daemon=True)
    process.start()
    theirs.close()
    participant = hear(ours)
    assert isinstance(participant, gpu_ipc.ParticipantId)
    return process, ours, participant


def test_a_spawned_process_reads(session: gpu_ipc.Session) -> None:
    process, pipe, participant = child_of(session)
    assert session.wait_for_participants(1, WATCHDOG) == [participant]
    array = numpy.asarray(session.alloc(1000))
    for value in range(3):
        array[:] = value
        pipe.send(session.share(array, to=participant))
        assert hear(pipe) == 1000 * value
    pipe.send(None)
    process.join(WATCHDOG)
    assert process.exitcode == 0
    del array
    until(lambda: settled(session), "the consumer's leases end with it")


def test_what_a_killed_process_held_comes_back(session: gpu_ipc.Session) -> None:
    process, pipe, participant = child_of(session)
    pipe.send(session.share(session.alloc(1000), to=participant))
    assert hear(pipe) is not None
    assert session.stats().held == 1
    holder = session.stats().holders[0]
    assert (holder.pid, holder.leases, holder.bytes) == (process.pid, 1, 1000)
    process.kill()
    process.join()
    until(lambda: settled(session), "its death is proven")
    assert session.stats().deaths == 1
    with pytest.raises(gpu_ipc.ParticipantGone):
        session.share(session.alloc(1), to=participant)


# Shares a block whose contents are not there yet, and never will be.
STALLED = """
import sys, gpu_ipc
from gpu_ipc import _gpu_ipc
session = gpu_ipc.Session("host:0", sys.argv[1])
block = session.alloc(64)
stream = gpu_ipc.Stream("host:0")
_gpu_ipc._stall(stream)
print(bytes(session.share(block, to=session.ticket(None), stream=stream)).hex(), flush=True)
sys.stdin.read()
"""


def test_what_was_pending_when_its_producer_died_is_garbage(path: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as producer:
        assert producer.stdout is not None
        ticket = bytes.fromhex(producer.stdout.readline())
        with gpu_ipc.connect(path) as participant:
            received = participant.claim(ticket, timeout=WATCHDOG)
            assert received.state == "pending" and "pending" in repr(received)
            with pytest.raises(gpu_ipc.Timeout):
                received.wait(timeout=0.01)
            ended: list[gpu_ipc.Error] = []

            def wait() -> None:
                try:
                    received.wait()
                except gpu_ipc.Error as error:
                    ended.append(error)

            waiting = threading.Thread(target=wait)
            waiting.start()
            producer.kill()
            waiting.join(WATCHDOG)
            assert [(type(error), error.code) for error in ended] == [(gpu_ipc.Stale, 104)]
            assert received.state == "poisoned" and participant.is_producer_gone
            for take in (gpu_ipc.Received.wait, numpy.from_dlpack, memoryview, gpu_ipc.Received.forward):
                with pytest.raises((gpu_ipc.Stale, gpu_ipc.ProducerGone)) as caught:
                    take(received)
                assert take is gpu_ipc.Received.forward or "garbage" in str(caught.value), take
            # A consumer that asks for no order gets what there is.
            assert "dltensor" in repr(received.__dlpack__(stream=-1))
            received.release()


def test_a_thousand_rounds_leave_nothing(session: gpu_ipc.Session) -> None:
    """A tenth of the consumers are killed while they hold an array, and one array is somebody else's."""
    from gpu_ipc._gpu_ipc import _PlainMemory

    rounds = int(os.environ.get("GPU_IPC_TEST_ROUNDS", "100"))
    plain = numpy.from_dlpack(_PlainMemory(1 << 16, "host:0"))
    counts = sys.getrefcount(plain)
    process, pipe, participant = child_of(session)
    for turn in range(rounds):
        array = plain[turn : turn + 256] if turn % 2 else numpy.asarray(session.alloc(256))
        array[:] = 1
        pipe.send(session.share(array, to=participant))
        assert hear(pipe) == 256
        if turn % 10 == 9:
            process.kill()
            process.join()
            process, pipe, participant = child_of(session)
    pipe.send(None)
    process.join(WATCHDOG)
    del array
    until(lambda: settled(session), "every lease ends")
    until(lambda: sys.getrefcount(plain) == counts, "every reference is dropped")
    session.trim()
    stats = session.stats()
    assert (stats.live_bytes, stats.leaked_blocks, stats.in_flight, stats.deaths) == (0, 0, 0, rounds // 10)


def test_objects_of_a_parent_are_refused_in_a_forked_child(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant, tmp_path: pathlib.Path
) -> None:
    block = session.alloc(64)
    array = numpy.asarray(block)
    descriptor = session.share(block, to=participant.id)
    received = participant.claim(descriptor)
    log = tmp_path / "log"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            tries = [
                lambda: session.share(array),
                lambda: session.alloc(1),
                lambda: session.stats(),
                lambda: session.collect(),
                lambda: session.wait_for_participants(1),
                lambda: participant.claim(descriptor),
                lambda: participant.try_claim(descriptor),
                lambda: received.forward(),
            ]
            for place, attempt in enumerate(tries):
                try:
                    attempt()
                except gpu_ipc.Forked as error:
                    assert "in the child" in str(error), error
                else:
                    raise AssertionError(f"try {place} was let through")
            # What it opens itself works.
            with gpu_ipc.Session("host:0", str(tmp_path / "own")) as own, gpu_ipc.connect(own.path) as other:
                again = other.claim(own.share(own.alloc(8), to=other.id))
                assert len(again) == 8
            code = 0
        except BaseException as error:
            log.write_text(repr(error))
        finally:
            # The parent's objects die here: nothing of them may change.
            del block, array, received, descriptor
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, log.read_text()
    assert session.stats().held == 1 and received.state == "ready"


def test_what_must_not_be_pickled_says_what_to_send(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    received = participant.claim(session.share(session.alloc(1), to=participant.id))
    for one, remedy in ((session, "path"), (participant, "path"), (received, "forward")):
        with pytest.raises(gpu_ipc.Invalid, match=remedy):
            pickle.dumps(one)


def test_what_is_forwarded_outlives_who_forwarded_it(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    array = numpy.asarray(session.alloc(24)).reshape(4, 6)
    array[:] = numpy.arange(24).reshape(4, 6)
    received = participant.claim(session.share(array[1:, ::2], to=participant.id, meta=b"m"))
    with gpu_ipc.connect(session.path) as second:
        descriptor = received.forward(second.id, timeout=WATCHDOG)
        received.release()
        got = second.claim(descriptor, timeout=WATCHDOG)
        assert numpy.array_equal(numpy.from_dlpack(got), array[1:, ::2]) and got.meta == b"m"
        assert second.claim(descriptor.__class__(bytes(session.share(array, to=second)))).shape == (4, 6)


# Shares one block with the process that claims it.
PRODUCER = """
import sys, gpu_ipc
session = gpu_ipc.Session("host:0", sys.argv[1])
block = session.alloc(8)
print(bytes(session.share(block, to=session.ticket(None))).hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "wait",
    [
        "session.wait_for_participants(1)",
        "block.wait_released()",
        "stopped.claim(ticket)",
        "stopped.claim_many([ticket])",
        "gpu_ipc.inspect(other, timeout=None)",
        "gpu_ipc.connect(other, timeout=None)",
        "session.close(timeout=None)",
        "stalled.synchronize()",
        "session.share(block, to=session.ticket(), copy=True, stream=stalled)",
    ],
)
def test_ctrl_c_ends_every_wait(wait: str, tmp_path: pathlib.Path) -> None:
    program = f"""
        import os, signal, subprocess, sys, threading, time
        import gpu_ipc

        producer = subprocess.Popen(
            [sys.executable, "-c", {PRODUCER!r}, {str(tmp_path / "other")!r}],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        ticket = bytes.fromhex(producer.stdout.readline())
        other = {str(tmp_path / "other")!r}
        session = gpu_ipc.Session("host:0", {str(tmp_path / "s")!r})
        stopped = gpu_ipc.connect(other)
        block = session.alloc(8)
        keep = session.share(block, ttl=0)
        stop(producer.pid)
        if "stalled" in {wait!r}:
            from gpu_ipc import _gpu_ipc
            stalled = gpu_ipc.Stream("host:0")
            _gpu_ipc._stall(stalled)
    """
    # What is stalled is never over, and the end of a stream waits for it.
    clean = "os.kill(producer.pid, signal.SIGKILL); producer.wait(); os._exit(0)"
    interrupted(textwrap.dedent(program), wait, clean)


ENDS = ends(
    "session, participant, received, view, array, block, adopted",
    "assert len(participant.claim(session.share(array, to=participant.id))) == 64",
    "numpy.from_dlpack(participant.claim(session.share(array, to=participant.id)))",
)


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_interpreter_ends_quietly(end: str, tmp_path: pathlib.Path) -> None:
    program = f"""
import numpy
import gpu_ipc
from gpu_ipc._gpu_ipc import _PlainMemory
session = gpu_ipc.Session("host:0", {str(tmp_path / "s")!r})
participant = gpu_ipc.connect(session.path)
block = session.alloc(64)
array = numpy.asarray(block)
received = participant.claim(session.share(array, to=participant.id))
view = numpy.from_dlpack(received)
adopted = participant.claim(session.share(_PlainMemory(4096, "host:0"), to=participant.id))
{end}
"""
    assert said(program) == (0, "", "")


def test_many_threads_share_claim_and_drop_at_once(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    from gpu_ipc._gpu_ipc import _PlainMemory

    plain = numpy.from_dlpack(_PlainMemory(1 << 16, "host:0"))
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(200):
                array = plain[seed:][: 100 + turn] if turn % 2 else numpy.asarray(session.alloc(100 + turn))
                received = participant.claim(session.share(array, to=participant.id))
                assert numpy.from_dlpack(received).shape == array.shape
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    until(lambda: settled(session), "nothing is held")


def test_the_library_speaks_to_logging_and_prints_nothing(tmp_path: pathlib.Path) -> None:
    program = textwrap.dedent(f"""
        import logging, sys, time
        lines = []
        class Take(logging.Handler):
            def emit(self, record):
                lines.append((record.name, record.levelname, record.getMessage()))
        if len(sys.argv) > 1:
            logging.getLogger("gpu_ipc").addHandler(Take())
            logging.getLogger("gpu_ipc").setLevel(logging.DEBUG)
        import gpu_ipc
        session = gpu_ipc.Session("host:0", {str(tmp_path / "s")!r})
        end = time.monotonic() + {WATCHDOG}
        while len(sys.argv) > 1 and not lines:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert all(name == "gpu_ipc" for name, _, _ in lines)
        assert len(sys.argv) == 1 or "session open" in lines[0][2], lines
    """)
    for arguments in ([], ["listen"]):
        ran = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            timeout=2 * WATCHDOG,
            check=False,
        )
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_session_whose_thread_broke_tells_everybody(tmp_path: pathlib.Path) -> None:
    """A panic on it, as of a subscriber of the library's events: nobody waits for ever, and nothing is printed."""
    program = textwrap.dedent(f"""
        import logging, select
        lines = []
        class Take(logging.Handler):
            def emit(self, record):
                lines.append((record.levelname, record.getMessage()))
        logging.getLogger("gpu_ipc").addHandler(Take())
        import gpu_ipc
        from gpu_ipc import _gpu_ipc
        session = gpu_ipc.Session("host:0", {str(tmp_path / "s")!r})
        first = gpu_ipc.connect(session.path)
        block = session.alloc(8)
        received = first.claim(session.share(block, to=first.id))
        def hear(side, kind):
            while True:
                assert select.select([side], [], [], {WATCHDOG})[0], kind
                for notice in side.notices():
                    if notice.kind == kind:
                        return notice
        hear(session, "joined")
        _gpu_ipc._panic_on_sessions_thread()
        participants = [first]
        try:
            # The session says that it has welcomed it, and panics.
            participants.append(gpu_ipc.connect(session.path, timeout={WATCHDOG}))
        except gpu_ipc.ConnectFailed:
            pass
        notice = hear(session, "failed")
        assert notice.participant is None and "failed" in repr(notice)
        try:
            gpu_ipc.connect(session.path, timeout={WATCHDOG})
            raise AssertionError("nobody listens")
        except gpu_ipc.ConnectFailed:
            pass
        try:
            session.share(block, to=first.id)
            raise AssertionError("nobody would answer for it")
        except gpu_ipc.Error as error:
            assert "the session's thread" in str(error), error
        for participant in participants:
            hear(participant, "producer_gone")
            assert participant.is_producer_gone
        # What is held stays good, and the program may close the session.
        assert bytes(received) == bytes(8) and session.stats().live_blocks == 1
        received.release()
        session.close()
        while not lines:
            pass
        assert all(level == "ERROR" and "gpu-ipc-session panicked" in text for level, text in lines), lines
    """)
    assert said(program) == (0, "", "")
