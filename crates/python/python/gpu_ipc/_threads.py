"""The thread that gives up Python references which other threads left, and its end."""

import atexit
import logging
import os
import signal
import threading

from gpu_ipc import _gpu_ipc

_running: list[threading.Thread] = []

# What an instruction of the thread itself raises, as in `gpu_api::thread`.
_FAULTS = {signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}


def start() -> None:
    """Start the thread. Called by the native half, once in a process."""
    thread = threading.Thread(target=_gpu_ipc._keep, name="gpu-ipc", daemon=True)
    _running.append(thread)
    launch(thread)


def launch(thread: threading.Thread) -> None:
    """Start a thread with the program's signals blocked on it: it inherits its starter's mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare() -> None:
    """Stop the thread when the interpreter ends, and let a forked child begin afresh."""
    # Without a handler of the application's nothing is printed.
    logging.getLogger("gpu_ipc").addHandler(logging.NullHandler())
    atexit.register(_stop)
    os.register_at_fork(after_in_child=_forked)


def _stop() -> None:
    _gpu_ipc._stop()
    for thread in _running:
        thread.join()


def _forked() -> None:
    _running.clear()
    _gpu_ipc._forked()
