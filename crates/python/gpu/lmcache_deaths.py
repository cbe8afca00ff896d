"""Workers of LMCache that are killed: seconds until their device memory is back, with `gpu_ipc.integrations.lmcache` and without.

    python lmcache_deaths.py [--only with without words] [--mib 4096] [--device cuda|cpu] [--out FILE]

`with`: servers with the module, and for each a worker with the genuine adapter of LMCache that is killed in its warm-up, while it stores, and
while streams of the server wait for work that it had not finished; memory of `cuMemCreate` that has no handle but a descriptor; and an idle
worker that must stay. `without`: a server as LMCache starts it, killed in warm-up and while it serves; the first is not waited for to its
end (3,600 s). `words`: whether a survivor can end waits for the words and events of a process that died. With `cpu`
only what `/status` shows counts: for a machine without a GPU.

LMCache's compiled operations of 0.5.6 ask PyTorch 2.11 for one name that it lacks, a constructor of an error; with `lmcache_symbols.so`
beside this program (ci/device/lmcache-bundle) they load. Without them LMCache neither copies nor completes in the order of its streams.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

MIB = 1 << 20
OPTIONS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
OPTIONS.add_argument("--only", nargs="+", default=["words", "with", "without"], choices=["words", "with", "without"])
OPTIONS.add_argument("--mib", type=int, default=4096)
OPTIONS.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
OPTIONS.add_argument("--cases", nargs="+", help="of `with`, such as serving-torch")
OPTIONS.add_argument("--patience", type=float, default=170.0, help="seconds that memory is waited for without the module")
OPTIONS.add_argument("--out")
OPTIONS.add_argument("--role")
OPTIONS.add_argument("--port", type=int)
OPTIONS.add_argument("--handles", default="torch", choices=["torch", "isolated", "vmm"])
OPTIONS.add_argument("--stage", default="warm-up", choices=["warm-up", "pinging", "serving", "pending", "word", "event"])
OPTIONS.add_argument("--plain", action="store_true")
SYMBOLS = Path(__file__).resolve().with_name("lmcache_symbols.so")
LAYERS, BLOCK, HEADS, SIZE = 8, 16, 8, 128
CHUNK = 256


# The worker.


def vmm_tensor(shape: tuple[int, ...]) -> Any:
    """Make a tensor in memory of `cuMemCreate` whose only handle is a descriptor, as vLLM's cumem allocator does."""
    import cupy
    import torch
    from cuda.bindings import driver

    def call(result: Any) -> Any:
        assert result[0] == driver.CUresult.CUDA_SUCCESS, result
        return result[1] if len(result) > 1 else None

    torch.cuda.current_stream().synchronize()
    where = driver.CUmemLocation()
    where.type, where.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    kind = driver.CUmemAllocationProp()
    kind.type, kind.location = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, where
    kind.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    grain = call(driver.cuMemGetAllocationGranularity(kind, driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
    wanted = 2
    for extent in shape:
        wanted *= extent
    size = -(-wanted // grain) * grain
    handle = call(driver.cuMemCreate(size, kind, 0))
    base = call(driver.cuMemAddressReserve(size, 0, 0, 0))
    call(driver.cuMemMap(base, size, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location, access.flags = where, driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call(driver.cuMemSetAccess(base, size, [access], 1))
    call(driver.cuMemRelease(handle))
    memory = cupy.cuda.UnownedMemory(int(base), size, owner=None)
    flat = cupy.ndarray(wanted, dtype=cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
    return torch.from_dlpack(flat).view(torch.bfloat16).reshape(shape)


def worker(options: argparse.Namespace) -> None:
    import torch
    import zmq
    from lmcache.integration.vllm.vllm_multi_process_adapter import (
        LMCacheMPWorkerAdapter,
        LoadStoreOp,
        ParallelStrategy,
    )

    # Imported, which takes longest: the rest is done when it is this worker's turn.
    if not options.plain:
        from gpu_ipc.integrations import lmcache
    sys.stdin.readline()
    config: dict[str, Any] = {"lmcache.mp.heartbeat_interval": 1.0, "lmcache.mp.mp_transfer_mode": "lmcache_driven"}
    if options.handles != "torch":
        config["lmcache.mp." + {"isolated": "isolated_ipc", "vmm": "use_vmm_api"}[options.handles]] = True
    strategy = ParallelStrategy(mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1)
    adapter = LMCacheMPWorkerAdapter(
        f"tcp://localhost:{options.port}", zmq.Context(), "model", BLOCK, strategy, extra_config=config
    )
    if not options.plain:
        lmcache.attach(adapter.req_client)
    blocks = options.mib * MIB // (LAYERS * 2 * BLOCK * HEADS * SIZE * 2)
    shape = (2, blocks, BLOCK, HEADS, SIZE)
    make = vmm_tensor if options.handles == "vmm" else lambda shape: torch.zeros(shape, dtype=torch.bfloat16, device=options.device)
    caches = {f"model.layers.{layer}.self_attn.attn": make(shape) for layer in range(LAYERS)}
    if options.device == "cuda":
        torch.cuda.synchronize()
    adapter.register_kv_caches(caches, layout_hints={})
    print(json.dumps({"registered": adapter.instance_id}), flush=True)
    if options.stage == "pinging":
        # As its first store does.
        adapter._ensure_heartbeat_started()
    if options.stage in ("warm-up", "pinging"):
        sys.stdin.read()
        os._exit(0)
    number = 0
    while True:
        number += 1
        if options.stage == "pending":
            # Longer than anything here lasts; a kill ends it.
            torch.cuda._sleep(1 << 40)
        tokens = [number * CHUNK + token for token in range(CHUNK)]
        op = LoadStoreOp(tokens, [list(range(CHUNK // BLOCK))], 0, CHUNK)
        adapter.submit_store_request(str(number), op, adapter.create_recorded_event())
        future = adapter.store_futures[str(number)]
        if options.stage == "pending":
            print(json.dumps({"stored": number}), flush=True)
            sys.stdin.read()
        ended = time.monotonic() + 20
        while not future.query() and time.monotonic() < ended:
            time.sleep(0.001)
        adapter.get_finished(set())
        if number == 20:
            print(json.dumps({"stored": number}), flush=True)


# The driver.


class Server:
    """A server of LMCache, with the module or as it is."""

    started = 0
    # Seconds until it must answer.
    patience = 150.0

    def __init__(self, out: Path, *more: str, plain: bool = False, port: int = 0) -> None:
        Server.started += 1
        free, self.http, metrics = free_ports(3)
        self.port = port or free
        module = [] if plain else ["--server-module", json.dumps({"module_path": "gpu_ipc.integrations.lmcache"})]
        self.log = out / f"lmcache-server-{Server.started}.log"
        ports = ["--port", self.port, "--http-port", self.http, "--prometheus-port", metrics]
        command = [sys.executable, "-m", "lmcache.cli.main", "server", *map(str, ports), *module]
        command += ["--l1-size-gb", "1", "--eviction-policy", "LRU", *more]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def status(self, timeout: float = 10) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/status", timeout=timeout) as answer:
            return json.load(answer)

    def operations(self) -> str:
        """Tell which operations of a device it has."""
        return "PyTorch's" if "stays on the torch baseline" in self.log.read_text(errors="replace") else "compiled"

    def wait(self) -> "Server":
        until(lambda: self.answers(), self.patience, f"{self.log} does not answer")
        return self

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return bool(self.status())
        except OSError:
            return False

    def show_threads(self) -> list[str]:
        """Have it write down what its threads do, and end; return the first lines of each."""
        self.process.send_signal(signal.SIGABRT)
        self.process.wait()
        text = self.log.read_text(errors="replace")
        print(text[-8000:], file=sys.stderr, flush=True)
        threads = text[text.rfind("Fatal Python error") :].split("\n\n")
        return ["; ".join(line.strip() for line in thread.splitlines()[:5]) for thread in threads if "lmcache" in thread][:12]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Worker:
    def __init__(self, out: Path, server: Server, options: argparse.Namespace, *more: str, mib: int | None = None) -> None:
        self.mib = mib or options.mib
        same = ["--port", server.port, "--mib", self.mib, "--device", options.device]
        command = [sys.executable, __file__, "--role", "worker", *map(str, same), *more]
        self.server = server
        self.log = out / f"lmcache-worker-{time.monotonic_ns()}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def begin(self) -> "Worker":
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self

    def told(self, what: str) -> int:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{") and what in (said := json.loads(line)):
                return int(said[what])
        raise AssertionError(f"the worker ended before it {what}: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def until(condition: Any, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(what)
        time.sleep(0.005)


def free_bytes(options: argparse.Namespace) -> int:
    if options.device != "cuda":
        return 0
    import torch

    return int(torch.cuda.mem_get_info()[0])


def seconds_to_return(options: argparse.Namespace, worker: Worker, instance: int, patience: float) -> dict[str, Any]:
    """Kill a worker, and time how long its caches stay registered and its memory taken."""
    silent = 0.0

    def registered() -> bool:
        nonlocal silent
        asked = time.monotonic()
        try:
            return instance in worker.server.status()["registered_gpu_ids"]
        except OSError:
            return True
        finally:
            silent = max(silent, time.monotonic() - asked)

    is_registered = registered()
    before = free_bytes(options)
    start = time.monotonic()
    worker.kill()
    found: dict[str, Any] = {"registered_before": is_registered, "killed_s": round(time.monotonic() - start, 3)}
    found |= {"unregistered_s": None, "memory_back_s": None, "patience_s": patience}
    while time.monotonic() - start < patience and None in found.values():
        passed = round(time.monotonic() - start, 3)
        back = free_bytes(options) - before
        # The pool, and the worker's context, which goes with its process.
        if found["memory_back_s"] is None and (options.device != "cuda" or back >= 0.95 * worker.mib * MIB):
            found["memory_back_s"] = passed if options.device == "cuda" else 0
        if found["unregistered_s"] is None and not registered():
            found["unregistered_s"] = round(time.monotonic() - start, 3)
        time.sleep(0.01)
    return found | {"longest_answer_s": round(silent, 3)}


CASES = [("warm-up", "torch"), ("serving", "torch"), ("warm-up", "isolated"), ("serving", "isolated"), ("pending", "isolated")]
CASES += [("warm-up", "vmm"), ("pending", "torch")]


def run_with(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Everything with the module."""
    found: dict[str, Any] = {}
    names = CASES if options.device == "cuda" else CASES[:2]
    names = [name for name in names if not options.cases or "-".join(name) in options.cases]
    idle = Server(out, "--worker-reap-timeout-seconds", "30", "--worker-registration-grace-seconds", "30")
    plain, isolated = Server(out), Server(out, "--isolated-ipc")
    # One that hangs takes no other case with it.
    pending = Server(out) if ("pending", "torch") in names else plain
    idle_worker = Worker(out, idle, options, mib=64)
    cases = []
    for stage, handles in names:
        server = isolated if handles == "isolated" else pending if stage == "pending" else plain
        # After what waits, the next: a worker that is killed in its warm-up.
        kinds = [stage, "warm-up"] if stage == "pending" else [stage]
        cases.append((stage, handles, server, [Worker(out, server, options, "--handles", handles, "--stage", kind) for kind in kinds]))
    idle.wait()
    idle_instance, idle_since = idle_worker.begin().told("registered"), time.monotonic()
    for stage, handles, server, workers in cases:
        name = f"{stage}, {handles}"
        found[name] = {}
        try:
            server.wait()
            for number, worker in enumerate(workers):
                instance = worker.begin().told("registered")
                if number == 0 and stage != "warm-up":
                    worker.told("stored")
                    time.sleep(1)
                result = seconds_to_return(options, worker, instance, 20)
                found[name] |= {"the next": result} if number else result
            found[name]["status"] = server.status()["gpu_ipc"]
        except (AssertionError, OSError) as error:
            found[name]["error"] = str(error)[-1000:]
        found[name]["operations"] = server.operations()
        if "error" in found[name] or None in found[name].values():
            for worker in workers:
                worker.kill()
            found[name]["threads"] = server.show_threads()
        print(json.dumps({name: found[name]}), flush=True)
    # Two reaper's scans, each of 7.5 s, after its time limit.
    until(lambda: time.monotonic() - idle_since > 50, 60, "time")
    found["idle worker"] = {
        "seconds": round(time.monotonic() - idle_since),
        "limits_s": 30,
        "registered": idle_instance in idle.status()["registered_gpu_ids"],
    }
    print(json.dumps({"idle worker": found["idle worker"]}), flush=True)
    idle_worker.kill()
    stop(idle, plain, isolated, pending)
    return found


def run_without(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """As LMCache is: a server for each, since all deaths are waited for at once."""
    found: dict[str, Any] = {}
    warming, serving = Server(out, plain=True), Server(out, plain=True)
    pool = options.mib // 2
    first = Worker(out, warming, options, "--plain", mib=pool)
    second = Worker(out, serving, options, "--plain", "--stage", "serving")
    warming.wait()
    early = first.begin().told("registered")
    serving.wait()
    late = second.begin().told("registered")
    second.told("stored")
    # A ping, each second.
    time.sleep(3)
    first.kill()
    found["serving, torch"] = seconds_to_return(options, second, late, options.patience)
    still = early in warming.status()["registered_gpu_ids"]
    found["warm-up, torch"] = {"registered_still": still, "patience_s": options.patience, "mib_held": pool if still else 0}
    print(json.dumps(found), flush=True)
    stop(warming, serving)
    return found


def stop(*servers: Server) -> None:
    """End servers, all at once."""
    threads = [threading.Thread(target=server.stop) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# What a survivor can do about a wait for a process that died (LMCache#4676).

EXPORTER = """
import sys
import torch
from cuda.bindings import runtime
torch.zeros(1, device="cuda")
_, base = runtime.cudaMalloc(4096)
runtime.cudaMemset(base, 0, 4096)
torch.cuda.synchronize()
_, handle = runtime.cudaIpcGetMemHandle(base)
event = torch.cuda.Event(interprocess=True)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    torch.cuda._sleep(1 << 40)
    event.record(stream)
memory = handle.getPtr()
import ctypes
print("HANDLES", ctypes.string_at(memory, 64).hex(), event.ipc_handle().hex(), flush=True)
sys.stdin.read()
"""


def survivor(options: argparse.Namespace) -> None:
    """Wait for a word, or an event, of another process; then complete it. It tells each step, since any may never end."""
    import torch
    from cuda.bindings import driver, runtime

    tell = lambda **said: print(json.dumps(said), flush=True)
    ticks = [time.monotonic()]

    def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            time.sleep(0.02)

    threading.Thread(target=tick, daemon=True).start()
    torch.zeros(1, device="cuda")
    stream = torch.cuda.Stream()
    is_done = lambda: stream.query()
    memory, handle_of_event = sys.stdin.readline().split()
    if options.stage == "word":
        handle = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), bytes.fromhex(memory), 64)
        error, base = runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        assert int(error) == 0, error
        geq = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        (error,) = driver.cuStreamWaitValue64(stream.cuda_stream, int(base) + 8, 5, geq)
        assert int(error) == 0, error
    else:
        event = torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), bytes.fromhex(handle_of_event))
        tell(opened=1)
        event.wait(stream)
        # What LMCache's server does next: an event of its own.
        tell(queued=1)
        own = torch.cuda.Event(interprocess=True)
        own.record(stream)
        tell(recorded=1)
        own.ipc_handle()
    tell(done_before_the_death=is_done(), prepared=1)
    assert sys.stdin.readline() == "dead\n"
    start = time.monotonic()
    while time.monotonic() - start < 8 and not is_done():
        time.sleep(0.001)
    tell(done_after_the_death=is_done(), seconds=round(time.monotonic() - start, 3))
    if not is_done():
        from gpu_ipc.integrations import _waits

        start = time.monotonic()
        if options.stage == "word":
            _waits.complete("cuda:0", [argparse.Namespace(base_ptr=int(base), slot_offset=8, seq=5)])
        else:
            # CUDA allows it in any process; on streams of all queues.
            for _ in range(_waits._QUEUES):
                error, side = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
                assert int(error) == 0, error
                (error,) = runtime.cudaEventRecord(event.cuda_event, side)
                assert int(error) == 0, error
        tell(completing_s=round(time.monotonic() - start, 4))
        while time.monotonic() - start < 8 and not is_done():
            time.sleep(0.0005)
        tell(done_after_completing=is_done(), seconds=round(time.monotonic() - start, 4))
    tell(longest_without_the_interpreter_s=round(max(later - one for one, later in zip(ticks, ticks[1:], strict=False)), 3))
    if is_done():
        with torch.cuda.stream(stream):
            tell(stream_goes_on=float(torch.ones(1 << 20, device="cuda").sum().item()) == float(1 << 20))


def run_words(options: argparse.Namespace, _: Path) -> dict[str, Any]:
    """Both kinds of wait, each in processes of its own that are ended."""
    found: dict[str, Any] = {}
    for what in ("word", "event") if options.device == "cuda" else ():
        found |= run_wait(what)
        print(json.dumps({key: value for key, value in found.items() if key.startswith(what)}), flush=True)
    return found


def run_wait(what: str) -> dict[str, Any]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    dead = subprocess.Popen([sys.executable, "-c", EXPORTER], **pipes)  # type: ignore[call-overload]
    command = [sys.executable, "-X", "faulthandler", __file__, "--role", "survivor", "--stage", what]
    lives = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    handles = dead.stdout.readline().split()
    assert handles[0] == "HANDLES", handles
    lives.stdin.write(" ".join(handles[1:]) + "\n")
    lives.stdin.flush()
    said: list[Any] = []
    reader = threading.Thread(target=lambda: said.extend(json.loads(line) for line in lives.stdout if line.startswith("{")))
    reader.start()
    end = time.monotonic() + 30
    while time.monotonic() < end and lives.poll() is None and not any("prepared" in one for one in said):
        time.sleep(0.01)
    before = len(said)
    start = time.monotonic()
    dead.kill()
    dead.wait()
    found: dict[str, Any] = {f"{what}: seconds of the exporter's end": round(time.monotonic() - start, 3)}
    try:
        lives.stdin.write("dead\n")
        lives.stdin.flush()
        lives.wait(25)
    except (BrokenPipeError, subprocess.TimeoutExpired) as error:
        # Its threads, to the log.
        lives.send_signal(signal.SIGABRT)
        lives.wait()
        found[f"{what}: hangs"] = str(error)[:100]
    reader.join()
    return found | {f"{what}: before the death": said[:before], what: said[before:]}


def main() -> int:
    options = OPTIONS.parse_args()
    os.environ |= {"LMCACHE_TRACK_USAGE": "false", "PYTHONFAULTHANDLER": "1"}
    if SYMBOLS.exists():
        os.environ["LD_PRELOAD"] = str(SYMBOLS)
    if options.role:
        {"worker": worker, "survivor": survivor}[options.role](options)
        return 0
    out = Path(options.out).parent if options.out else Path(tempfile.mkdtemp())
    parts = {"words": run_words, "with": run_with, "without": run_without}
    found: dict[str, Any] = {}
    failed = 0
    for name in options.only:
        try:
            found[name] = parts[name](options, out)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[-3000:]}
            failed += 1
    print(json.dumps(found, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(found), encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
