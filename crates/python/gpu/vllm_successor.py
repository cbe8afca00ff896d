"""A killed engine's successor with weights in a broker, beside one that reads them from the page cache; and new epochs under a captured graph.

    python vllm_successor.py [--bytes 17179869184] [--epochs 5] [--device cuda:0|host:0] [--out FILE]

An engine publishes a module by `gpu_ipc.integrations._modules` and is killed with SIGKILL. Then two processes are timed from their first line after the imports to their first right answer: one maps the object,
one reads the same tensors from a file of safetensors that is in the page cache. What it prints last is JSON.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

MIB = 1 << 20


def module_of(torch: Any, count: int, device: str) -> Any:
    """Make layers of 64 MiB each."""
    with torch.device(device):
        return torch.nn.ModuleList(torch.nn.Linear(4096, 4096, bias=False) for _ in range(count)).requires_grad_(False)


def answer(torch: Any, model: Any) -> float:
    """Return what depends on every layer, whole in float64."""
    return float(sum(layer.weight.double().sum() for layer in model))


def fill(model: Any, first: int) -> None:
    for step, layer in enumerate(model):
        layer.weight.fill_(step % 7 + first)


def put(options: argparse.Namespace, model: Any) -> float:
    """Publish the model, and return the milliseconds that it took."""
    import gpu_ipc
    from gpu_ipc.integrations import _modules

    begin = time.perf_counter()
    with gpu_ipc.connect_broker(options.dir, options.device) as broker:
        _modules.publish(broker, "model", model)
    return (time.perf_counter() - begin) * 1e3


def told(torch: Any, model: Any, put_ms: float) -> None:
    print(json.dumps({"answer": answer(torch, model), "put_ms": put_ms}), flush=True)


def role(options: argparse.Namespace) -> None:
    """Be one of the processes."""
    if options.role == "broker":
        from gpu_ipc import _gpu_ipc

        return _gpu_ipc._serve_broker(options.dir, options.device)
    import torch

    import gpu_ipc
    from gpu_ipc.integrations import _modules

    place = "cuda" if options.device.startswith("cuda") else "cpu"
    if place == "cuda":
        # The context, and the kernels of the answer.
        torch.zeros(4096, device=place).double().sum().item()
    file = f"{options.dir}/model.safetensors"
    begin = time.perf_counter()
    if options.role in ("engine", "trainer"):
        model = module_of(torch, options.layers, place)
        if options.role == "engine":
            from safetensors.torch import save_file

            fill(model, 1)
            save_file(model.state_dict(), file)
            told(torch, model, put(options, model))
            signal.pause()
        for line in sys.stdin:
            fill(model, 100 + int(line))
            told(torch, model, put(options, model))
        return None
    model = module_of(torch, options.layers, "meta")
    if options.role == "maps":
        with gpu_ipc.connect_broker(options.dir, options.device) as broker:
            _modules.adopt(broker.open("model"), model)
    else:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(file, device=place), assign=True)
    ready = time.perf_counter()
    found = {"answer": answer(torch, model)}
    found |= {"ready_ms": (ready - begin) * 1e3, "answered_ms": (time.perf_counter() - begin) * 1e3}
    print(json.dumps(found), flush=True)
    if options.role == "maps":
        graph = captured(torch, model) if place == "cuda" else (lambda: answer(torch, model))
        for line in sys.stdin:
            addresses = [layer.weight.data_ptr() for layer in model]
            begin = time.perf_counter()
            model.gpu_ipc_object.advance()
            took = (time.perf_counter() - begin) * 1e3
            kept = addresses == [layer.weight.data_ptr() for layer in model]
            print(json.dumps({"advance_ms": took, "kept": kept, "answer": graph()}), flush=True)
    return None


def captured(torch: Any, model: Any) -> Any:
    """Capture the answer into a graph, and return what replays it."""
    into = torch.zeros((), dtype=torch.float64, device="cuda")

    def add() -> None:
        into.zero_()
        for layer in model:
            into.add_(layer.weight.sum(dtype=torch.float64))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        add()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add()

    def replay() -> float:
        graph.replay()
        torch.cuda.synchronize()
        return float(into)

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=16 << 30)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out")
    parser.add_argument("--role", default=None)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--layers", type=int, default=0)
    options = parser.parse_args()
    if options.role:
        return role(options)
    folder = tempfile.TemporaryDirectory(dir=os.environ.get("OUT_SCRATCH"))
    where = pathlib.Path(folder.name) / "broker"
    where.mkdir(mode=0o700)
    layers = options.bytes // (64 * MIB)

    def start(kind: str, **more: Any) -> "subprocess.Popen[str]":
        command = [sys.executable, __file__, "--role", kind, "--dir", str(where), "--device", options.device, "--layers", str(layers)]
        command += [text for key, value in more.items() for text in (f"--{key}", str(value))]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(process: "subprocess.Popen[str]", line: str) -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(line)
        process.stdin.flush()
        return read(process)

    def read(process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"a process ended with status {process.wait()}"
        return dict(json.loads(line))

    import gpu_ipc

    broker = start("broker")
    end = time.monotonic() + 60
    while True:
        try:
            gpu_ipc.connect_broker(where, options.device).close()
            break
        except gpu_ipc.ConnectFailed:
            assert broker.poll() is None and time.monotonic() < end, "the broker does not listen"
    found: dict[str, Any] = {"bytes": layers * 64 * MIB, "device": options.device}
    engine = start("engine")
    found["engine"] = read(engine)
    print(f"published: {json.dumps(found)}", flush=True)
    engine.send_signal(signal.SIGKILL)
    engine.wait()
    reads = start("reads")
    found["reads"] = read(reads)
    reads.wait()
    maps = start("maps")
    found["maps"] = read(maps)
    found["right"] = found["reads"]["answer"] == found["engine"]["answer"] == found["maps"]["answer"]
    found["ratio"] = found["maps"]["answered_ms"] / found["reads"]["answered_ms"]
    found["ratio_ready"] = found["maps"]["ready_ms"] / found["reads"]["ready_ms"]
    found["goal"] = 0.1
    print(f"succeeded: {json.dumps(found)}", flush=True)
    found["epochs"] = []
    trainer = start("trainer")
    for step in range(options.epochs):
        wanted = ask(trainer, f"{step}\n")
        one = ask(maps, "advance\n")
        found["epochs"].append(one | {"put_ms": wanted["put_ms"], "right": one.pop("answer") == wanted["answer"]})
    found["advance_ms_most"] = max((one["advance_ms"] for one in found["epochs"]), default=None)
    found["advance_goal_ms"] = 2.0
    for process in (trainer, maps, broker):
        process.kill()
        process.wait()
    print(json.dumps(found))
    if options.out:
        pathlib.Path(options.out).write_text(json.dumps(found, indent=1))
    wrong = not found["right"] or not all(one["right"] and one["kept"] for one in found["epochs"])
    sys.exit("wrong answers or addresses" if wrong else 0)


if __name__ == "__main__":
    main()
