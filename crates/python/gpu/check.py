"""What can only be checked on a GPU, with the array libraries that are there: one line a check.

    python check.py [--device cuda:0] [--rounds 1000] [NAME...]

A library that is missing is a failure, unless it is named with --without. Short checks come first.
"""

import argparse
import gc
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import running  # noqa: E402
import torch  # noqa: E402
from consumers import AHEAD, PATIENCE, WAYS, Pool, told_of  # noqa: E402

import gpu_ipc  # noqa: E402

options: argparse.Namespace
pool: Pool

# What the driver may keep for itself of the device's memory between two looks at it.
SLACK = 16 << 20


def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.001)


def settled(session: gpu_ipc.Session) -> bool:
    session.collect()
    stats = session.stats()
    return stats.live_blocks == 0 and stats.held == 0


# The checks.


def every_type_and_view_arrives() -> None:
    with gpu_ipc.Session(options.device) as session, pool.lent(session) as consumer:
        names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2"
        for name in names.split():
            tensor = torch.empty(240, dtype=getattr(torch, name), device=options.device)
            tensor.view(torch.uint8)[:] = torch.arange(tensor.nbytes, device=options.device) % 2
            views = [tensor, tensor[7:], tensor.reshape(2, 8, 15)[:, 1:, ::2], tensor.reshape(12, 20).t()]
            for view in views:
                for way in ("torch", "torch.from_dlpack", "claim_tensors"):
                    got = consumer("read", session.share(view, to=consumer.id), way)
                    assert got == told_of(view), (name, way, got[:3])
        del tensor, views, view
        until(lambda: settled(session), lambda: str(session.stats()))


def every_library_reads() -> None:
    with gpu_ipc.Session(options.device) as session, pool.lent(session) as consumer:
        tensor = torch.arange(3 * 1024, dtype=torch.float32, device=options.device).reshape(3, 1024)
        for way in WAYS:
            if any(way.startswith(without) for without in options.without):
                continue
            assert consumer("read", session.share(tensor, to=consumer.id), way) == told_of(tensor), way


def every_library_shares() -> None:
    with gpu_ipc.Session(options.device) as session, pool.lent(session) as consumer:
        expected = torch.arange(3 * 1024, dtype=torch.float32, device=options.device).reshape(3, 1024)
        if "cupy" not in options.without:
            import cupy

            array = cupy.arange(3 * 1024, dtype=cupy.float32).reshape(3, 1024)
            stream = cupy.cuda.Stream(non_blocking=True)
            for given in (None, stream):
                got = consumer("read", session.share(array, to=consumer.id, stream=given), "torch")
                assert got == told_of(expected), "cupy"
        if "jax" not in options.without:
            import jax

            array = jax.numpy.arange(3 * 1024, dtype=jax.numpy.float32).reshape(3, 1024)
            try:
                descriptor = session.share(array, to=consumer.id)
            except gpu_ipc.Unsupported as error:
                # Its allocator may use the driver's pools.
                assert "copy=True" in str(error), error
                descriptor = session.share(array, to=consumer.id, copy=True)
            assert consumer("read", descriptor, "torch") == told_of(expected), "jax"


def the_consumer_waits_for_the_producers_work() -> None:
    with gpu_ipc.Session(options.device) as session, pool.lent(session) as consumer:
        stream = torch.cuda.Stream()
        tensor = torch.zeros(1 << 20, dtype=torch.int32, device=options.device)
        for turn in range(1, 6):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
                tensor.fill_(turn)
                descriptor = session.share(tensor, to=consumer.id)
            assert not stream.query(), "the producer's work was over before it was shared"
            got = consumer("read", descriptor, "claim_tensors" if turn % 2 else "torch")
            assert got[3] == turn.to_bytes(4, "little") * (1 << 20), turn


def the_storage_is_kept() -> None:
    with gpu_ipc.Session(options.device) as session, pool.lent(session) as consumer:
        parameter = torch.nn.Parameter(torch.full((1 << 18,), 3.0, device=options.device))
        expected = told_of(parameter.detach())
        assert consumer("read", session.share(parameter, to=consumer.id), "torch", True) == expected
        parameter.data = torch.zeros(1, device=options.device)
        del parameter
        gc.collect()
        # PyTorch would hand the memory out again here.
        others = [torch.full((1 << 18,), float(n), device=options.device) for n in range(64)]
        torch.cuda.synchronize()
        assert consumer("read_kept") == [expected[3]]
        before = torch.cuda.memory_allocated()
        consumer("drop")
        until(lambda: torch.cuda.memory_allocated() == before - (1 << 20), lambda: str(session.stats()))
        del others


def a_resized_storage_is_reported() -> None:
    with gpu_ipc.Session(options.device) as session:
        tensor = torch.zeros(1 << 20, device=options.device)
        descriptor = session.share(tensor)
        tensor.untyped_storage().resize_(0)
        until(lambda: session.resized_storages == 1, lambda: "nobody noticed")
        assert descriptor.is_ticket


