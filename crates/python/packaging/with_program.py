"""Maturin's backend, with the program `gpu-ipc` among the scripts of the wheel.

Maturin takes the library of a crate or its programs, not both, so Cargo builds the program first, by the arguments that maturin is
given: `--profile`, `--target`, and with `--zig` the glibc that `--compatibility manylinux_2_28` names.

    python with_program.py [MATURIN'S ARGUMENTS]      builds the program alone, for a `maturin build` with the same arguments
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import maturin
from maturin import (  # noqa: F401  a frontend calls them here
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

CRATE = Path(__file__).resolve().parents[1]
# `tool.maturin.data` of pyproject.toml. Maturin wants it to be there before it says what a wheel would be named.
SCRIPTS = CRATE / "gpu_ipc.data" / "scripts"
SCRIPTS.mkdir(parents=True, exist_ok=True)

Settings = Mapping[str, Any] | None


def command(arguments: Sequence[str]) -> list[str]:
    """Return Cargo's command for the program, stripped as the wheel's library is."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--profile", default=maturin.get_config()["profile"])
    parser.add_argument("--target")
    parser.add_argument("--zig", action="store_true")
    parser.add_argument("--compatibility", default="")
    given, _ = parser.parse_known_args(arguments)
    cargo = ["cargo-zigbuild"] if given.zig else ["cargo"]
    cargo += ["rustc", "--package", "gpu-ipc-cli", "--bin", "gpu-ipc", "--profile", given.profile]
    if given.target:
        version = given.compatibility.removeprefix("manylinux_").replace("_", ".")
        cargo += ["--target", f"{given.target}.{version}" if given.zig and version else given.target]
    return [*cargo, "--message-format", "json-render-diagnostics", "--", "-C", "strip=symbols"]


def build_program(arguments: Sequence[str]) -> None:
    """Build the program and lay it where maturin takes the wheel's scripts from."""
    built = subprocess.run(command(arguments), cwd=CRATE, stdout=subprocess.PIPE, check=False)
    if built.returncode != 0:
        sys.exit(f"Cargo could not build the program gpu-ipc: exit status {built.returncode}")
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    made = [message["executable"] for message in messages if message.get("executable")]
    if len(made) != 1:
        sys.exit(f"Cargo built {len(made)} programs, and not gpu-ipc alone: {made}")
    # By another name first: a program that runs keeps the file that it has.
    new = SCRIPTS / f".gpu-ipc.{os.getpid()}"
    shutil.copy(made[0], new)
    new.replace(SCRIPTS / "gpu-ipc")


def build_wheel(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    build_program(maturin.get_maturin_pep517_args(settings))
    return maturin.build_wheel(directory, settings, metadata)


def build_editable(directory: str, settings: Settings = None, metadata: str | None = None) -> str:
    build_program(maturin.get_maturin_pep517_args(settings))
    return maturin.build_editable(directory, settings, metadata)


if __name__ == "__main__":
    os.chdir(CRATE)
    build_program(sys.argv[1:])
