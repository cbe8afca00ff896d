"""Pools under PyTorch: seals behind kernels, holders that are killed, tensors that are born in a pool, and what each costs.

    python pools.py --program ./gpu-ipc [--device cuda:0] [--rounds 30] [--gib 8] [NAME...]

This process is the successor: it has its context and its library. Holders are processes of this file that are killed with
SIGKILL. Every byte of every block that is listed is looked at.
"""

import argparse
import contextlib
import gc
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import running
import torch

import gpu_ipc
from gpu_ipc import _gpu_ipc

options: argparse.Namespace
broker: gpu_ipc.Broker
folder: str

PATIENCE = 60.0
BLOCKS = 64
BLOCK = 2 << 20
MIB = 1 << 20


def key(fill: int) -> bytes:
    return bytes([fill] * 16)


def shape_of(blocks: int) -> dict[str, tuple[str, tuple[int, int]]]:
    return {"kv": ("uint8", (blocks, BLOCK))}


@contextlib.contextmanager
def a_pool(name: str, blocks: int = BLOCKS) -> Iterator[gpu_ipc.Pool]:
    """Make a pool, and remove it at the end."""
    pool = broker.create_pool(name, shape_of(blocks), gpu_ipc.journal_bytes(blocks))
    try:
        yield pool
    finally:
        broker.remove(name)


