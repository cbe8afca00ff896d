"""New weights for vLLM's workers on one GPU: the engine `gpu_ipc` beside vLLM's own `ipc`, with genuine Python of vLLM.

    python vllm_weights.py [--only speed kills] [--updates 1000] [--tensors 1000] [--seconds 240] [--device cuda|cpu] [--out FILE]

`speed` times updates of many tensors of 4 MiB to four workers, both engines in turn. `kills` kills a worker in every tenth update, and
follows the memory that the trainer's process has. What it prints last is JSON. With `cpu` only `gpu_ipc` is run.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
import types
from typing import Any

# A check that makes no context, so that workers can be forked after it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
# vLLM's kernels are not here, and nothing here computes.
sys.modules.setdefault("ray", types.ModuleType("ray"))
import vllm.platforms

vllm.platforms.builtin_platform_plugins.clear()
import engines
import torch
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


def pair(backend: str, tensors: int, device: str, bucket: int | None) -> tuple[Engine, Any, dict[str, Any]]:
    """Start four workers and a trainer that sends to them; a model has three tensors more than layers of its own."""
    engine = Engine(WORKERS, tensors - 3, SIZE, device, backend)
    weights = engines.checkpoint(tensors - 3, SIZE, device)
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


def right(engine: Engine, weights: dict[str, Any]) -> bool:
    return all(values == engines.expected(weights) for values in engine.all("values"))


def speed(options: argparse.Namespace, backends: list[str]) -> dict[str, Any]:
    """Time whole updates, the message alone, and count the bytes on the wire."""
    found: dict[str, Any] = {}
    for backend in backends:
        engine, trainer, weights = pair(backend, options.tensors, options.device, None)
        whole, message, wire = [], [], 0
        former = engine.update_weights

        def timed(info: dict[str, Any], former: Any = former, message: list[float] = message) -> None:
            begin = time.perf_counter()
            former(info)
            message.append((time.perf_counter() - begin) * 1e3)

        engine.update_weights = timed  # type: ignore[method-assign]
        for step in range(8):
            engines.fill(weights, step)
            if options.device == "cuda":
                torch.cuda.synchronize()
            engine.sent = 0
            begin = time.perf_counter()
            trainer.send_weights()
            whole.append((time.perf_counter() - begin) * 1e3)
            wire = engine.sent
        found[backend] = {
            "right": right(engine, weights),
            "update_ms": statistics.median(whole[2:]),
            "all_ms": [round(one, 1) for one in whole],
            "message_ms": statistics.median(message[2:]),
            "us_a_tensor": statistics.median(whole[2:]) * 1e3 / options.tensors,
            "wire_bytes": wire,
        }
        engine.end()
        print(f"speed {backend}: {json.dumps(found[backend])}", flush=True)
        del engine, trainer, weights
        if options.device == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
    if "ipc" in found:
        found["ratio"] = found["gpu_ipc"]["update_ms"] / found["ipc"]["update_ms"]
        found["goal"] = 0.2
    return found


def kills(options: argparse.Namespace, backends: list[str], end: float) -> dict[str, Any]:
    """Kill a worker in every tenth update, and follow the trainer's memory."""
    found: dict[str, Any] = {}
    ways = ["update_weights", "claimed" if "gpu_ipc" in backends else "loaded", "loaded", "finish_weight_update"]
    for backend in backends:
        # Theirs is run for a quarter of the time.
        until = end if backend == "gpu_ipc" else time.monotonic() + (end - time.monotonic()) / 4
        engine, trainer, weights = pair(backend, 20, options.device, 8 * SIZE * SIZE * 4)
        spares = [engines.Worker(0, *engine._of) for _ in range(3)]
        trainer.send_weights()
        memory, killed, named, wrong = [used(trainer)], 0, 0, 0
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
                except engines.WorkerFailed:
                    pass
                killed += 1
                engine.workers[rank].end()
                spare = spares.pop(0)
                spare.rank = rank
                engine.workers[rank] = spare
                spares.append(engines.Worker((rank + 1) % WORKERS, *engine._of))
                if backend == "ipc":
                    engine = restart(engine, trainer)
                trainer.connect_workers()
            trainer.send_weights()
            updates += 1
            if step % 50 == 0:
                wrong += not right(engine, weights)
                memory.append(used(trainer))
        memory.append(used(trainer))
        found[backend] = {
            "updates": updates,
            "killed": killed,
            "named": named,
            "wrong": wrong,
            "MiB_first": memory[0] / MIB,
            "MiB_last": memory[-1] / MIB,
            "MiB_most": max(memory) / MIB,
            "MiB_over_time": [round(one / MIB) for one in memory],
        }
        for worker in spares:
            worker.end()
        engine.end()
        print(f"kills {backend}: {json.dumps(found[backend])}", flush=True)
        del engine, trainer, weights
    return found


def restart(engine: Engine, trainer: Any) -> Engine:
    """Start all workers anew: those of `ipc` that were not killed are half-way in an update that cannot begin again."""
    for rank, worker in enumerate(engine.workers):
        worker.end()
        engine.workers[rank] = engines.Worker(rank, *engine._of)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["speed", "kills"], choices=["speed", "kills"])
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    backends = ["ipc", "gpu_ipc"] if options.device == "cuda" else ["gpu_ipc"]
    found: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__, "device": options.device}
    if options.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    for part, run in (("speed", lambda: speed(options, backends)), ("kills", lambda: kills(options, backends, end))):
        if part in options.only:
            try:
                found[part] = run()
            except Exception as error:
                import traceback

                traceback.print_exc()
                found[part] = {"failed": repr(error)}
    print(json.dumps(found))
    if options.out:
        with open(options.out, "w") as file:
            json.dump(found, file, indent=1)
    failed = [part for part in options.only if "failed" in found[part]]
    sys.exit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
