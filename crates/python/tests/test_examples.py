"""Every example runs to its end."""

import pathlib
import subprocess
import sys

import pytest
from conftest import DEVICE

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    "command",
    [
        ["weights.py", "--rounds", "3", "--tensors", "200", "--readers", "4"],
        ["camera.py", "--frames", "100", "--subscribers", "3"],
        ["kv_handoff.py", "--requests", "20", "--decoders", "2"],
    ],
    ids=lambda command: command[0],
)
def test_an_example_runs(command: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, EXAMPLES / command[0], "--device", DEVICE, *command[1:]],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(command[0].removesuffix(".py") + ":") and not ran.stderr, ran.stderr


def test_the_first_program_runs_on_any_machine() -> None:
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "first.py"], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("their sum is 499,500\n") and not ran.stderr, ran.stderr
