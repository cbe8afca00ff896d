"""New weights for vLLM's workers on one GPU: the engine `gpu_ipc` beside vLLM's own `ipc`, with genuine Python of vLLM.

    python vllm_weights.py [--only speed kills] [--updates 1000] [--tensors 1000] [--seconds 240] [--device cuda|cpu] [--start auto] [--out FILE]

`speed` times updates of many tensors of 4 MiB to four workers, each engine in turn. `kills` kills a worker in every tenth update, and
follows the memory that the trainer's process has. What it prints last is JSON. With `cpu` only `gpu_ipc` is run. Workers are forked from
a process that has imported vLLM; `--start spawn` lets each import it, and `auto` does so where the first worker that was forked fails.
"""

import argparse
import dataclasses
import faulthandler
import gc
import json
import os
import statistics
import sys
import time
import traceback
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
import engines
import torch
import vllm
from vllm.distributed.weight_transfer.clients import _json_safe_update_info

import gpu_ipc
from gpu_ipc.integrations import vllm as plug

MIB = 1 << 20
SIZE = 1024
WORKERS = 4


class Engine(engines.Engine):
    """Pickles handles of PyTorch into its messages as vLLM's HTTP client does."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        super().update_weights(_json_safe_update_info(update_info))


class Theirs:
    """The trainer's half of `ipc`, as vLLM 0.26 has it."""

    def __init__(self, engine: Engine, weights: dict[str, Any], packed: int | None) -> None:
        self.engine, self.weights = engine, weights
        self.args: dict[str, Any] = {"send_mode": lambda info: engine.update_weights(dataclasses.asdict(info))}
        if packed:
            self.args |= {"packed": True, "packed_buffer_size_bytes": packed}
        engine.init_weight_transfer_engine({})

    def connect_workers(self) -> None:
        self.engine.init_weight_transfer_engine({})

    def send_weights(self) -> None:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        self.engine.start_weight_update()
        IPCWeightTransferEngine.trainer_send_weights(iter(self.weights.items()), self.args)
        self.engine.finish_weight_update()


def choose(start: str) -> str:
    """Return how workers are started, once one has answered that was started so."""
    if start == "auto":
        engines.start_by("forkserver")
        try:
            worker = engines.Worker(0, 4, 16, "cuda:0" if torch.cuda.is_available() else "cpu", "gpu_ipc")
            worker.ask("values")
            worker.end()
            return "forkserver"
        except (EOFError, engines.WorkerFailed) as error:
            print(f"workers cannot be forked, so each imports vLLM: {error!r}", flush=True)
            start = "spawn"
    engines.start_by(start)
    return start


def pair(backend: str, tensors: int, device: str, bucket: int | None) -> tuple[Engine, Any, dict[str, Any]]:
    """Start four workers and a trainer that sends to them; a model has three tensors more than layers of its own."""
    engine = Engine(WORKERS, tensors - 3, SIZE, device, backend.partition(" ")[0])
    weights = engines.checkpoint(tensors - 3, SIZE, device)
    if backend == "ipc packed":
        return engine, Theirs(engine, weights, bucket or plug._buckets.GIB), weights
    if backend == "ipc":
        return engine, Theirs(engine, weights, bucket), weights
    info = plug.TrainerInitInfo(rank=0, device=device, bucket_bytes=bucket or tensors * SIZE * SIZE * 4)
    return engine, plug.TrainerEngine.trainer_init(None, info, client=engine, source=engines.Source(weights)), weights


def used(trainer: Any) -> int:
    """Return the bytes that the trainer's process has of its device."""
    torch.cuda.is_available() and torch.cuda.ipc_collect()
    own = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    if isinstance(trainer, plug.TrainerEngine):
        trainer.sender.session.collect()
        own += trainer.sender.session.stats().source.reserved
    return own


def of_device() -> int | None:
    """Return the MiB that all processes have of the GPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) // MIB


def right(engine: Engine, weights: dict[str, Any]) -> bool:
    return all(values == engines.expected(weights) for values in engine.all("values"))


def speed(backend: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time whole updates and their parts, and count the bytes on the wire."""
    engine, trainer, weights = pair(backend, options.tensors, options.device, None)
    calls: dict[str, float] = {}
    for name in ("start_weight_update", "update_weights", "finish_weight_update"):

        def timed(*given: Any, name: str = name, former: Any = getattr(engine, name)) -> None:
            begin = time.perf_counter()
            former(*given)
            calls[name] = calls.get(name, 0.0) + (time.perf_counter() - begin) * 1e3

        setattr(engine, name, timed)
    rows: list[dict[str, float]] = []
    for step in range(options.rounds + 2):
        engines.fill(weights, step)
        if options.device != "cpu":
            torch.cuda.synchronize()
        engine.sent = 0
        calls.clear()
        begin = time.perf_counter()
        trainer.send_weights()
        rows.append({"update": (time.perf_counter() - begin) * 1e3, **calls})
    ms = {name: statistics.median(row[name] for row in rows[2:]) for name in rows[0]}
    found = {
        "right": right(engine, weights),
        "update_ms": ms["update"],
        "least_ms": min(row["update"] for row in rows[2:]),
        "start_ms": ms["start_weight_update"],
        "message_ms": ms["update_weights"],
        "finish_ms": ms["finish_weight_update"],
        "sender_ms": ms["update"] - sum(ms[name] for name in calls),
        "all_ms": [round(row["update"], 1) for row in rows],
        "us_a_tensor": ms["update"] * 1e3 / options.tensors,
        "wire_bytes": engine.sent,
        "device_MiB": of_device(),
    }
    trainer.shutdown() if hasattr(trainer, "shutdown") else None
    engine.end()
    return found


