"""The program `gpu-ipc`, which the wheel installs beside the interpreter."""

import json
import pathlib
import signal
import subprocess
import sysconfig

import numpy
from conftest import DEVICE, WATCHDOG

import gpu_ipc

PROGRAM = pathlib.Path(sysconfig.get_path("scripts")) / "gpu-ipc"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=WATCHDOG, check=False)


def test_it_has_the_version_of_the_module() -> None:
    told = run("--version")
    assert (told.returncode, told.stdout) == (0, f"gpu-ipc {gpu_ipc.__version__}\n"), told.stderr


def test_the_demo_kills_processes_of_its_own() -> None:
    told = run("demo", "--backend", DEVICE.split(":")[0], "--blocks", "40", "--size", "4KiB", "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert (found["reclaimed_after_death"], found["bytes_leaked"]) == (8, 0)


def test_doctor_shares_memory_with_a_process_of_its_own() -> None:
    told = run("doctor", "--json", "--require", DEVICE.split(":")[0])
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["ok"] is True


def test_usage_that_it_does_not_know_is_refused() -> None:
    told = run("share")
    assert told.returncode == 2
    assert "unrecognized subcommand 'share'" in told.stderr


def test_its_broker_serves_this_process(tmp_path: pathlib.Path) -> None:
    broker = subprocess.Popen([PROGRAM, "broker", "--dir", tmp_path, "--device", DEVICE])
    try:
        ready = run("ready", "--broker", "--dir", str(tmp_path), "--timeout", str(int(WATCHDOG)))
        assert ready.returncode == 0, ready.stderr
        with gpu_ipc.connect_broker(tmp_path, DEVICE) as client:
            assert client.put("weights", {"w": numpy.arange(8)}) == 1
        assert "weights" in run("objects", "--dir", str(tmp_path)).stdout
        broker.send_signal(signal.SIGTERM)
        # No interpreter stands between the signal and the program.
        assert broker.wait(WATCHDOG) == -signal.SIGTERM
    finally:
        broker.kill()
        broker.wait()
