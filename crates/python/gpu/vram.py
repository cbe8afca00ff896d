"""Device memory over time while consumers are killed: tensors shared by gpu_ipc, and by PyTorch's own queues.

    python vram.py [--device cuda:0] [--rounds 12] [--mib N] [--out FILE.json] [--picture FILE.svg]
    python vram.py --from FILE.json --picture FILE.svg       draws what another machine measured

In each round a producer makes a tensor (a fortieth of the GPU, unless `--mib` says how much), sends it to a consumer, and drops it; the consumer reads it and
is killed. The producer then empties PyTorch's cache again and again. What is drawn is the memory that the driver says is in use, all processes together:
contexts of consumers come and go in both lines. Needs PyTorch, and a GPU that nothing else uses. It fails when memory that gpu_ipc shared is not back.
"""

import argparse
import gc
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

MIB = 1 << 20
# Who takes longer hangs.
PATIENCE = 60.0
# How long the memory is watched after each death: the quarantine of gpu_ipc is 0.1 s.
WATCHED = 0.6
WAYS = {"gpu_ipc": ("gpu-ipc", "#2A9D5C"), "pytorch": ("PyTorch's CUDA IPC", "#D1493D")}


def consume(device: str, path: str | None, pipe: Any) -> None:
    """Be a consumer: read the last word of a tensor, tell it, and keep the tensor until this process is killed."""
    import torch

    import gpu_ipc

    torch.zeros(1, device=device)
    participant = gpu_ipc.connect(path) if path else None
    pipe.send(participant.id if participant else None)
    item = pipe.recv()
    tensor = participant.claim(item, timeout=PATIENCE).torch() if participant else item
    pipe.send(int(tensor[-1]))
    pipe.recv()


class Consumer:
    """A consumer, as the producer sees it. It is started a round ahead, so that no round waits for a context."""

    def __init__(self, context: Any, device: str, path: str | None) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=consume, args=(device, path, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.id = self.hear()

    def hear(self) -> Any:
        if not self.pipe.poll(PATIENCE):
            sys.exit(f"vram: consumer {self.process.pid} hangs")
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Watch:
    """The memory in use, every 20 ms."""

    def __init__(self, device: str) -> None:
        self.device, self.begin = device, time.monotonic()
        self.samples: list[tuple[float, int]] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def used(self) -> int:
        import torch

        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)

    def now(self) -> float:
        return time.monotonic() - self.begin

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.samples.append((round(self.now(), 3), self.used()))


