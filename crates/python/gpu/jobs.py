"""Jobs that people do with several processes and a GPU, beside PyTorch's own queues, in one run.

    python jobs.py [--only camera kv weights broadcast] [--device cuda:0] [--ticks 2000] [--rounds 5] [--out FILE]

A camera (frames of 4 MiB at 1 kHz), a KV cache (10,000 blocks of 64 KiB a second), weights (1,000 tensors of 4 MiB, and 64 GiB in
200, to four processes), and weights to processes on other GPUs, beside a broadcast by NCCL (`broadcast.py`). Prints what is slower
than PyTorch first. Every frame and tensor is counted, and a word of each is compared: one that is missing or wrong fails the job.

`gpu-ipc bench --from FILE` shows what `--out` wrote, and `ci/device/chart FILE PICTURE` draws it.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from report import failed, report, row, table, write
from speed import MIB, PATIENCE, a_state_dict, hear

import gpu_ipc

GIB = 1 << 30
# Frames that may be in the other process' hands.
POOL = 64
# A broadcast takes less, or hangs.
BROADCAST_SECONDS = 240


def look(frames: list[torch.Tensor], number: int, sent: int, latencies: list[int]) -> None:
    """Do what a consumer's kernel does with each frame: read it, and compare."""
    for offset, frame in enumerate(frames):
        expected, found = (number + offset) % 251, int(frame[-1])
        assert found == expected, f"frame {number + offset} has {found}, not {expected}"
        latencies.append(time.monotonic_ns() - sent)


def subscribe(path: str, queue: Any, pipe: Any, device: str) -> None:
    """Be the other process of a flow, by either way."""
    torch.zeros(1, device=device)
    with gpu_ipc.connect(path) as participant:
        pipe.send(participant.id)
        for how in ("ours", "theirs"):
            latencies: list[int] = []
            cpu = time.process_time_ns()
            while True:
                item = pipe.recv() if how == "ours" else queue.get(timeout=PATIENCE)
                if item is None:
                    break
                number, sent, frames = item
                if how == "ours":
                    frames = [one.torch() for one in participant.claim_many(frames)]
                look(frames, number, sent, latencies)
                frames.clear()
                pipe.send(number)
            pipe.send((latencies, time.process_time_ns() - cpu))


