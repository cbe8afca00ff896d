#!/usr/bin/env python3
"""Times PyTorch's caching allocator on the script of `gpu-ipc bench --only alloc-script`, and prints one JSON object.

    allocator.py [--quick] [--live 1000,10000,100000]

The script: N live chunks of log-uniform sizes from 256 bytes to 1 MiB, then random pairs of one free and one alloc, the
same numbers in the same order. What the loop itself takes in Python is measured with two calls that do nothing, and
given beside each figure as `overhead`: take it off before comparing.
"""

import argparse
import json
import math
import sys
import time

PAIRS = 1000
MASK = (1 << 64) - 1


class Sequence:
    """A fixed sequence: xorshift."""

    def __init__(self, state):
        self.state = state

    def next(self):
        state = self.state
        state ^= (state << 13) & MASK
        state ^= state >> 7
        state ^= (state << 17) & MASK
        self.state = state
        return state

    def size(self):
        """Log-uniform from 256 B to 1 MiB."""
        return int(256.0 * math.pow(4096.0, (self.next() >> 11) / (1 << 53)))


def figures(samples):
    samples = sorted(samples)
    count = len(samples)
    middle = (samples[(count - 1) // 2] + samples[count // 2]) / 2
    p99 = samples[min(count, max(1, -(-count * 99 // 100))) - 1]
    return {"median": middle, "p99": p99, "samples": count, "calls": PAIRS}


def pairs(live, batches, alloc, free):
    """Runs the script, and returns the nanoseconds of each pair."""
    random = Sequence(0x9E3779B97F4A7C15)
    held = [alloc(random.size()) for _ in range(live)]
    nanos = []
    for _ in range(batches):
        plan = [(random.next() % live, random.size()) for _ in range(PAIRS)]
        start = time.perf_counter_ns()
        for at, size in plan:
            free(held[at])
            held[at] = alloc(size)
        nanos.append((time.perf_counter_ns() - start) / PAIRS)
    for chunk in held:
        free(chunk)
    return nanos


def raw_calls(torch):
    """The allocator's own calls, without what `caching_allocator_alloc` does about devices each time."""
    stream = torch.cuda.current_stream().cuda_stream
    try:
        alloc = torch._C._cuda_cudaCachingAllocator_raw_alloc
        free = torch._C._cuda_cudaCachingAllocator_raw_delete
        return "raw_alloc and raw_delete", lambda size: alloc(size, stream), free
    except AttributeError:
        from torch.cuda import memory

        return (
            "caching_allocator_alloc and caching_allocator_delete",
            lambda size: memory.caching_allocator_alloc(size, stream=stream),
            memory.caching_allocator_delete,
        )


def main():
    numbers = lambda text: [int(word) for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="look whether everything runs: too few samples for figures")
    parser.add_argument("--live", type=numbers, default=[1000, 10000, 100000], metavar="N,...")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device")
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    calls, alloc, free = raw_calls(torch)
    report = {"ok": True, "torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": []}
    nothing = ([].__len__, (0).__abs__)
    for live in options.live[: 1 if options.quick else None]:
        print(f"torch: alloc-script/{live}", file=sys.stderr, flush=True)
        found = {"row": f"alloc-script/{live // 1000}k", "what": calls, "unit": "ns", "at": live}
        try:
            batches = 10 if options.quick else 300
            found["ours"] = figures(pairs(live, batches, alloc, free))
            bare = lambda size, do=nothing[0]: do()
            found["overhead"] = figures(pairs(live, batches, bare, lambda chunk, do=nothing[1]: do()))
            found["reserved"] = torch.cuda.max_memory_reserved()
            found["in_use"] = torch.cuda.max_memory_allocated()
        except Exception as error:  # Most likely no room: the next size has none either.
            report["ok"] = False
            found["error"] = f"{type(error).__name__}: {error}"
        report["rows"].append(found)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    print(json.dumps(report))
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
