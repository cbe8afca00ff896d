"""What sharing a tensor costs, beside PyTorch's own way and beside the library's calls without Python, in one run.

    python speed.py [--device cuda:0] [--count 1000] [--rounds 5] [--out FILE]

Prints a table of medians with the goals; a goal that is missed says so, and is no failure of the run.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

import gpu_ipc
from gpu_ipc import _gpu_ipc

MIB = 1 << 20
# Who takes longer hangs.
PATIENCE = 120.0


def hear(pipe: Any) -> Any:
    assert pipe.poll(PATIENCE), "the other process hangs"
    return pipe.recv()


def median_of(calls: list[Callable[[], Any]]) -> tuple[float, list[Any]]:
    """Call each once, and return the median of microseconds and what they gave."""
    times, given = [], []
    for call in calls:
        start = time.perf_counter_ns()
        result = call()
        times.append((time.perf_counter_ns() - start) / 1000)
        given.append(result)
    return statistics.median(times), given


def microseconds(nanoseconds: list[int]) -> float:
    return statistics.median(nanoseconds) / 1000


# One tensor at a time.


def consume(path: str, pipe: Any, device: str) -> None:
    """Open what comes, one by one, and tell the medians."""
    torch.zeros(1, device=device)
    with gpu_ipc.connect(path) as participant:
        pipe.send(participant.id)
        while (work := pipe.recv()) is not None:
            how, items = work
            if how == "theirs":
                opened, kept = median_of([lambda one=one: torch.UntypedStorage._new_shared_cuda(*one) for one in items])
                dropped, _ = median_of([lambda: kept.__delitem__(-1)] * len(kept))
                pipe.send({"open": opened, "drop": dropped})
            elif how == "rust":
                times, received = _gpu_ipc._time_claims(participant, items)
                received.clear()
                pipe.send({"claim": microseconds(times)})
            else:
                claimed, received = median_of([lambda one=one: participant.claim(one) for one in items])
                taken, tensors = median_of([lambda one=one: one.torch() for one in received])
                received.clear()
                dropped, _ = median_of([lambda: tensors.__delitem__(-1)] * len(tensors))
                pipe.send({"claim": claimed, "torch": taken, "drop": dropped})


def one_by_one(device: str, count: int, nbytes: int, rounds: int) -> dict[str, Any]:
    """Measure one tensor at a time: share, open, drop; in microseconds, the median of rounds after the first."""
    with gpu_ipc.Session(device) as session:
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=consume, args=(session.path, other, device), daemon=True)
        process.start()
        reader = hear(pipe)
        tensors = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        blocks = [session.alloc(nbytes) for _ in range(count)]
        stream = torch.cuda.current_stream()
        torch.cuda.synchronize()
        ranges = {
            "tensor": [(one.data_ptr(), nbytes) for one in tensors],
            "block": [(one.data_ptr, nbytes) for one in blocks],
        }
        seen: dict[str, dict[str, list[float]]] = {}

        def note(kind: str, medians: dict[str, float]) -> None:
            for name, value in medians.items():
                seen.setdefault(kind, {}).setdefault(name, []).append(value)

        # The first round maps, and is not counted. What is compared is measured turn by turn.
        for turn in range(rounds + 1):
            if turn == 1:
                seen.clear()
            shared, given = median_of([lambda one=one: one.untyped_storage()._share_cuda_() for one in tensors])
            pipe.send(("theirs", given))
            note("theirs", {"share": shared, **hear(pipe)})
            for kind, arrays in (("tensor", tensors), ("block", blocks)):
                times, given = _gpu_ipc._time_shares(session, ranges[kind], reader, stream)
                pipe.send(("rust", given))
                note(f"{kind} in Rust", {"share": microseconds(times), **hear(pipe)})
                shared, given = median_of(
                    [lambda one=one: session.share(one, to=reader, stream=stream) for one in arrays]
                )
                pipe.send(("ours", given))
                note(kind, {"share": shared, **hear(pipe)})
        pipe.send(None)
        process.join(PATIENCE)
    row: dict[str, Any] = {"bytes": nbytes}
    for kind, medians in seen.items():
        row[kind] = {name: statistics.median(values) for name, values in medians.items()}
        row[kind]["whole"] = sum(row[kind].values())
    return row


# A state dict to several processes.


def serve(path: str, pipe: Any, device: str) -> None:
    """Be one of those that take state dicts of ours."""
    torch.zeros(1, device=device)
    kept: list[Any] = []
    with gpu_ipc.connect(path) as participant:
        pipe.send(participant.id)
        while (data := pipe.recv()) is not None:
            kept = participant.claim_tensors(data)
            pipe.send(len(kept))
    del kept


def serve_theirs(queue: Any, pipe: Any, device: str) -> None:
    """Be one of those that take state dicts of PyTorch's."""
    torch.zeros(1, device=device)
    pipe.send("ready")
    while True:
        kept = queue.get()
        if kept is None:
            return
        pipe.send(len(kept))


