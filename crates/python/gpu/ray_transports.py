"""Tensors between Ray's actors on one GPU: `GPU_IPC` beside `CUDA_IPC` of the same Ray.

    python ray_transports.py [--only checks speed kills] [--objects 1000] [--device cuda|cpu] [--out FILE]

`checks` repeats by GPU_IPC what Ray tests of CUDA_IPC, and what CUDA_IPC has not: buffers, asyncio actors, the driver. `speed` measures
an object from actor to actor, both transports in turn by the same actors. `kills` kills a receiver in every tenth object: most
of them while they hold it, each fifth before it has arrived. With `cpu` the transport is compared with itself: for a machine without a GPU.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ |= {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
    "RAY_rdt_fetch_fail_timeout_milliseconds": "30000",
}

import ray
import torch

from gpu_ipc.integrations import ray as plug

MIB = 1 << 20
GIB = 1 << 30
PATIENCE = 120.0
plug.register()
OPTIONS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
OPTIONS.add_argument("--only", nargs="+", default=["checks", "speed", "kills"], choices=["checks", "speed", "kills"])
OPTIONS.add_argument("--objects", type=int, default=1000)
OPTIONS.add_argument("--rounds", type=int, default=5)
OPTIONS.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
OPTIONS.add_argument("--out")
options = OPTIONS.parse_args()
IS_CUDA = options.device == "cuda"
# Its own fraction of the GPU for each: all see the same.
GPUS = 0.01 if IS_CUDA else 0
THEIRS = "CUDA_IPC" if IS_CUDA else "GPU_IPC"
TRANSPORTS = {"gpu_ipc": "GPU_IPC", "theirs": THEIRS}


class SourceMethods:
    def __init__(self, device: str) -> None:
        self.device = device
        self.tensor = torch.zeros(1, device=device)

    def pid(self) -> int:
        return os.getpid()

    @ray.method(tensor_transport="GPU_IPC")
    def gpu_ipc(self, nbytes: int, value: int) -> Any:
        return torch.full((nbytes,), value, dtype=torch.uint8, device=self.device)

    @ray.method(tensor_transport=THEIRS)
    def theirs(self, nbytes: int, value: int) -> Any:
        return torch.full((nbytes,), value, dtype=torch.uint8, device=self.device)

    @ray.method(tensor_transport="GPU_IPC")
    def keep(self, values: list[float]) -> Any:
        self.tensor = torch.tensor(values, device=self.device)
        return self.tensor

    @ray.method(tensor_transport="GPU_IPC")
    def slow(self, value: int) -> Any:
        """Return what work that is still running on the GPU will fill."""
        work = torch.ones(2048, 2048, device=self.device)
        for _ in range(100):
            work = work @ work / 2048
        return (work * value).to(torch.int32)

    def first(self) -> float:
        return float(self.tensor[0])

    def wait_freed(self) -> str:
        ray.experimental.wait_tensor_freed(self.tensor, timeout=PATIENCE)
        return "freed"

    def allocated(self) -> int:
        """Return the bytes that this process has taken from PyTorch's allocator."""
        if self.device == "cpu":
            return 0
        # What PyTorch itself would free before its next message.
        torch.cuda.ipc_collect()
        return torch.cuda.memory_allocated()

    def memory(self) -> tuple[int, int]:
        """Return those, and what all processes have taken from the GPU."""
        allocated = self.allocated()
        if self.device == "cpu":
            return 0, 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return allocated, total - free

    def back(self, allocated: int, seconds: float) -> float:
        """Wait until no more than so many bytes are allocated, and return when, by the clock that all processes share."""
        end = time.monotonic() + seconds
        while self.allocated() > allocated and time.monotonic() < end:
            time.sleep(0.001)
        return time.monotonic()


@ray.remote(num_cpus=0, num_gpus=GPUS)
class Source(SourceMethods):
    pass


@ray.remote(num_cpus=0, num_gpus=GPUS)
class AsyncSource:
    @ray.method(tensor_transport="GPU_IPC")
    async def slow(self, device: str, value: int) -> Any:
        await asyncio.sleep(0)
        side = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(side):
            return SourceMethods.slow(SourceMethods(device), value)


