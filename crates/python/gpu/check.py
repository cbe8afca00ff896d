"""What can only be checked on a GPU, with the array libraries that are there: one line a check.

    python check.py [--device cuda:0] [--rounds 1000] [NAME...]

A process cannot open its own memory, so what is claimed is claimed by a process of its own. A library that is missing is
a failure, unless it is named with --without.
"""

import argparse
import gc
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch  # noqa: E402

import gpu_ipc  # noqa: E402

PATIENCE = 60.0
options: argparse.Namespace


# The consumer.


def consume(path: str, pipe: Any) -> None:
    """Do what the other side asks, until it hangs up."""
    kept: dict[str, Any] = {}
    with gpu_ipc.connect(path) as participant:
        pipe.send(participant.id)
        while True:
            try:
                name, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(("done", COMMANDS[name](participant, kept, *arguments)))
            except BaseException:
                pipe.send(("failed", traceback.format_exc()))


def as_torch(received: gpu_ipc.Received) -> torch.Tensor:
    return received.torch()


def as_cupy(received: gpu_ipc.Received) -> torch.Tensor:
    import cupy

    return torch.from_dlpack(cupy.from_dlpack(received))


def as_cupy_by_interface(received: gpu_ipc.Received) -> torch.Tensor:
    import cupy

    return torch.from_dlpack(cupy.asarray(received))


def as_jax(received: gpu_ipc.Received) -> torch.Tensor:
    import jax

    return torch.from_dlpack(jax.dlpack.from_dlpack(received))


def as_torch_by_interface(received: gpu_ipc.Received) -> torch.Tensor:
    return torch.as_tensor(received, device="cuda")


WAYS: dict[str, Callable[[gpu_ipc.Received], torch.Tensor]] = {
    "torch": as_torch,
    "torch.from_dlpack": torch.from_dlpack,
    "torch by the CUDA array interface": as_torch_by_interface,
    "cupy": as_cupy,
    "cupy by the CUDA array interface": as_cupy_by_interface,
    "jax": as_jax,
}


def read(participant: gpu_ipc.Participant, kept: dict[str, Any], descriptor: Any, way: str, keep: bool = False) -> Any:
    """Claim, make an array by one of the ways, and tell its shape, strides, type and bytes."""
    made = WAYS[way](participant.claim(descriptor, timeout=PATIENCE))
    if keep:
        kept[str(len(kept))] = made
    bits = made.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return tuple(made.shape), tuple(made.stride()), str(made.dtype), bits


def read_kept(participant: gpu_ipc.Participant, kept: dict[str, Any]) -> Any:
    """Tell the bytes of what was kept."""
    return [one.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for one in kept.values()]


def drop(participant: gpu_ipc.Participant, kept: dict[str, Any]) -> int:
    """Drop what was kept, and tell how many regions are mapped."""
    kept.clear()
    return participant.mappings


def mappings(participant: gpu_ipc.Participant, kept: dict[str, Any]) -> int:
    return participant.mappings


COMMANDS: dict[str, Callable[..., Any]] = {"read": read, "read_kept": read_kept, "drop": drop, "mappings": mappings}


class Consumer:
    """The consumer, as the producer sees it."""

    def __init__(self, session: gpu_ipc.Session) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=consume, args=(session.path, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.id = self.hear()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE), "the consumer hangs"
        return self.pipe.recv()

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.pipe.send((name, arguments))
        how, told = self.hear()
        assert how == "done", told
        return told

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def end(self) -> None:
        self.pipe.close()
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0, f"the consumer ended with {self.process.exitcode}"


def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.001)


def settled(session: gpu_ipc.Session) -> bool:
    session.collect()
    stats = session.stats()
    return stats.live_blocks == 0 and stats.held == 0


def told_of(tensor: torch.Tensor) -> Any:
    bits = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype), bits


# The checks.


def every_type_and_view_arrives() -> None:
    with gpu_ipc.Session(options.device) as session:
        consumer = Consumer(session)
        names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2"
        for name in names.split():
            tensor = torch.empty(240, dtype=getattr(torch, name), device=options.device)
            tensor.view(torch.uint8)[:] = torch.arange(tensor.nbytes, device=options.device) % 2
            views = [tensor, tensor[7:], tensor.reshape(2, 8, 15)[:, 1:, ::2], tensor.reshape(12, 20).t()]
            for view in views:
                for way in ("torch", "torch.from_dlpack"):
                    got = consumer("read", session.share(view, to=consumer.id), way)
                    assert got == told_of(view), (name, way, got[:3])
        consumer.end()
        del tensor, views, view
        until(lambda: settled(session), lambda: str(session.stats()))