def a_state_dict(device: str, tensors: int, nbytes: int, readers: int, rounds: int) -> dict[str, Any]:
    """Measure a state dict to several processes, until the last has opened all of it, in milliseconds."""
    context = torch.multiprocessing.get_context("spawn")
    state = {f"layer.{n}": torch.zeros(nbytes, dtype=torch.uint8, device=device) for n in range(tensors)}
    torch.cuda.synchronize()

    def start(target: Any, arguments: list[Any]) -> list[Any]:
        started = []
        for argument in arguments:
            pipe, other = context.Pipe()
            process = context.Process(target=target, args=(argument, other, device), daemon=True)
            process.start()
            started.append((pipe, process))
        return [(pipe, process, hear(pipe)) for pipe, process in started]

    with gpu_ipc.Session(device) as session:
        ours = start(serve, [session.path] * readers)
        queues = [context.Queue() for _ in range(readers)]
        theirs = start(serve_theirs, queues)
        taken: dict[str, list[float]] = {"ours": [], "shared": [], "theirs": []}
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            lists = session.share_many(state.values(), to=[other[2] for other in ours])
            taken["shared"].append(1000 * (time.perf_counter() - begin))
            for (pipe, _, _), descriptors in zip(ours, lists, strict=True):
                pipe.send(descriptors)
            for pipe, _, _ in ours:
                assert hear(pipe) == tensors
            taken["ours"].append(1000 * (time.perf_counter() - begin))
            begin = time.perf_counter()
            for queue in queues:
                queue.put(state)
            for pipe, _, _ in theirs:
                assert hear(pipe) == tensors
            taken["theirs"].append(1000 * (time.perf_counter() - begin))
        for pipe, _, _ in ours:
            pipe.send(None)
        for queue in queues:
            queue.put(None)
        for _, process, _ in ours + theirs:
            process.join(PATIENCE)
    result: dict[str, Any] = {"tensors": tensors, "bytes": nbytes, "readers": readers}
    for name, times in taken.items():
        result[name] = statistics.median(times[1:])
        result[f"{name}_first"], result[f"{name}_most"] = times[0], max(times[1:])
    return result


# What was wanted.


def judge(rows: list[dict[str, Any]], state: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the medians with the goals."""
    table = []

    def add(what: str, unit: str, ours: float, other: str, theirs: float, goal: str, met: bool) -> None:
        table.append(
            {"what": what, "unit": unit, "ours": ours, "other": other, "theirs": theirs, "goal": goal, "met": met}
        )

    for row in rows:
        size = f"{row['bytes']} B" if row["bytes"] < MIB else f"{row['bytes'] // MIB} MiB"
        for kind in ("tensor", "block"):
            for call in ("share", "claim"):
                ours, rust = row[kind][call], row[f"{kind} in Rust"][call]
                add(f"{call} of a {kind} of {size}", "us", ours, "Rust", rust, "at most 3 us more", ours - rust <= 3)
        ours, theirs = row["tensor"]["whole"], row["theirs"]["whole"]
        add(f"share, claim, tensor, drop of {size}", "us", ours, "PyTorch", theirs, "at most 1/2", ours * 2 <= theirs)
    what = f"state dict of {state['tensors']} x {state['bytes'] // MIB} MiB to {state['readers']} processes"
    ours, theirs = state["ours"], state["theirs"]
    add(what, "ms", ours, "PyTorch", theirs, "at most 1/10", ours * 10 <= theirs)
    return table


def show(table: list[dict[str, Any]]) -> str:
    lines = ["| what | gpu_ipc | beside | theirs | ratio | goal | reached |", "|---|---|---|---|---|---|---|"]
    for row in table:
        ours, theirs = row["ours"], row["theirs"]
        lines.append(
            f"| {row['what']} | {ours:.2f} {row['unit']} | {row['other']} | {theirs:.2f} {row['unit']} | "
            f"{ours / theirs:.2f} | {row['goal']} | {'yes' if row['met'] else 'NO'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = [one_by_one(options.device, options.count, nbytes, options.rounds) for nbytes in (512, 4 * MIB)]
    state = a_state_dict(options.device, 1000, 4 * MIB, 4, options.rounds)
    table = judge(rows, state)
    device, version = torch.cuda.get_device_name(options.device), torch.__version__
    print(f"{device}; PyTorch {version}. Medians.\n")
    print(show(table))
    for row in rows:
        print(f"\nOf {row['bytes']} bytes, us:")
        for kind, medians in row.items():
            if kind != "bytes":
                print(f"  {kind}: " + ", ".join(f"{name} {value:.2f}" for name, value in medians.items()))
    print("\nThe state dict, ms: " + ", ".join(f"{key} {value:.1f}" for key, value in state.items() if key not in ("tensors", "bytes", "readers")))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"device": device, "torch": version, "table": table, "rows": rows, "state_dict": state}, file, indent=1)
    met = sum(row["met"] for row in table)
    print(f"\npython-bench: {met} of {len(table)} goals reached")
    return 0


if __name__ == "__main__":
    sys.exit(main())