@ray.remote(num_cpus=0, num_gpus=GPUS, enable_tensor_transport=True)
class Receiver:
    def __init__(self, device: str) -> None:
        self.kept = torch.zeros(1, device=device)

    def pid(self) -> int:
        return os.getpid()

    def read(self, tensor: Any) -> tuple[int, int]:
        return int(tensor[0]), int(tensor[-1])

    def read_here(self, tensor: Any) -> tuple[int, int]:
        """Read on the device of this actor, whichever the tensor is on."""
        copied = tensor.to(self.kept.device)
        return int(copied.min()), int(copied.max())

    def total(self, tensor: Any) -> float:
        return float(tensor.sum())

    def double(self, tensor: Any) -> Any:
        tensor.mul_(2)
        return tensor.cpu()

    def keep(self, tensor: Any) -> int:
        self.kept = tensor
        return int(tensor[-1])


def start(kind: Any, count: int = 1) -> list[Any]:
    started = [kind.remote() if kind is AsyncSource else kind.remote(options.device) for _ in range(count)]
    ray.get([actor.__ray_ready__.remote() for actor in started])
    return started


def stop(*actors: Any) -> None:
    for actor in actors:
        ray.kill(actor)


def pair() -> tuple[Any, Any]:
    return start(Source)[0], start(Receiver)[0]


# What Ray tests of CUDA_IPC.


def a_receiver_writes_to_what_the_source_returned() -> None:
    source, receiver = pair()
    reference = source.keep.remote([1.0, 2.0, 3.0])
    assert ray.get(receiver.double.remote(reference)).tolist() == [2, 4, 6]
    # Of the CPU a copy was lent.
    assert ray.get(source.first.remote()) == (2 if IS_CUDA else 1)
    stop(source, receiver)


def a_reference_that_is_dropped_frees_the_source() -> None:
    source, receiver = pair()
    reference = source.keep.remote([1.0, 2.0, 3.0])
    doubled = receiver.double.remote(reference)
    del reference
    assert ray.get(source.wait_freed.remote()) == "freed"
    assert ray.get(doubled).tolist() == [2, 4, 6]
    stop(source, receiver)


def a_source_that_is_killed_leaves_what_was_received() -> None:
    source, receiver = pair()
    assert ray.get(receiver.keep.remote(source.gpu_ipc.remote(4 * MIB, 7))) == 7
    stop(source)
    assert ray.get(receiver.pid.remote())
    stop(receiver)


def a_source_that_is_killed_before_is_an_error() -> None:
    source, receiver = pair()
    reference = source.gpu_ipc.remote(4 * MIB, 7)
    ray.wait([reference])
    stop(source)
    try:
        ray.get(receiver.read.remote(reference))
        raise AssertionError("it arrived")
    except ray.exceptions.RayError as error:
        assert not isinstance(error, ray.exceptions.ActorDiedError), error
    assert ray.get(receiver.pid.remote())
    stop(receiver)


# What else the plug promises.


def buffers_of_the_receiver_are_filled() -> None:
    (source,) = start(Source)
    reference = source.keep.remote([1.0, 2.0, 3.0])
    buffer = torch.zeros(3, device=options.device)
    ray.experimental.set_target_for_ref(reference, [buffer])
    got = ray.get(reference)
    assert got.data_ptr() == buffer.data_ptr() and buffer.tolist() == [1, 2, 3]
    stop(source)


def the_driver_gets_and_puts() -> None:
    source, receiver = pair()
    assert ray.get(source.keep.remote([4.0])).tolist() == [4]
    put = ray.put(torch.full((MIB,), 5, dtype=torch.uint8, device=options.device), _tensor_transport="GPU_IPC")
    assert ray.get(receiver.read.remote(put)) == (5, 5)
    assert int(ray.get(put)[0]) == 5
    stop(source, receiver)


def a_source_that_still_computes_is_waited_for() -> None:
    source, receiver = pair()
    for value in range(1, 6):
        assert ray.get(receiver.total.remote(source.slow.remote(value))) == value * 2048 * 2048
    stop(source, receiver)


def an_asyncio_source_on_a_stream_of_its_own_is_waited_for() -> None:
    (source,), (receiver,) = start(AsyncSource), start(Receiver)
    for value in range(1, 6):
        assert ray.get(receiver.total.remote(source.slow.remote(options.device, value))) == value * 2048 * 2048
    stop(source, receiver)


