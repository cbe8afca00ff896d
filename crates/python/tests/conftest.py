"""Fixtures: a session on the device that `GPU_IPC_TEST_DEVICE` names, the host's unless said."""

import os
import pathlib
import time
from collections.abc import Callable, Iterator

import pytest

import gpu_ipc

DEVICE = os.environ.get("GPU_IPC_TEST_DEVICE", "host:0")
# Who waits longer hangs.
WATCHDOG = 60.0


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


def settled(session: gpu_ipc.Session) -> bool:
    """Say whether nothing of a session is held any more."""
    session.collect()
    stats = session.stats()
    return stats.live_blocks == 0 and stats.held == 0