def a_pool_needs_no_mapping_of_its_own() -> None:
    with gpu_ipc.Session(options.device) as session, pool.lent(session) as consumer:
        own = session.torch_pool()
        assert session.torch_pool() is own
        with torch.cuda.use_mem_pool(own):
            tensor = torch.arange(1 << 18, dtype=torch.int32, device=options.device)
        assert session.stats().live_bytes >= tensor.nbytes, "the tensor is not in the session's memory"
        for part in (tensor, tensor[1000:], tensor.reshape(512, 512).t()):
            assert consumer("read", session.share(part, to=consumer.id), "torch", True) == told_of(part)
        mappings = consumer("mappings")
        assert mappings == 1, f"{mappings} mappings of {session.stats()}"
        consumer("drop")
        # What is shared is not handed out again, though its tensor is gone.
        expected = told_of(tensor)[3]
        consumer("read", session.share(tensor, to=consumer.id), "torch", True)
        with torch.cuda.use_mem_pool(own):
            del tensor, part
            gc.collect()
            others = [torch.full((1 << 18,), n, dtype=torch.int32, device=options.device) for n in range(32)]
        torch.cuda.synchronize()
        assert consumer("read_kept") == [expected]
        consumer("drop")
        session.close()
        # Tensors outlive the session, and no more are born.
        assert int(others[7][0]) == 7
        try:
            with torch.cuda.use_mem_pool(own):
                others.append(torch.empty(1 << 30, dtype=torch.uint8, device=options.device))
        except torch.OutOfMemoryError:
            return
        raise AssertionError("a closed session gave memory")


def what_has_no_handle_is_refused() -> None:
    with gpu_ipc.Session(options.device) as session, pool.lent(session) as consumer:
        for tensor in (torch.arange(9.0), torch.arange(9.0).pin_memory()):
            try:
                session.share(tensor, to=consumer.id)
            except gpu_ipc.Unsupported as error:
                assert "copy=True" in str(error), error
            else:
                raise AssertionError("host memory was shared from a GPU session")
            got = consumer("read", session.share(tensor, to=consumer.id, copy=True), "torch")
            assert got == told_of(tensor)
        if "cupy" not in options.without:
            import cupy

            with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
                array = cupy.arange(100, dtype=cupy.float32)
                try:
                    session.share(array, to=consumer.id)
                except gpu_ipc.Unsupported as error:
                    assert "copy=True" in str(error), error
                got = consumer("read", session.share(array, to=consumer.id, copy=True), "torch")
                assert got == told_of(torch.arange(100, dtype=torch.float32))
                del array


def a_thousand_rounds_leave_nothing() -> None:
    deaths = options.rounds // 10
    with gpu_ipc.Session(options.device) as session:
        tensor = torch.ones(1 << 20, dtype=torch.uint8, device=options.device)
        expected = told_of(tensor)

        def work(rounds: int, deaths: int) -> None:
            consumer = pool.take(session)
            for turn in range(rounds):
                part = torch.ones(1 << 20, dtype=torch.uint8, device=options.device) if turn % 2 else tensor
                dies = turn % 10 == 9
                got = consumer("read", session.share(part, to=consumer.id), "torch", dies)
                assert got == expected, turn
                del part
                if dies:
                    # It holds what it read, and its successors have been starting all along.
                    consumer.kill()
                    deaths -= 1
                    pool.prepare(min(AHEAD, deaths + 1))
                    consumer = pool.take(session)
            consumer("leave")
            consumer.end()
            until(lambda: settled(session), lambda: str(session.stats()))

        def left() -> tuple[int, int, int]:
            # Nobody else is on the device, so that its memory is this process' alone.
            pool.end()
            gc.collect()
            torch.cuda.empty_cache()
            session.trim()
            return torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated(), sys.getrefcount(tensor)

        work(10, 1)
        free, allocated, references = left()
        pool.prepare(min(AHEAD, deaths + 1))
        work(options.rounds, deaths)
        until(lambda: torch.cuda.memory_allocated() == allocated, lambda: str(torch.cuda.memory_allocated()))
        until(lambda: left()[0] >= free - SLACK, lambda: f"{left()[0]} bytes are free, {free} were")
        assert sys.getrefcount(tensor) == references
        stats = session.stats()
        assert (stats.leaked_blocks, stats.in_flight, stats.quarantined, stats.deaths) == (0, 0, 0, deaths + 1), stats
        print(f"{options.rounds} rounds, {stats.deaths} deaths, {free - left()[0]} bytes of the device's memory are missing")


def every_example_runs() -> None:
    folder = pathlib.Path(__file__).parents[1] / "examples"
    for command in (
        ["weights.py", "--rounds", "3", "--tensors", "1000", "--elements", "4096"],
        ["camera.py", "--frames", "200"],
        ["kv_handoff.py", "--requests", "50"],
    ):
        ran = subprocess.run(
            [sys.executable, folder / command[0], "--device", options.device, *command[1:]],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, (command, ran.stdout, ran.stderr)
        print(ran.stdout.strip().splitlines()[-1], flush=True)


def a_process_of_its_own_has_a_pool() -> None:
    # The process has one pool for the device from there on.
    alone = [sys.executable, __file__, "--device", options.device, a_pool_needs_no_mapping_of_its_own.__name__]
    ran = subprocess.run(alone, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, (ran.stdout, ran.stderr)


def every_consumer_ends_well() -> None:
    pool.end()


CHECKS = [
    every_type_and_view_arrives,
    the_consumer_waits_for_the_producers_work,
    the_storage_is_kept,
    a_resized_storage_is_reported,
    a_process_of_its_own_has_a_pool,
    what_has_no_handle_is_refused,
    every_library_reads,
    every_library_shares,
    every_consumer_ends_well,
    a_thousand_rounds_leave_nothing,
    every_example_runs,
]

# What is only run when it is named.
ALONE = [a_pool_needs_no_mapping_of_its_own]


def main() -> int:
    global options, pool
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--without", action="append", default=[], choices=["cupy", "jax"])
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    pool = Pool(options.device)
    return running.run("python", running.choose(parser, options.names, CHECKS, ALONE), end=pool.end)


if __name__ == "__main__":
    sys.exit(main())