def kills(backend: str, options: argparse.Namespace) -> dict[str, Any]:
    """Kill a worker in every tenth update, and follow the trainer's memory."""
    ways = ["update_weights", "claimed", "loaded", "finish_weight_update"]
    # Theirs has a quarter of what is left.
    until = options.end if backend != "gpu_ipc" else time.monotonic() + (options.end - time.monotonic()) * (0.75 if options.device != "cpu" else 1)
    engine, trainer, weights = pair(backend, 20, options.device, 8 * SIZE * SIZE * 4)
    spares = [engines.Worker(rank, *engine._of) for rank in range(WORKERS - 1)] if backend == "gpu_ipc" else []
    trainer.send_weights()
    memory, device, killed, named, wrong = [used(trainer)], [of_device()], 0, 0, 0
    updates = 0
    for step in range(1, options.updates + 1):
        if time.monotonic() > until:
            break
        engines.fill(weights, step)
        if step % 10 == 0:
            rank, way = killed % WORKERS, ways[killed % len(ways)]
            engine.workers[rank].ask("end_at", way)
            try:
                trainer.send_weights()
            except gpu_ipc.ParticipantGone as gone:
                named += f"vllm worker {rank}" in str(gone)
            except engines.WorkerFailed as error:
                print(f"kills {backend}: not named: {error}", flush=True) if backend == "gpu_ipc" else None
            killed += 1
            if spares:
                engine.workers[rank].end()
                engine.workers[rank] = spares.pop(0)
                spares.append(engines.Worker((rank + WORKERS - 1) % WORKERS, *engine._of))
            else:
                restart(engine)
            trainer.connect_workers()
        trainer.send_weights()
        updates += 1
        if step % 50 == 0:
            wrong += not right(engine, weights)
            memory.append(used(trainer))
            device.append(of_device())
    wrong += not right(engine, weights)
    memory.append(used(trainer))
    device.append(of_device())
    found = {
        "updates": updates,
        "killed": killed,
        "named": named,
        "wrong": wrong,
        "MiB_first": memory[0] / MIB,
        "MiB_last": memory[-1] / MIB,
        "MiB_most": max(memory) / MIB,
        "MiB_over_time": [round(one / MIB) for one in memory],
        "device_MiB_over_time": device,
    }
    for worker in spares:
        worker.end()
    engine.end()
    return found


def restart(engine: Engine) -> None:
    """Start all workers again: those of `ipc` that were not killed are half-way in an update that cannot begin again."""
    for rank, worker in enumerate(engine.workers):
        worker.end()
        engine.workers[rank] = engines.Worker(rank, *engine._of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["speed", "kills"], choices=["speed", "kills"])
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=6, help="updates that are timed")
    parser.add_argument("--start", default="auto", choices=["auto", "forkserver", "spawn"])
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    # Where it hangs is said before a limit of time ends it.
    faulthandler.dump_traceback_later(options.seconds + 20, repeat=True)
    found: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__, "device": options.device}
    found["start"] = choose(options.start)
    theirs = []
    if options.device != "cpu":
        # `ipc` wants the number.
        options.device = "cuda:0"
        found["device"] = torch.cuda.get_device_name()
        theirs = ["ipc", "ipc packed"]
    options.end = end
    for part, run in (("speed", speed), ("kills", kills)):
        if part not in options.only:
            continue
        told = found[part] = {}
        for backend in ["gpu_ipc", *(theirs if part == "speed" else theirs[:1])]:
            try:
                told[backend] = run(backend, options)
            except Exception as error:
                traceback.print_exc()
                told[backend] = {"failed": repr(error)}
            print(f"{part} {backend}: {json.dumps(told[backend])}", flush=True)
            gc.collect()
            if options.device != "cpu":
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()
    times = {backend: one["update_ms"] for backend, one in found.get("speed", {}).items() if "update_ms" in one}
    if "gpu_ipc" in times and len(times) > 1:
        found["ratio"] = times["gpu_ipc"] / min(ms for backend, ms in times.items() if backend != "gpu_ipc")
        found["goal"] = 0.2
    print(json.dumps(found))
    if options.out:
        with open(options.out, "w") as file:
            json.dump(found, file, indent=1)
    failed = [f"{part} {backend}" for part in options.only for backend, one in found[part].items() if "failed" in one]
    sys.exit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
