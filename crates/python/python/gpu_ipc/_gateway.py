"""Gets an object from another host, by the program `gpu-ipc-gateway`: the network is in no process of the user's."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

from gpu_ipc._errors import Aborted, Error, Invalid, Mismatch, NotFound, Refused, Timeout, Unavailable

PROGRAM = "gpu-ipc-gateway"

# What the program says of a failure beside its text.
_KINDS: dict[str, type[Error]] = {
    "invalid": Invalid,
    "unavailable": Unavailable,
    "not_found": NotFound,
    "unreached": Unavailable,
    "busy": Timeout,
    "refused": Refused,
    "failed": Aborted,
    "stuck": Aborted,
}


def program() -> str:
    """Find the program beside this Python, as an environment has it, or on the path."""
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    found = shutil.which(PROGRAM, path=os.pathsep.join(folders))
    if found is None:
        raise Unavailable(
            f"{PROGRAM} is neither beside {sys.executable} nor on the path; build it in the sources of gpu-ipc with "
            "`cargo install --path crates/gateway` (docs/HOSTS.md)"
        )
    return found


def pull(
    directory: str, device: str, name: str, host: str | None, epoch: int | None, timeout: float | None
) -> dict[str, Any]:
    """Run the program until it ends. It is killed, and its memory freed, when the wait ends otherwise."""
    # An argument that begins with a dash is no option behind these.
    command = [program(), "pull", f"--broker={directory}", f"--device={device}", "--json"]
    if host is not None:
        command.append(f"--from={host}")
    if epoch is not None:
        command.append(f"--epoch={epoch}")
    try:
        process = subprocess.Popen(
            [*command, "--", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be started: {error}") from error
    with process:
        try:
            output, complaint = process.communicate(timeout=timeout)
        except BaseException as ended:
            # Once it is dead nothing writes to its memory, which the broker frees.
            process.kill()
            process.wait()
            if isinstance(ended, subprocess.TimeoutExpired):
                raise Timeout(f"{name} was not pulled within {timeout} s; pull again: nothing of it is here") from None
            raise
    complaint = complaint.strip().removeprefix(f"{PROGRAM}: ")
    try:
        said = json.loads(output or "{}")
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise Mismatch(f"{command[0]} answered {output[:200]!r}, and not JSON; install the version of this module")
    if process.returncode == 0 and "epoch" in said:
        return said
    why = said.get("error") or complaint or f"{command[0]} ended with {process.returncode}"
    raise _KINDS.get(said.get("kind", ""), Invalid if process.returncode == 2 else Aborted)(why)