def an_actor_on_another_gpu_receives() -> None:
    seen = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    source = Source.options(num_gpus=1, runtime_env=seen).remote("cuda:0")
    receiver = Receiver.options(num_gpus=1, runtime_env=seen).remote("cuda:1")
    for _ in range(3):
        tensor = source.gpu_ipc.remote(4 * MIB, 9)
        assert ray.get(receiver.read.remote(tensor)) == (9, 9)
        assert ray.get(receiver.read_here.remote(tensor)) == (9, 9)
    # What theirs does there is seen, and not required.
    try:
        print(f"{THEIRS} from another GPU: {ray.get(receiver.read_here.remote(source.theirs.remote(4 * MIB, 9)))}", flush=True)
    except Exception as error:
        print(f"{THEIRS} from another GPU: {' '.join(str(error).split())[-300:]}", flush=True)
    stop(source, receiver)


CHECKS: list[Callable[[], None]] = [
    a_receiver_writes_to_what_the_source_returned,
    a_reference_that_is_dropped_frees_the_source,
    a_source_that_is_killed_leaves_what_was_received,
    a_source_that_is_killed_before_is_an_error,
    buffers_of_the_receiver_are_filled,
    the_driver_gets_and_puts,
    a_source_that_still_computes_is_waited_for,
    an_asyncio_source_on_a_stream_of_its_own_is_waited_for,
]


def checks() -> list[bool]:
    """Run each check, and return how each ended."""
    ended = []
    for check in [*CHECKS, an_actor_on_another_gpu_receives]:
        if check is an_actor_on_another_gpu_receives and torch.cuda.device_count() < 2:
            print(f"not run: {check.__name__}: there are not two GPUs", flush=True)
            continue
        try:
            check()
            print(f"ok {check.__name__}", flush=True)
            ended.append(True)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            print(f"FAILED {check.__name__}", flush=True)
            ended.append(False)
    return ended


def speed() -> dict[str, Any]:
    """Measure an object from actor to actor: made, received, one element read on either end, and freed."""
    source, receiver = pair()
    found: dict[str, Any] = {}
    for nbytes, count in ((4096, 200), (4 * MIB, 200), (GIB if IS_CUDA else 64 * MIB, 20)):
        taken: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
        for index in range(options.rounds + 1):
            for name in TRANSPORTS:
                for number in range(count):
                    begin = time.perf_counter()
                    value = ray.get(receiver.read.remote(getattr(source, name).remote(nbytes, number % 251)))
                    spent = time.perf_counter() - begin
                    assert value == (number % 251,) * 2, f"{name}: {value} is not {number % 251}"
                    # The first round warms up.
                    if index:
                        taken[name].append(spent)
        medians = {name: 1e3 * statistics.median(times) for name, times in taken.items()}
        size = f"{nbytes // GIB} GiB" if nbytes >= GIB else f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // 1024} KiB"
        found[size] = medians | {"ratio": medians["gpu_ipc"] / medians["theirs"], "objects": len(taken["theirs"])}
        print(f"{size}: {found[size]}", flush=True)
    stop(source, receiver)
    return found


def killed_receiver(name: str) -> float | None:
    """Kill a receiver that alone holds 16 MiB, and return the seconds until the source has them back; None: not within 20."""
    source, receiver = pair()
    before = ray.get(source.allocated.remote())
    reference = getattr(source, name).remote(16 * MIB, 3)
    assert ray.get(receiver.keep.remote(reference)) == 3
    pid = ray.get(receiver.pid.remote())
    del reference
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    back = ray.get(source.back.remote(before, 20.0))
    is_back = ray.get(source.allocated.remote()) <= before
    stop(source)
    return back - killed if is_back else None


class Pool:
    """Actors that start while others work."""

    def __init__(self, kind: Any, count: int) -> None:
        self.kind = kind
        self.starting = [kind.remote(options.device) for _ in range(count)]

    def take(self) -> tuple[Any, int]:
        self.starting.append(self.kind.remote(options.device))
        actor = self.starting.pop(0)
        return actor, ray.get(actor.pid.remote())


def is_dead(actor: Any) -> bool:
    try:
        ray.get(actor.pid.remote(), timeout=PATIENCE)
        return False
    except ray.exceptions.RayActorError:
        return True


