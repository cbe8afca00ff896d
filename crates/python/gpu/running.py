"""Chooses checks by their names, runs them, and says how each ended; the last line counts."""

import argparse
import contextlib
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator

Check = Callable[[], object]

# What takes longer hangs.
PATIENCE = 60.0


@contextlib.contextmanager
def broker(program: str, folder: str, device: str) -> Iterator[None]:
    """Have a broker serve a folder."""
    process = subprocess.Popen([program, "broker", "--dir", folder, "--device", device])
    try:
        end = time.monotonic() + PATIENCE
        while not pathlib.Path(folder, "broker").exists():
            assert process.poll() is None, "the broker ended"
            assert time.monotonic() < end, "the broker does not listen"
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.wait()


def choose(
    parser: argparse.ArgumentParser, names: list[str], checks: list[Check], alone: Iterable[Check] = ()
) -> list[Check]:
    """Return the checks of these names, of `checks` and `alone`; without names all of `checks`."""
    known = {check.__name__: check for check in [*checks, *alone]}
    unknown = set(names) - known.keys()
    if unknown:
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    return [known[name] for name in names] or checks


def run(title: str, chosen: list[Check], end: Callable[[], object] = lambda: None) -> int:
    """Run checks, then `end`; return the exit status, which is 1 also where nothing passed."""
    passed = failed = 0
    for check in chosen:
        start = time.monotonic()
        try:
            check()
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            print(f"FAILED {check.__name__}", flush=True)
            failed += 1
        else:
            print(f"ok {check.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
            passed += 1
    end()
    print(f"{title}: {passed} checks passed, {failed} failed, 0 skipped")
    return 1 if failed or not passed else 0