def flow(device: str, nbytes: int, batch: int, ticks: int) -> dict[str, Any]:
    """Send frames at 1,000 ticks a second, and return latencies, processor times for each frame, and frames a second."""
    context = torch.multiprocessing.get_context("spawn")
    queue, (pipe, other) = context.Queue(), context.Pipe()
    result: dict[str, Any] = {}
    frames = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(POOL)]
    with gpu_ipc.Session(device) as session:
        process = context.Process(target=subscribe, args=(session.path, queue, other, device), daemon=True)
        process.start()
        reader = hear(pipe)
        for how in ("ours", "theirs"):
            begin, cpu = time.monotonic(), time.process_time_ns()
            outstanding = 0
            for tick in range(ticks):
                time.sleep(max(0.0, begin + tick / 1000 - time.monotonic()))
                # A frame is written again when the other process has let go of it.
                while outstanding >= POOL // batch - 1:
                    hear(pipe)
                    outstanding -= 1
                number = tick * batch
                chosen = [frames[(number + offset) % POOL] for offset in range(batch)]
                for offset, frame in enumerate(chosen):
                    frame.fill_((number + offset) % 251)
                torch.cuda.synchronize()
                sent = time.monotonic_ns()
                if how == "ours":
                    pipe.send((number, sent, session.share_many(chosen, to=[reader])[0]))
                else:
                    queue.put((number, sent, chosen))
                outstanding += 1
            for _ in range(outstanding):
                hear(pipe)
            taken = time.process_time_ns() - cpu
            elapsed = time.monotonic() - begin
            if how == "ours":
                pipe.send(None)
            else:
                queue.put(None)
            latencies, theirs = hear(pipe)
            assert len(latencies) == ticks * batch, f"{len(latencies)} of {ticks * batch} frames came"
            result[how] = {
                # The first pool is mapped.
                "latency": latencies[min(POOL, len(latencies) // 2) :],
                "cpu-producer": [taken / len(latencies)],
                "cpu-consumer": [theirs / len(latencies)],
                "rate": ticks * batch / elapsed,
            }
        process.join(PATIENCE)
    return result


FLOW = {
    "latency": "from the end of the producer's kernel until the consumer has read a word of the frame",
    "cpu-producer": "the producer's processor time for each frame",
    "cpu-consumer": "the consumer's processor time for each frame",
}


def flow_rows(job: str, device: str, nbytes: int, batch: int, ticks: int) -> list[dict[str, Any]]:
    result = flow(device, nbytes, batch, ticks)
    ours, theirs = result["ours"], result["theirs"]
    rates = f"{ticks * batch} frames; {ours['rate']:.0f} a second, and {theirs['rate']:.0f} by PyTorch's queues"
    return [
        row(f"{job}-{what}/1", text, "queues", ours[what], theirs[what], at=1, note=rates if what == "latency" else None)
        for what, text in FLOW.items()
    ]


def weights(device: str, tensors: int, nbytes: int, rounds: int) -> dict[str, Any]:
    result = a_state_dict(device, tensors, nbytes, 4, rounds)
    ours, theirs = ([1e6 * result[name], 1e6 * result[f"{name}_most"]] for name in ("ours", "theirs"))
    note = f"the first round, which maps, took {result['ours_first']:.1f} ms, and {result['theirs_first']:.1f} by queues"
    what = "a trainer's tensors to 4 processes, until the last has them all"
    made = row(f"weights-time/{tensors}x{nbytes / MIB:.3g}MiB", what, "queues", ours[:1], theirs[:1], at=nbytes, note=note)
    # The median is one of few rounds, of which the slowest is the 99th percentile.
    for figure, (_, most) in ((made["ours"], ours), (made["baseline"], theirs)):
        figure |= {"p99": most, "samples": rounds}
    return made


def weights_rows(device: str, rounds: int) -> list[dict[str, Any]]:
    rows = [weights(device, 1000, 4 * MIB, rounds)]
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    # 64 GiB, or what the device has room for beside the processes' contexts.
    whole = min(64 * GIB, (free - 8 * GIB) // (4 * GIB) * 4 * GIB)
    if whole > 0:
        rows.append(weights(device, 200, whole // 200 // 4096 * 4096, rounds))
    return rows


def broadcast_rows(rounds: int) -> list[dict[str, Any]]:
    """Run the broadcast in processes of its own, all of which end with it: NCCL waits for a lost peer for ever."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, str(Path(__file__).with_name("broadcast.py")), "--rounds", str(rounds), "--out", str(out)]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            assert process.wait(BROADCAST_SECONDS) == 0, f"broadcast.py ended with {process.returncode}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return json.loads(out.read_text())


def measured(job: str, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Do a job; what goes wrong is that job's alone."""
    try:
        return make()
    except Exception as error:
        traceback.print_exc()
        return [failed(job, repr(error))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ticks", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--only", nargs="+", metavar="JOB", help="camera, kv, weights, broadcast (default: all)")
    options = parser.parse_args()
    jobs: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "camera": lambda: flow_rows("camera", options.device, 4 * MIB, 1, options.ticks),
        "kv": lambda: flow_rows("kv", options.device, 64 << 10, 10, options.ticks),
        "weights": lambda: weights_rows(options.device, options.rounds),
        "broadcast": lambda: broadcast_rows(options.rounds),
    }
    if unknown := set(options.only or []) - jobs.keys():
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    chosen = {name: make for name, make in jobs.items() if name in (options.only or jobs)}
    whole = report(options.device, [row for name, make in chosen.items() for row in measured(name, make)])
    print(table(whole))
    if options.out:
        write(options.out, whole)
    print(f"\npython-jobs: {len(whole['rows'])} figures of {len(chosen)} jobs")
    return 0 if whole["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