def kills(name: str) -> dict[str, Any]:
    """Send objects of 4 MiB, and kill the receiver in every tenth: in each fifth of these before it has the object."""
    (source,) = start(Source)
    before, used = ray.get(source.memory.remote())
    receivers, sources = Pool(Receiver, 8), Pool(Source, 2)
    found = dict.fromkeys(("objects", "killed", "wrong", "not_received", "other_receivers_lost", "sources_lost"), 0)
    receiver, pid, reference, kept, most = None, 0, None, None, 0
    for index in range(options.objects):
        if receiver is None:
            receiver, pid = receivers.take()
        late, early = index % 10 == 9, index % 50 == 49
        reference = getattr(source, name).remote(4 * MIB, index % 251)
        kept = receiver.keep.remote(reference)
        if early:
            os.kill(pid, signal.SIGKILL)
        try:
            found["wrong"] += ray.get(kept, timeout=PATIENCE) != index % 251
            found["objects"] += 1
        except ray.exceptions.RayError:
            found["not_received"] += 1
            if early:
                # Ray's monitor, which may kill the source, looks each second.
                time.sleep(3)
            elif is_dead(receiver):
                found["other_receivers_lost"] += 1
                receiver = None
        if late:
            if not early:
                os.kill(pid, signal.SIGKILL)
            found["killed"] += 1
            receiver, reference, kept = None, None, None
        if is_dead(source):
            found["sources_lost"] += 1
            source, _ = sources.take()
        elif late:
            most = max(most, ray.get(source.allocated.remote()))
        if found["killed"] % 20 == 0 and late:
            print(f"{name}: {found}, at most {most >> 20} MiB allocated", flush=True)
    reference, kept = None, None
    stop(*receivers.starting, *sources.starting, *([receiver] if receiver else []))
    end = time.monotonic() + 15
    while (now := ray.get(source.memory.remote())) > (before, used) and time.monotonic() < end:
        time.sleep(0.1)
    stop(source)
    return found | {
        "most_MiB_allocated": most >> 20,
        "MiB_allocated_after": (now[0] - before) >> 20,
        "MiB_of_the_GPU_taken_after": (now[1] - used) >> 20,
        "seconds_until_16_MiB_are_back": killed_receiver(name),
    }


def table(found: dict[str, Any]) -> str:
    lines = [f"| | GPU_IPC | {THEIRS} | ratio |", "|---|---|---|---|"]
    for size, row in found.get("speed", {}).items():
        lines.append(f"| {size} from actor to actor, ms | {row['gpu_ipc']:.3f} | {row['theirs']:.3f} | {row['ratio']:.3f} |")
    rows = found.get("kills", {})
    for key in next(iter(rows.values()), {}):
        lines.append(f"| {key.replace('_', ' ')} | {rows['gpu_ipc'][key]} | {rows['theirs'][key]} | |")
    return "\n".join(lines)


def main() -> int:
    ray.init(
        num_cpus=os.cpu_count(),
        num_gpus=torch.cuda.device_count() if IS_CUDA else 0,
        object_store_memory=100 * MIB,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=f"/tmp/ray-{os.getpid()}",
    )
    if not IS_CUDA:
        from unittest import mock

        # Ray's monitor imports its collectives at the first transfer that fails.
        sys.modules.setdefault("ray.experimental.collective", mock.MagicMock())
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if IS_CUDA else "cpu",
        "torch": torch.__version__,
        "ray": importlib.metadata.version("ray"),
    }
    ended: list[bool] = []
    try:
        if "checks" in options.only:
            ended += checks()
        if "speed" in options.only:
            found["speed"] = speed()
            ended.append(True)
        if "kills" in options.only:
            found["kills"] = {name: kills(name) for name in TRANSPORTS}
    finally:
        print(f"\n{found['device']}, PyTorch {found['torch']}, Ray {found['ray']}. Medians.\n\n{table(found)}\n")
        if options.out:
            with open(options.out, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)
        ray.shutdown()
    # What is wrong, lost or left by the other transport is its figure, and by this one a fault.
    ours = found.get("kills", {}).get("gpu_ipc", {})
    for what in ("wrong", "other_receivers_lost", "sources_lost", "MiB_allocated_after"):
        if what in ours:
            ended.append(not ours[what])
            print(f"{'FAILED' if ours[what] else 'ok'} kills: {what}: {ours[what]}")
    print(f"python-ray: {ended.count(True)} checks passed, {ended.count(False)} failed, 0 skipped")
    return int(False in ended or not ended)


if __name__ == "__main__":
    sys.exit(main())
