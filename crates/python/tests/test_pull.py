"""Objects of other hosts: what `Broker.pull` asks the gateway's program for, and what it makes of the answers."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from conftest import DEVICE, WATCHDOG, serve, until

import gpu_ipc
from gpu_ipc import _gateway

REPORT = {"name": "model", "epoch": 7, "identity": "00", "from": "one", "bytes": 9, "retries": 1, "was_here": False}


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Make a folder that alone is the path."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    # An environment may have the program beside its Python.
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


def program(folder: pathlib.Path, text: str) -> None:
    path = folder / _gateway.PROGRAM
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o700)


def test_the_program_is_asked_and_its_figures_are_returned(
    broker: gpu_ipc.Broker, directory: pathlib.Path, folder: pathlib.Path
) -> None:
    program(folder, f"printf '%s\\n' \"$@\" > {folder}/asked\necho '{json.dumps(REPORT)}'\n")
    assert broker.pull("model") == REPORT
    asked = (folder / "asked").read_text().splitlines()
    assert asked == ["pull", f"--broker={directory}", f"--device={DEVICE}", "--json", "--", "model"]
    broker.pull("--help", from_="one", epoch=7)
    assert (folder / "asked").read_text().splitlines()[4:] == ["--from=one", "--epoch=7", "--", "--help"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("invalid", gpu_ipc.Invalid),
        ("unavailable", gpu_ipc.Unavailable),
        ("not_found", gpu_ipc.NotFound),
        ("unreached", gpu_ipc.Unavailable),
        ("busy", gpu_ipc.Timeout),
        ("refused", gpu_ipc.Refused),
        ("failed", gpu_ipc.Aborted),
        ("stuck", gpu_ipc.Aborted),
        ("of a later version", gpu_ipc.Aborted),
    ],
)
def test_each_kind_of_failure_has_its_error(
    broker: gpu_ipc.Broker, folder: pathlib.Path, kind: str, expected: type[gpu_ipc.Error]
) -> None:
    said = json.dumps({"ok": False, "error": "no gateway announces model", "kind": kind})
    program(folder, f"echo '{said}'\nexit 1\n")
    with pytest.raises(expected, match="no gateway announces model") as raised:
        broker.pull("model")
    assert type(raised.value) is expected


def test_what_the_program_complains_of_is_told(broker: gpu_ipc.Broker, folder: pathlib.Path) -> None:
    program(folder, "echo 'gpu-ipc-gateway: no such option' >&2\nexit 2\n")
    with pytest.raises(gpu_ipc.Invalid, match="^no such option$"):
        broker.pull("model")
    program(folder, "kill -9 $$\n")
    with pytest.raises(gpu_ipc.Aborted, match="ended with -9"):
        broker.pull("model")
    for answer in ["pulled", "[1]", "3"]:
        program(folder, f"echo '{answer}'\n")
        with pytest.raises(gpu_ipc.Mismatch, match="not JSON"):
            broker.pull("model")
    program(folder, "true\n")
    with pytest.raises(gpu_ipc.Aborted, match="ended with 0"):
        broker.pull("model")


def test_without_the_program_it_is_said_how_to_get_it(broker: gpu_ipc.Broker, folder: pathlib.Path) -> None:
    with pytest.raises(gpu_ipc.Unavailable, match="cargo install --path crates/gateway"):
        broker.pull("model")
    (folder / _gateway.PROGRAM).write_text("#!/nowhere\n")
    (folder / _gateway.PROGRAM).chmod(0o700)
    with pytest.raises(gpu_ipc.Unavailable, match="cannot be started"):
        broker.pull("model")
    broker.close()
    with pytest.raises(gpu_ipc.Invalid, match="closed"):
        broker.pull("model")


def dies(pid_file: pathlib.Path) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


# The file is there whole, or not at all.
WAITS = "PATH=/usr/bin:/bin\necho $$ > {0}/new\nmv {0}/new {0}/pid\nexec sleep 1000\n"


def test_the_program_is_killed_when_the_time_is_over(broker: gpu_ipc.Broker, folder: pathlib.Path) -> None:
    program(folder, WAITS.format(folder))
    # However slowly it starts, one of these finds it running.
    for doublings in range(7):
        with pytest.raises(gpu_ipc.Timeout, match="nothing of it is here"):
            broker.pull("model", timeout=0.5 * 2**doublings)
        if (folder / "pid").exists():
            break
    dies(folder / "pid")


def test_the_program_is_killed_by_an_interrupt(broker: gpu_ipc.Broker, folder: pathlib.Path) -> None:
    program(folder, WAITS.format(folder))
    found = f"until [ -e {folder}/pid ]; do sleep 0.05; done; kill -INT {os.getpid()}"
    # A shell that runs this in the background has the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        watcher = subprocess.Popen(["/bin/sh", "-c", f"PATH=/usr/bin:/bin; {found}"])
        with pytest.raises(KeyboardInterrupt):
            broker.pull("model")
        watcher.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    dies(folder / "pid")


def address(number: int) -> str:
    """Make an address that no other process of this machine takes: all of 127 is this machine."""
    pid = os.getpid()
    return f"tcp/127.{128 + (pid >> 16 & 63)}.{pid >> 8 & 255}.{max(pid & 255, 1)}:{7500 + number}"


def test_a_replica_has_the_same_bytes(tmp_path: pathlib.Path) -> None:
    """Two brokers and two gateways on this machine; the bytes go by the plain TCP of tests."""
    try:
        gateway = _gateway.program()
    except gpu_ipc.Unavailable as unavailable:
        assert "GPU_IPC_REQUIRE_GATEWAY" not in os.environ, unavailable
        pytest.skip(str(unavailable))
    children: list[subprocess.Popen[bytes]] = []
    listens: list[str] = []
    try:
        for number, host in enumerate(["one", "two"]):
            directory = tmp_path / host
            directory.mkdir(mode=0o700)
            children.append(serve(directory))
            listens.append(address(number))
            command = [gateway, "run", "--broker", str(directory), "--device", DEVICE, "--host", host, "--insecure"]
            command += ["--transport", "tcp", "--listen", listens[-1]]
            command += [argument for other in listens[:-1] for argument in ("--peer", other)]
            children.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        contents = bytes(range(256)) * 4000
        with (
            gpu_ipc.connect_broker(tmp_path / "one", DEVICE) as one,
            gpu_ipc.connect_broker(tmp_path / "two", DEVICE) as two,
        ):
            assert one.put("model", {"weights": contents}) == 1
            status = [gateway, "status", "--json", "--broker", str(tmp_path / "two")]

            def runs() -> bool:
                return bool(json.loads(subprocess.run(status, capture_output=True, check=True).stdout))

            until(runs, "the second gateway does not run")

            def arrives() -> bool:
                try:
                    report = two.pull("model", timeout=WATCHDOG)
                except (gpu_ipc.NotFound, gpu_ipc.Unavailable):
                    return False
                assert (report["epoch"], report["home"]) == (1, "one"), report
                return True

            until(arrives, "no gateway has the object")
            assert bytes(two.open("model")["weights"]) == contents
            again = two.pull("model", epoch=1)
            assert again["was_here"], again
            with pytest.raises(gpu_ipc.Unavailable, match="no gateway of host nowhere was reached"):
                two.pull("model", from_="nowhere")
    finally:
        for child in reversed(children):
            child.send_signal(signal.SIGKILL)
            child.wait()
