"""Fixtures: a session on the device that `GPU_IPC_TEST_DEVICE` names, the host's unless said."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

import gpu_ipc

DEVICE = os.environ.get("GPU_IPC_TEST_DEVICE", "host:0")
# Who waits longer hangs.
WATCHDOG = 120.0


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "session")


@pytest.fixture
def session(path: str) -> Iterator[gpu_ipc.Session]:
    with gpu_ipc.Session(DEVICE, path) as session:
        yield session


@pytest.fixture
def participant(session: gpu_ipc.Session) -> Iterator[gpu_ipc.Participant]:
    with gpu_ipc.connect(session.path) as participant:
        yield participant


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, and fail when it does not come."""
    end = time.monotonic() + WATCHDOG
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


# A broker in a process of its own.
SERVER = "import sys; from gpu_ipc import _gpu_ipc; _gpu_ipc._serve_broker(sys.argv[1], sys.argv[2])"


def serve(directory: pathlib.Path) -> "subprocess.Popen[bytes]":
    """Start a broker, and wait until it listens."""
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(directory), DEVICE])

    def listens() -> bool:
        assert server.poll() is None, "the broker ended"
        try:
            gpu_ipc.connect_broker(directory, DEVICE).close()
        except gpu_ipc.ConnectFailed:
            return False
        return True

    until(listens, "the broker does not listen")
    return server


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    directory = tmp_path / "broker"
    directory.mkdir(mode=0o700)
    server = serve(directory)
    yield directory
    server.kill()
    server.wait()


@pytest.fixture
def broker(directory: pathlib.Path) -> Iterator[gpu_ipc.Broker]:
    with gpu_ipc.connect_broker(directory, DEVICE, name="the test") as broker:
        yield broker


def settled(session: gpu_ipc.Session) -> bool:
    """Say whether nothing of a session is held any more."""
    session.collect()
    stats = session.stats()
    return stats.live_blocks == 0 and stats.held == 0


def said(program: str) -> tuple[int, str, str]:
    """Run a program whose warnings are errors, and return its code and what it printed."""
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=WATCHDOG * 2,
        check=False,
    )
    return ran.returncode, ran.stdout, ran.stderr


def ends(names: str, late: str, work: str) -> dict[str, str]:
    """List ways in which objects of these names may be alive or die at the end of a program.

    `late` is what is still done with them at exit, `work` what threads do with them meanwhile.
    """
    return {
        "in order": f"del {names}",
        "against the order": f"del {', '.join(reversed(names.split(', ')))}",
        "by the module": "",
        "kept by sys": f"import sys; sys.kept = [{names}]",
        "in a cycle": f"cycle = [{names}]; cycle.append(cycle); del {names}, cycle",
        "at exit": f"""
import atexit
@atexit.register
def late():
    {late}
""",
        "while threads work": f"""
import threading
def work():
    while True:
        {work}
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
""",
    }


def interrupted(program: str, wait: str, clean: str) -> None:
    """Run a program that then waits, and end the wait by Ctrl-C. It may `stop` another process before."""
    program = f"""
import os, pathlib, signal, sys, threading, time

def stop(pid):
    # The signal comes to one thread, which stops the others once it runs.
    os.kill(pid, signal.SIGSTOP)
    def runs(thread):
        return thread.read_text().rpartition(") ")[2][0] != "T"
    while any(map(runs, pathlib.Path(f"/proc/{{pid}}/task").glob("*/stat"))):
        time.sleep(0)

# A shell that runs this in the background has the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
{program}

def wait():
    {wait}

def tell():
    # Where the main thread has given the interpreter's lock to this one, it is waiting.
    while sys._current_frames()[threading.main_thread().ident].f_code is not wait.__code__:
        time.sleep(0)
    print("waiting", flush=True)

threading.Thread(target=tell).start()
try:
    wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
finally:
    {clean}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "waiting\n", process.stderr.read()
    process.send_signal(signal.SIGINT)
    told, error = process.communicate(timeout=WATCHDOG)
    assert told == "interrupted\n", error
