"""Jobs that people do with several processes and a GPU, beside PyTorch's own queues, in one run.

    python jobs.py [--device cuda:0] [--ticks 2000] [--rounds 5] [--out FILE]

A camera (frames of 4 MiB at 1 kHz), a KV cache (10,000 blocks of 64 KiB a second) and weights (1,000 tensors of 4 MiB, and 64 GiB in
200, to four processes). Prints what is slower than PyTorch first. Every frame and tensor is counted, and a word of each is compared:
one that is missing or wrong ends the run.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.multiprocessing
from speed import MIB, PATIENCE, a_state_dict, hear

import gpu_ipc

GIB = 1 << 30
# Frames that may be in the other process' hands.
POOL = 64


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
    """Send frames at 1,000 ticks a second, and return latencies and processor times in microseconds."""
    context = torch.multiprocessing.get_context("spawn")
    queue, (pipe, other) = context.Queue(), context.Pipe()
    result: dict[str, Any] = {"bytes": nbytes, "frames": ticks * batch}
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
            # The first pool is mapped.
            ordered = sorted(latencies[min(POOL, len(latencies) // 2) :])
            result[how] = {
                "latency": statistics.median(ordered) / 1000,
                "latency p99": ordered[len(ordered) * 99 // 100] / 1000,
                "producer's processor time a frame": taken / 1000 / len(latencies),
                "consumer's processor time a frame": theirs / 1000 / len(latencies),
            }
            result[f"{how} frames a second"] = ticks * batch / elapsed
        process.join(PATIENCE)
    return result


def table_of(jobs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """List every figure with its counterpart, what is slower than it first."""
    rows = []
    for job, result in jobs.items():
        if isinstance(result["ours"], dict):
            pairs = [(what, "us", ours, result["theirs"][what]) for what, ours in result["ours"].items()]
        else:
            pairs = [("time", "ms", result["ours"], result["theirs"])]
        rows += [
            {"what": f"{job}: {what}", "unit": unit, "ours": ours, "theirs": theirs, "ratio": ours / theirs}
            for what, unit, ours, theirs in pairs
        ]
    return sorted(rows, key=lambda row: -row["ratio"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ticks", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    options = parser.parse_args()
    jobs = {
        "camera, 4 MiB at 1 kHz": flow(options.device, 4 * MIB, 1, options.ticks),
        "KV, 10,000 x 64 KiB a second": flow(options.device, 64 << 10, 10, options.ticks),
        "weights, 1,000 x 4 MiB to 4": a_state_dict(options.device, 1000, 4 * MIB, 4, options.rounds),
    }
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(options.device)[0]
    # 64 GiB, or what the device has room for beside the processes' contexts.
    whole = min(64 * GIB, (free - 8 * GIB) // (4 * GIB) * 4 * GIB)
    if whole > 0:
        name = f"weights, {whole // GIB} GiB in 200 to 4"
        jobs[name] = a_state_dict(options.device, 200, whole // 200 // 4096 * 4096, 4, options.rounds)
    table = table_of(jobs)
    device, version = torch.cuda.get_device_name(options.device), torch.__version__
    slower = [f"{row['what']} {row['ratio']:.2f} x" for row in table if row["ratio"] > 1]
    print(f"{device}; PyTorch {version}. Medians.\nSlower than PyTorch: {', '.join(slower) or 'nothing'}\n")
    print("| what | gpu_ipc | PyTorch | ratio |\n|---|---|---|---|")
    for row in table:
        print(f"| {row['what']} | {row['ours']:.1f} {row['unit']} | {row['theirs']:.1f} {row['unit']} | {row['ratio']:.2f} |")
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"device": device, "torch": version, "table": table, "jobs": jobs}, file, indent=1)
    print(f"\npython-jobs: {len(table)} figures of {len(jobs)} jobs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