def every_library_reads() -> None:
    with gpu_ipc.Session(options.device) as session:
        consumer = Consumer(session)
        tensor = torch.arange(3 * 1024, dtype=torch.float32, device=options.device).reshape(3, 1024)
        for way in WAYS:
            if any(way.startswith(without) for without in options.without):
                continue
            assert consumer("read", session.share(tensor, to=consumer.id), way) == told_of(tensor), way
        consumer.end()


def every_library_shares() -> None:
    with gpu_ipc.Session(options.device) as session:
        consumer = Consumer(session)
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
        consumer.end()


def the_consumer_waits_for_the_producers_work() -> None:
    with gpu_ipc.Session(options.device) as session:
        consumer = Consumer(session)
        stream = torch.cuda.Stream()
        tensor = torch.zeros(1 << 20, dtype=torch.int32, device=options.device)
        for turn in range(1, 6):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
                tensor.fill_(turn)
                descriptor = session.share(tensor, to=consumer.id)
            assert not stream.query(), "the producer's work was over before it was shared"
            got = consumer("read", descriptor, "torch")
            assert got[3] == turn.to_bytes(4, "little") * (1 << 20), turn
        consumer.end()


def the_storage_is_kept() -> None:
    with gpu_ipc.Session(options.device) as session:
        consumer = Consumer(session)
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
        consumer.end()
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
    with gpu_ipc.Session(options.device) as session:
        consumer = Consumer(session)
        pool = session.torch_pool()
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.arange(1 << 18, dtype=torch.int32, device=options.device)
        assert session.stats().live_bytes >= tensor.nbytes, "the tensor is not in the session's memory"
        for part in (tensor, tensor[1000:], tensor.reshape(512, 512).t()):
            assert consumer("read", session.share(part, to=consumer.id), "torch") == told_of(part)
        assert consumer("mappings") == 1
        # What is shared is not handed out again, though its tensor is gone.
        expected = told_of(tensor)[3]
        consumer("read", session.share(tensor, to=consumer.id), "torch", True)
        with torch.cuda.use_mem_pool(pool):
            del tensor, part
            others = [torch.full((1 << 18,), n, dtype=torch.int32, device=options.device) for n in range(32)]
        torch.cuda.synchronize()
        assert consumer("read_kept") == [expected]
        consumer.end()
        session.close()
        try:
            with torch.cuda.use_mem_pool(pool):
                others.append(torch.empty(1 << 30, dtype=torch.uint8, device=options.device))
        except torch.OutOfMemoryError:
            return
        raise AssertionError("a closed session gave memory")


def what_has_no_handle_is_refused() -> None:
    with gpu_ipc.Session(options.device) as session:
        consumer = Consumer(session)
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
        consumer.end()


def a_thousand_rounds_leave_nothing() -> None:
    torch.cuda.empty_cache()
    with gpu_ipc.Session(options.device) as session:
        tensor = torch.ones(1 << 20, dtype=torch.uint8, device=options.device)
        expected = told_of(tensor)
        consumer = Consumer(session)
        consumer("read", session.share(tensor, to=consumer.id), "torch")
        allocated, references = torch.cuda.memory_allocated(), sys.getrefcount(tensor)
        for turn in range(options.rounds):
            part = torch.ones(1 << 20, dtype=torch.uint8, device=options.device) if turn % 2 else tensor
            got = consumer("read", session.share(part, to=consumer.id), "torch", turn % 10 == 9)
            assert got == expected, turn
            del part
            if turn % 10 == 9:
                consumer.kill()
                consumer = Consumer(session)
        consumer.end()
        until(lambda: settled(session), lambda: str(session.stats()))
        until(lambda: torch.cuda.memory_allocated() == allocated, lambda: str(torch.cuda.memory_allocated()))
        stats = session.stats()
        assert sys.getrefcount(tensor) == references
        assert (stats.leaked_blocks, stats.in_flight, stats.deaths) == (0, 0, options.rounds // 10), stats


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


CHECKS = [
    every_type_and_view_arrives,
    every_library_reads,
    every_library_shares,
    the_consumer_waits_for_the_producers_work,
    the_storage_is_kept,
    a_resized_storage_is_reported,
    what_has_no_handle_is_refused,
    a_thousand_rounds_leave_nothing,
    every_example_runs,
    # Last: the process has one pool for the device from here on.
    a_pool_needs_no_mapping_of_its_own,
]


def main() -> int:
    global options
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--without", action="append", default=[], choices=["cupy", "jax"])
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    passed = failed = 0
    for check in CHECKS:
        if options.names and check.__name__ not in options.names:
            continue
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
    print(f"python: {passed} checks passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