def adopted(name: str) -> gpu_ipc.Pool:
    """Adopt as soon as the last holder's death is proven, and its GPU work can have ended."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return broker.adopt(name)
        except gpu_ipc.Refused as error:
            assert "is held by" in str(error) or "its GPU work may go on" in str(error), error
            assert time.monotonic() < end, error
            time.sleep(0.001)


def whole(pool: gpu_ipc.Pool) -> dict[int, int]:
    """Return what each listed block is filled with, after a look at every byte of it."""
    kv = pool.tensors()["kv"]
    found = {}
    for sealed in pool.sealed():
        fill = sealed.key[0]
        assert sealed.key == key(fill) and bool((kv[sealed.block] == fill).all()), f"{sealed} is listed and not whole"
        found[sealed.block] = fill
    return found


class Holder:
    """A process that holds a pool, in one of the roles below."""

    def __init__(self, role: str, name: str, blocks: int = BLOCKS) -> None:
        command = [sys.executable, __file__, "--device", options.device, "--dir", folder, "--role", role]
        self.process = subprocess.Popen(
            [*command, "--blocks", str(blocks), "--name", name], stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"a holder ended with {self.process.wait()}"
        return line

    def killed(self) -> list[str]:
        """Kill it, and return what else it had said."""
        self.process.kill()
        assert self.process.stdout is not None
        # A line that the death cut short is none.
        rest = [line for line in self.process.stdout if line.endswith("\n")]
        self.process.wait()
        self.process.stdout.close()
        return rest


def fill(pool: gpu_ipc.Pool, kv: torch.Tensor, block: int, value: int, stream: torch.cuda.Stream) -> None:
    """Fill a block by several kernels on a stream, and queue its seal."""
    pool.invalidate(block)
    with torch.cuda.stream(stream):
        for part in kv[block].view(8, -1):
            part.fill_(value)
    pool.seal(block, key(value), stream)


def churn(pool: gpu_ipc.Pool) -> None:
    """Seal each even block once and say so; fill the odd ones again and again, on two streams."""
    kv, streams = pool.tensors()["kv"], [torch.cuda.Stream(), torch.cuda.Stream()]
    evens = list(range(0, len(kv), 2))
    random.shuffle(evens)
    for turn in range(1 << 30):
        block = random.randrange(len(kv) // 2) * 2 + 1
        # Those of a block are on one stream.
        fill(pool, kv, block, random.randrange(1, 256), streams[block // 2 % 2])
        if turn % 8 == 0 and evens:
            even, value = evens.pop(), random.randrange(1, 256)
            fill(pool, kv, even, value, streams[0])
            streams[0].synchronize()
            print(even, value, flush=True)


def full(pool: gpu_ipc.Pool) -> None:
    """Fill and seal every block, and wait for the end."""
    kv, stream = pool.tensors()["kv"], torch.cuda.Stream()
    for block in range(len(kv)):
        pool.invalidate(block)
        with torch.cuda.stream(stream):
            kv[block].fill_(block % 255 + 1)
    pool.seal_all([(block, key(block % 255 + 1)) for block in range(len(kv))], stream)
    stream.synchronize()
    print("ready", flush=True)
    while True:
        time.sleep(1)


def role() -> None:
    with gpu_ipc.connect_broker(options.dir, options.device, name="a holder") as own:
        try:
            pool = own.adopt(options.name)
        except gpu_ipc.NotFound:
            pool = own.create_pool(options.name, shape_of(options.blocks), gpu_ipc.journal_bytes(options.blocks))
        {"churn": churn, "full": full}[options.role](pool)


# The checks.


def a_seal_comes_behind_the_kernels_before_it() -> None:
    with a_pool("behind") as pool:
        kv, stream, other = pool.tensors()["kv"], torch.cuda.Stream(), torch.cuda.Stream()
        for turn in range(1, 6):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(400_000_000)
            fill(pool, kv, 0, turn, stream)
            fill(pool, kv, turn, turn, other)
            other.synchronize()
            listed = {sealed.block for sealed in pool.sealed()}
            assert not stream.query(), "the work was over before it was looked at"
            assert 0 not in listed and turn in listed, listed
            stream.synchronize()
            assert whole(pool)[0] == turn
        del kv
        pool.close()


def a_killed_holders_listed_blocks_are_whole() -> None:
    listed = lost = kept = 0
    deaths = []
    with a_pool("killed") as pool:
        pool.close()
        for turn in range(options.rounds):
            holder = Holder("churn", "killed")
            said = [holder.line()]
            time.sleep(random.random() / 5)
            begin = time.perf_counter()
            said += holder.killed()
            pool = adopted("killed")
            deaths.append((time.perf_counter() - begin) * 1e3)
            assert (pool.generation, pool.previous) == (2 * turn + 3, "died"), (pool, pool.previous)
            found = whole(pool)
            for line in said:
                block, value = map(int, line.split())
                kept += 1
                lost += found.get(block) != value
            listed += len(found)
            pool.close()
    assert lost == 0, f"{lost} blocks of {kept} that were sealed are not listed"
    assert listed >= options.rounds and kept >= options.rounds
    print(
        f"{options.rounds} holders killed: {listed} listed blocks whole, {kept} that were said to be sealed all listed;"
        f" adopted {statistics.median(deaths):.1f} ms after the kill (median), {max(deaths):.1f} ms at most"
    )


def pytorch_allocates_in_the_pool_where_the_last_holder_did() -> None:
    sizes = [3 * MIB, 40 * MIB, 24 * MIB, 5 * MIB]
    offsets: list[list[int]] = []
    with a_pool("torch") as pool:
        for generation in (1, 2):
            if generation == 2:
                pool = broker.adopt("torch")
            ((start, size),) = pool.regions
            torch_pool = pool.torch_pool()
            assert pool.torch_pool() is torch_pool
            stream = torch.cuda.Stream()
            with torch.cuda.use_mem_pool(torch_pool), torch.cuda.stream(stream):
                tensors = [torch.empty(size, dtype=torch.uint8, device=options.device) for size in sizes]
                try:
                    tensors.append(torch.empty(size, dtype=torch.uint8, device=options.device))
                    raise AssertionError("more memory than the pool has")
                except torch.OutOfMemoryError:
                    pass
            # What a comparison takes is PyTorch's own again.
            with torch.cuda.stream(stream):
                for number, tensor in enumerate(tensors, 1):
                    assert start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= start + size
                    if generation == 1:
                        tensor.fill_(number)
                    else:
                        assert bool((tensor == number).all()), f"tensor {number} has other bytes"
            stream.synchronize()
            offsets.append([tensor.data_ptr() - start for tensor in tensors])
            try:
                pool.close()
                raise AssertionError("a pool was closed under its tensors")
            except gpu_ipc.Invalid as error:
                assert "kept by" in str(error), error
            del torch_pool, tensors, tensor
            gc.collect()
            torch.cuda.empty_cache()
            pool.close()
    assert offsets[0] == offsets[1], offsets
    print(f"tensors at {offsets[0]} for both holders")


def a_reader_copies_what_is_whole() -> None:
    with a_pool("read") as pool:
        kv, stream = pool.tensors()["kv"], torch.cuda.Stream()
        fill(pool, kv, 3, 9, stream)
        stream.synchronize()
        reader = broker.read_pool("read")
        found = reader.look(3)
        assert found is not None and reader.read_whole(3, "kv", 3 * BLOCK, BLOCK) == (found, bytes([9]) * BLOCK)
        copy = reader.tensors()["kv"][3].clone()
        torch.cuda.synchronize()
        assert reader.is_still(found) and bool((copy == 9).all())
        fill(pool, kv, 3, 10, stream)
        assert not reader.is_still(found)
        stream.synchronize()
        del kv, reader, copy
        pool.close()


def seals_of_64_blocks_beside_the_raw_batch() -> None:
    with a_pool("seals") as pool:
        own, stream, python = gpu_ipc.Stream(options.device), torch.cuda.Stream(), []
        pairs = [(block, key(block + 1)) for block in range(64)]
        _gpu_ipc._time_seals(pool, own, 64, 200)
        seals, raw = _gpu_ipc._time_seals(pool, own, 64, 2000)
        for _ in range(500):
            for block, _ in pairs:
                pool.invalidate(block)
            begin = time.perf_counter_ns()
            pool.seal_all(pairs, stream)
            python.append(time.perf_counter_ns() - begin)
            stream.synchronize()
        assert len(pool.sealed()) == 64 and len(seals) == len(raw) == 2000
        pool.close()
    figures = {name: statistics.median(times) / 1e3 for name, times in (("seals", seals), ("raw", raw), ("python", python))}
    print(json.dumps({"64 blocks, us, medians": figures, "ratio": figures["seals"] / figures["raw"], "goal": 1.3}))


def a_successor_answers_beside_a_filling_from_pinned_memory() -> None:
    blocks = options.gib * (1 << 30) // BLOCK
    holder = Holder("full", "answers", blocks)
    assert holder.line() == "ready\n"
    # What is warm in an engine that waits for its turn: the context, and the kernels of the answer.
    warm = torch.zeros(BLOCK, dtype=torch.uint8, device=options.device)
    assert bool((warm == 0).all())
    torch.cuda.synchronize()
    begin = time.perf_counter()
    holder.process.kill()
    pool = adopted("answers")
    held = time.perf_counter()
    kv = pool.tensors()["kv"]
    by_key = {sealed.block: sealed.key[0] for sealed in pool.sealed()}
    block = random.randrange(blocks)
    right = bool((kv[block] == by_key[block]).all())
    answered = time.perf_counter()
    holder.killed()
    try:
        assert right and pool.previous == "died" and len(by_key) == blocks == len(whole(pool))
        pinned = torch.full((min(blocks, 512), BLOCK), 5, dtype=torch.uint8).pin_memory()
        torch.cuda.synchronize()
        filling = time.perf_counter()
        for first in range(0, blocks, len(pinned)):
            part = kv[first : first + len(pinned)]
            part.copy_(pinned[: len(part)], non_blocking=True)
        torch.cuda.synchronize()
        filled = time.perf_counter()
        assert all(bool((part == 5).all()) for part in kv.split(len(pinned)))
        del kv, part
        pool.close()
    finally:
        broker.remove("answers")
    figures = {
        "gib": options.gib,
        "adopted_ms": (held - begin) * 1e3,
        "answered_ms": (answered - begin) * 1e3,
        "goal_ms": 200,
        "filled_ms": (filled - filling) * 1e3,
        "ratio": (answered - begin) / (filled - filling),
        "goal": 0.2,
    }
    print(json.dumps(figures))


CHECKS = [
    a_seal_comes_behind_the_kernels_before_it,
    a_reader_copies_what_is_whole,
    pytorch_allocates_in_the_pool_where_the_last_holder_did,
    seals_of_64_blocks_beside_the_raw_batch,
    a_successor_answers_beside_a_filling_from_pinned_memory,
    a_killed_holders_listed_blocks_are_whole,
]


def main() -> int:
    global options, broker, folder
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="gpu-ipc", help="the program of this project")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=30, help="how many holders are killed")
    parser.add_argument("--gib", type=int, default=8, help="the pool that is answered from")
    for name in ("--role", "--dir", "--name"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.role:
        role()
        return 1
    with tempfile.TemporaryDirectory() as folder, running.broker(options.program, folder, options.device):
        with gpu_ipc.connect_broker(folder, options.device, name="the successor") as broker:
            return running.run("python-pools", running.choose(parser, options.names, CHECKS))


if __name__ == "__main__":
    sys.exit(main())