def produce(way: str, device: str, rounds: int, nbytes: int) -> dict[str, Any]:
    """Run the rounds of one way, in a process of its own."""
    import torch
    import torch.multiprocessing

    import gpu_ipc

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "gpu_ipc"])
    torch.zeros(1, device=device)
    session = gpu_ipc.Session(device) if way == "gpu_ipc" else None
    path = session.path if session else None

    def collect() -> None:
        gc.collect()
        if session:
            session.collect()
        else:
            torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    # What a first consumer leaves in this process stays out of the picture.
    Consumer(context, device, path).kill()
    collect()
    watch = Watch(device)
    before, killed = watch.used(), []
    watch.thread.start()
    coming = Consumer(context, device, path)
    for number in range(rounds):
        consumer = coming
        tensor = torch.full((nbytes,), number + 1, dtype=torch.uint8, device=device)
        consumer.pipe.send(session.share(tensor, to=consumer.id) if session else tensor)
        read = consumer.hear()
        assert read == number + 1, f"round {number}: the consumer read {read}"
        del tensor
        if number + 1 < rounds:
            coming = Consumer(context, device, path)
        consumer.kill()
        killed.append(round(watch.now(), 3))
        while watch.now() < killed[-1] + WATCHED:
            collect()
            time.sleep(0.02)
    end = time.monotonic() + 10
    while watch.used() > before + nbytes // 2 and time.monotonic() < end:
        collect()
        time.sleep(0.02)
    after = watch.used()
    watch.over.set()
    watch.thread.join()
    peak = max(used for _, used in watch.samples)
    assert peak >= before + nbytes, f"{peak - before} bytes were the most in use beside a tensor of {nbytes}"
    return {"before": before, "after": after, "killed": killed, "samples": watch.samples}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    total = torch.cuda.mem_get_info(options.device)[1]
    nbytes = (options.mib or total // 40 // MIB) * MIB
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(options.device),
        "torch": torch.__version__,
        "rounds": options.rounds,
        "nbytes": nbytes,
    }
    for way in WAYS:
        command = [sys.executable, __file__, "--way", way, "--device", options.device]
        command += ["--rounds", str(options.rounds), "--mib", str(nbytes // MIB)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if ran.returncode != 0:
            sys.exit(f"vram: the producer of {way} ended with status {ran.returncode}")
        found[way] = json.loads(ran.stdout.splitlines()[-1])
    return found


def draw(found: dict[str, Any]) -> str:
    """Draw both lines over the same seconds and GiB."""
    width, height, left, right, top, bottom = 900, 380, 60, 720, 70, 320
    seconds = max(found[way]["samples"][-1][0] for way in WAYS)
    lowest = min(used for way in WAYS for _, used in found[way]["samples"]) / 2**30
    most = max(used for way in WAYS for _, used in found[way]["samples"]) / 2**30 - lowest

    def x(at: float) -> float:
        return left + at / seconds * (right - left)

    def y(used: int) -> float:
        return bottom - (used / 2**30 - lowest) / most * (bottom - top)

    def text(at: float, line: float, words: str, anchor: str = "start", size: int = 12, colour: str = "#000000") -> str:
        place = f'x="{at:.0f}" y="{line:.0f}" text-anchor="{anchor}"'
        return f'<text {place} font-family="sans-serif" font-size="{size}" fill="{colour}">{escape(words)}</text>'

    size = found["nbytes"] / 2**30
    title = f"Device memory while {found['rounds']} consumers are killed, each with a tensor of {size:.3g} GiB"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>',
        text(20, 28, title, size=16),
        text(20, 50, f"{found['device']}, PyTorch {found['torch']}; GiB in use beyond the start. A dot is a kill."),
    ]
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if most / step <= 8)
    for number in range(int(most / step) + 1):
        line = bottom - number * step / most * (bottom - top)
        parts.append(f'<line x1="{left}" y1="{line:.0f}" x2="{right}" y2="{line:.0f}" stroke="#D8D8D8"/>')
        parts.append(text(left - 8, line + 4, f"{number * step:g}", "end"))
    for at in range(0, int(seconds) + 1, 5):
        parts.append(text(x(at), bottom + 20, f"{at} s", "middle"))
    for way, (name, colour) in WAYS.items():
        samples = found[way]["samples"]
        points = " ".join(f"{x(at):.1f},{y(used):.1f}" for at, used in samples)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for killed in found[way]["killed"]:
            used = next((used for at, used in samples if at >= killed), samples[-1][1])
            parts.append(f'<circle cx="{x(killed):.1f}" cy="{y(used):.1f}" r="2.5" fill="{colour}"/>')
        kept = (found[way]["after"] - found[way]["before"]) / 2**30
        parts.append(text(right + 10, y(samples[-1][1]), name, colour=colour, size=13))
        parts.append(text(right + 10, y(samples[-1][1]) + 16, f"{max(kept, 0):.3g} GiB not back", colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--mib", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--from", dest="measured", type=Path)
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(produce(options.way, options.device, options.rounds, options.mib * MIB)))
        return
    found = json.loads(options.measured.read_text("utf-8")) if options.measured else measure(options)
    if options.out:
        options.out.write_text(json.dumps(found), "utf-8")
    if options.picture:
        options.picture.write_text(draw(found), "utf-8")
    for way, (name, _) in WAYS.items():
        kept = found[way]["after"] - found[way]["before"]
        print(f"{name}: {found['rounds']} consumers killed, {max(kept, 0) / MIB:.0f} MiB not back")
    ours = found["gpu_ipc"]
    if ours["after"] - ours["before"] > found["nbytes"] // 2:
        sys.exit("vram: FAILED: memory that gpu_ipc shared is not back")


if __name__ == "__main__":
    main()
