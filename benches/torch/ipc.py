#!/usr/bin/env python3
"""Times PyTorch's own CUDA IPC, by the names of the rows of `gpu-ipc bench`, and prints one JSON object.

    ipc.py [--quick] [--limbo 0,1000,10000,100000] [--sizes 2,64,512]

A tensor of 512 bytes is shared with `_share_cuda_`, opened in a child process with `_new_shared_cuda` and dropped there.
Every call is timed by itself, from Python: about 0.1 us of each figure is Python's. The segment that the tensors lie in
stays mapped in the child, but for the rows `first-map-handle`.

A drop of a shared tensor looks through the whole limbo, so filling limbo takes time that grows with the square of its
size: 50,000 take ten seconds.
"""

import argparse
import json
import multiprocessing
import sys
import time

BYTES = 512
ROUND = 64
#: Seconds after which a silent child counts as hanging.
PATIENCE = 300


def figures(samples):
    """Sums samples up as `gpu-ipc bench` does."""
    samples = sorted(samples)
    count = len(samples)
    middle = (samples[(count - 1) // 2] + samples[count // 2]) / 2
    p99 = samples[min(count, max(1, -(-count * 99 // 100))) - 1]
    return {"median": middle, "p99": p99, "samples": count, "calls": 1}


def row(name, what, samples, at=None):
    return {"row": name, "what": what, "unit": "ns", "at": at, "ours": figures(samples)}


def timed(call):
    start = time.perf_counter_ns()
    result = call()
    return time.perf_counter_ns() - start, result


def consume(connection):
    """The child: opens and drops what it is told to, and answers with nanoseconds."""
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    opened = torch.UntypedStorage._new_shared_cuda
    held = []
    anchor = None
    connection.send("up")
    while True:
        command, argument = connection.recv()
        if command == "anchor":
            anchor = opened(*argument)
            connection.send([])
        elif command == "open":
            nanos = []
            for wire in argument:
                spent, storage = timed(lambda: opened(*wire))
                nanos.append(spent)
                held.append(storage)
            del storage
            connection.send(nanos)
        elif command == "drop":
            nanos = []
            torch.cuda.synchronize()
            while held:
                start = time.perf_counter_ns()
                held.pop()
                nanos.append(time.perf_counter_ns() - start)
            connection.send(nanos)
        elif command == "first":
            spent, storage = timed(lambda: opened(*argument))
            del storage
            connection.send(spent)
        elif command == "serve":
            # Until nothing comes.
            while (wire := connection.recv()) is not None:
                if wire != "bare":
                    storage = opened(*wire)
                    del storage
                connection.send(1)
            connection.send([])
        elif command == "end":
            del anchor
            connection.send([])
            return
        else:
            raise ValueError(command)


class Child:
    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=consume, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.answer()

    def answer(self):
        if not self.connection.poll(PATIENCE):
            self.process.kill()
            raise RuntimeError(f"the child was silent for {PATIENCE} s")
        return self.connection.recv()

    def ask(self, command, argument=None):
        self.connection.send((command, argument))
        return self.answer()


def storages(torch, count):
    made = [torch.zeros(BYTES, dtype=torch.uint8, device="cuda").untyped_storage() for _ in range(count)]
    torch.cuda.synchronize()
    return made


def cycle(torch, child, rounds):
    share, claim, drop = [], [], []
    for turn in range(rounds + 1):
        sent = storages(torch, ROUND)
        shared, wires = [], []
        for storage in sent:
            spent, wire = timed(storage._share_cuda_)
            shared.append(spent)
            wires.append(wire)
        opened = child.ask("open", wires)
        dropped = child.ask("drop")
        del storage, sent
        torch.cuda.ipc_collect()
        # The first round is not counted.
        if turn:
            share += shared
            claim += opened
            drop += dropped
    parts = [figures(part) for part in (share, claim, drop)]
    whole = dict(parts[0], median=sum(p["median"] for p in parts), p99=sum(p["p99"] for p in parts))
    return [
        row("share", "_share_cuda_ of a tensor of 512 bytes", share),
        row("claim", "_new_shared_cuda, its segment mapped", claim),
        row("drop", "drop of the opened storage, the GPU idle", drop),
        {"row": "cycle", "what": "the three, summed up", "unit": "ns", "at": None, "ours": whole},
    ]


def round_trip(torch, child, count):
    sent = storages(torch, count)
    child.connection.send(("serve", None))
    nanos = []
    for storage in sent:
        start = time.perf_counter_ns()
        child.connection.send(storage._share_cuda_())
        child.answer()
        nanos.append(time.perf_counter_ns() - start)
    bare = []
    for _ in range(count):
        start = time.perf_counter_ns()
        child.connection.send("bare")
        child.answer()
        bare.append(time.perf_counter_ns() - start)
    child.connection.send(None)
    child.answer()
    del storage, sent
    torch.cuda.ipc_collect()
    found = row("round-trip", "share, pipe, open, drop and an answer", nanos)
    found["floor"] = figures(bare)
    return [found]


def limbo(torch, child, counts, samples):
    rows = []
    inside = 0
    for count in sorted(counts):
        while inside < count:
            some = min(1000, count - inside)
            sent = storages(torch, some)
            child.ask("open", [storage._share_cuda_() for storage in sent])
            # Held by the child, dropped here: into limbo.
            del sent
            inside += some
        sent = storages(torch, samples)
        child.ask("open", [storage._share_cuda_() for storage in sent])
        drops = []
        while sent:
            start = time.perf_counter_ns()
            sent.pop()
            drops.append(time.perf_counter_ns() - start)
        inside += samples
        collects = [timed(torch.cuda.ipc_collect)[0] for _ in range(samples)]
        shown = f"{count // 1000}k" if count else "0"
        rows.append(row(f"limbo/{shown}", "drop at the producer of a tensor that is held", drops, count))
        rows.append(row(f"collect-held/{shown}", "ipc_collect, none released", collects, count))
    child.ask("drop")
    torch.cuda.ipc_collect()
    return rows


def first_map(torch, child, sizes, times):
    rows = []
    for mebibytes in sizes:
        free, _ = torch.cuda.mem_get_info()
        if mebibytes << 20 > free // 10 * 9:
            continue
        storage = torch.zeros(mebibytes << 20, dtype=torch.uint8, device="cuda").untyped_storage()
        torch.cuda.synchronize()
        nanos = [child.ask("first", storage._share_cuda_()) for _ in range(times + 1)][1:]
        del storage
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        shown = f"{mebibytes >> 10}GiB" if mebibytes >= 1024 else f"{mebibytes}MiB"
        rows.append(row(f"first-map-handle/{shown}", "_new_shared_cuda, its segment not mapped", nanos, mebibytes << 20))
    return rows


def main():
    numbers = lambda text: [int(word) for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="look whether everything runs: too few samples for figures")
    parser.add_argument("--limbo", type=numbers, default=[0, 1000, 10000, 100000], metavar="N,...")
    parser.add_argument("--sizes", type=numbers, default=[2, 64, 512, 2048, 8192, 32768], metavar="MIB,...")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device")
    torch.cuda.init()
    child = Child()
    # Keeps the segment of small tensors mapped in the child.
    kept = storages(torch, 1)
    child.ask("anchor", kept[0]._share_cuda_())
    report = {"ok": True, "torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": []}
    quick = options.quick
    parts = [
        ("cycle", lambda: cycle(torch, child, 2 if quick else 30)),
        ("round-trip", lambda: round_trip(torch, child, 20 if quick else 500)),
        ("first-map", lambda: first_map(torch, child, options.sizes[: 2 if quick else None], 3 if quick else 12)),
        ("limbo", lambda: limbo(torch, child, [0, 1000] if quick else options.limbo, 5 if quick else 50)),
    ]
    for name, part in parts:
        print(f"torch: {name}", file=sys.stderr, flush=True)
        try:
            report["rows"] += part()
        except Exception as error:  # One that fails does not take the others with it.
            report["ok"] = False
            report["rows"].append({"row": name, "error": f"{type(error).__name__}: {error}"})
            if not child.process.is_alive():
                break
    if child.process.is_alive():
        child.ask("end")
    print(json.dumps(report))
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
