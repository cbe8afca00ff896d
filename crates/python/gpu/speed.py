"""What sharing a tensor costs beside PyTorch's own way, in one run: medians of microseconds.

    python speed.py [--device cuda:0] [--count 1000] [--out FILE]
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

MIB = 1 << 20


def median_of(calls: list[Callable[[], Any]]) -> tuple[float, list[Any]]:
    """Call each once, and return the median of microseconds and what they gave."""
    times, given = [], []
    for call in calls:
        start = time.perf_counter_ns()
        result = call()
        times.append((time.perf_counter_ns() - start) / 1000)
        given.append(result)
    return statistics.median(times), given


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
                continue
            claimed, received = median_of([lambda one=one: participant.claim(one) for one in items])
            taken, tensors = median_of([lambda one=one: one.torch() for one in received])
            received.clear()
            dropped, _ = median_of([lambda: tensors.__delitem__(-1)] * len(tensors))
            pipe.send({"claim": claimed, "torch": taken, "drop": dropped})


def one_by_one(device: str, count: int, nbytes: int) -> dict[str, Any]:
    """Measure one tensor at a time: share, open, drop."""
    with gpu_ipc.Session(device) as session:
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=consume, args=(session.path, other, device), daemon=True)
        process.start()
        reader = pipe.recv()
        row: dict[str, Any] = {"bytes": nbytes}
        tensors = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        blocks = [session.alloc(nbytes) for _ in range(count)]
        stream = torch.cuda.current_stream()
        torch.cuda.synchronize()
        # The first round maps; what is measured is the second.
        for name in ("first", "second"):
            shared, given = median_of([lambda one=one: one.untyped_storage()._share_cuda_() for one in tensors])
            pipe.send(("theirs", given))
            row["theirs"] = {"share": shared, **pipe.recv()}
            row["theirs"]["whole"] = sum(row["theirs"].values())
            for kind, arrays in (("tensor", tensors), ("block", blocks)):
                shared, given = median_of(
                    [lambda one=one: session.share(one, to=reader, stream=stream) for one in arrays]
                )
                pipe.send(("ours", given))
                row[kind] = {"share": shared, **pipe.recv()}
                row[kind]["whole"] = sum(row[kind].values())
        pipe.send(None)
        process.join()
        row["ratio"] = row["tensor"]["whole"] / row["theirs"]["whole"]
        return row


def serve(path: str, pipe: Any, device: str) -> None:
    """Be one of those that take state dicts of ours."""
    torch.zeros(1, device=device)
    kept: list[Any] = []
    with gpu_ipc.connect(path) as participant:
        pipe.send(participant.id)
        while (data := pipe.recv()) is not None:
            kept = [one.torch() for one in participant.claim_many(data)]
            pipe.send(len(kept))


def serve_theirs(queue: Any, pipe: Any, device: str) -> None:
    """Be one of those that take state dicts of PyTorch's."""
    torch.zeros(1, device=device)
    pipe.send("ready")
    while True:
        kept = queue.get()
        if kept is None:
            return
        pipe.send(len(kept))


def a_state_dict(device: str, tensors: int, nbytes: int, readers: int) -> dict[str, Any]:
    """Measure a state dict to several processes, until the last has opened all of it, in milliseconds."""
    context = torch.multiprocessing.get_context("spawn")
    state = {f"layer.{n}": torch.zeros(nbytes, dtype=torch.uint8, device=device) for n in range(tensors)}
    torch.cuda.synchronize()

    def start(target: Any, argument: Any) -> Any:
        pipe, other = context.Pipe()
        process = context.Process(target=target, args=(argument, other, device), daemon=True)
        process.start()
        return pipe, process, pipe.recv()

    with gpu_ipc.Session(device, region_bytes=64 * MIB) as session:
        others = [start(serve, session.path) for _ in range(readers)]
        ours = []
        for _ in range(5):
            begin = time.perf_counter()
            lists = session.share_many(state.values(), to=[other[2] for other in others])
            for (pipe, _, _), descriptors in zip(others, lists, strict=True):
                pipe.send(descriptors)
            for pipe, _, _ in others:
                assert pipe.recv() == tensors
            ours.append(1000 * (time.perf_counter() - begin))
        for pipe, process, _ in others:
            pipe.send(None)
            process.join()
    queues = [context.Queue() for _ in range(readers)]
    others = [start(serve_theirs, queue) for queue in queues]
    theirs = []
    for _ in range(5):
        begin = time.perf_counter()
        for queue in queues:
            queue.put(state)
        for pipe, _, _ in others:
            assert pipe.recv() == tensors
        theirs.append(1000 * (time.perf_counter() - begin))
    for queue, (_, process, _) in zip(queues, others, strict=True):
        queue.put(None)
        process.join()
    result = {"tensors": tensors, "bytes": nbytes, "readers": readers, "ours_first": ours[0], "theirs_first": theirs[0]}
    result.update(ours=statistics.median(ours[1:]), theirs=statistics.median(theirs[1:]))
    result["ratio"] = result["ours"] / result["theirs"]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = [one_by_one(options.device, options.count, nbytes) for nbytes in (512, 4 * MIB)]
    for row in rows:
        print(f"{row['bytes']} bytes, us: whole way {row['tensor']['whole']:.1f} against {row['theirs']['whole']:.1f}, "
              f"ratio {row['ratio']:.2f}")
        for kind in ("tensor", "block", "theirs"):
            print(f"  {kind}: " + ", ".join(f"{name} {value:.2f}" for name, value in row[kind].items()))
    state = a_state_dict(options.device, 1000, 4 * MIB, 4)
    print(f"state dict of {state['tensors']} tensors of 4 MiB to {state['readers']} processes, ms: {state['ours']:.1f} "
          f"(first {state['ours_first']:.1f}) against {state['theirs']:.1f} (first {state['theirs_first']:.1f}), "
          f"ratio {state['ratio']:.3f}")
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows, "state_dict": state},
                      file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
