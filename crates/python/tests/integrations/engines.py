"""What the tests of vLLM's plug start: workers in processes of their own, and an engine that drives them."""

import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

# A check that makes no context, so that workers can be forked after it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
import torch

# vLLM's engine `ipc` imports Ray for a way that is not used.
if importlib.util.find_spec("ray") is None:
    sys.modules.setdefault("ray", types.ModuleType("ray"))
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from gpu_ipc.integrations import vllm as plug

# A new process has all of this at once: vLLM takes ten seconds to import. What is preloaded is looked for in the environment's path.
os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
# Threads of five processes that wait for one another on two cores take seconds for a copy.
torch.set_num_threads(1)
PATIENCE = 120.0


def start_by(method: str) -> Any:
    """Start workers by `forkserver`, which has the imports, or by `spawn`, where each imports for itself."""
    global spawning
    spawning = multiprocessing.get_context(method)
    if method == "forkserver":
        spawning.set_forkserver_preload([__name__])
    return spawning


spawning = start_by("forkserver")


class Model(torch.nn.Module):
    """Layers of one tensor, and one of three that a checkpoint has apart, as vLLM fuses q, k and v."""

    def __init__(self, layers: int, size: int, device: str = "cpu") -> None:
        super().__init__()
        with torch.device(device):
            self.layers = torch.nn.ModuleList(torch.nn.Linear(size, size, bias=False) for _ in range(layers))
            self.fused = torch.nn.Linear(size, 3 * size, bias=False)
        self.fused.weight.weight_loader = self._load_third  # type: ignore[assignment]
        self.requires_grad_(False)

    @staticmethod
    def _load_third(param: torch.Tensor, loaded: torch.Tensor, third: int) -> None:
        size = loaded.shape[0]
        param.data.narrow(0, third * size, size).copy_(loaded)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            if name.startswith("third."):
                parameter = parameters["fused.weight"]
                parameter.weight_loader(parameter, weight, int(name.removeprefix("third.")))
            else:
                parameter = parameters[name]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)

    def values(self) -> list[list[float]]:
        """Return the least and the greatest element of each tensor as a checkpoint has them."""
        tensors = [layer.weight for layer in self.layers] + list(self.fused.weight.chunk(3))
        return [[float(tensor.min()), float(tensor.max())] for tensor in tensors]


def checkpoint(layers: int, size: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Make the trainer's tensors: the fused ones first, in the middle and last, so that they are in buckets of their own."""
    plain = [f"layers.{i}.weight" for i in range(layers)]
    half = layers // 2
    names = ["third.0", *plain[:half], "third.1", *plain[half:], "third.2"]
    return {name: torch.zeros(size, size, device=device) for name in names}


def expected(weights: dict[str, torch.Tensor]) -> list[list[float]]:
    order = sorted((name for name in weights if name.startswith("layers")), key=lambda name: int(name.split(".")[1]))
    return [[float(weights[name].min()), float(weights[name].max())] for name in [*order, "third.0", "third.1", "third.2"]]


def fill(weights: dict[str, torch.Tensor], step: int) -> None:
    for place, tensor in enumerate(weights.values()):
        tensor.fill_(step * 100 + place)
        tensor[0, 0] = -step


class Source(plug.base.WeightSource):
    """The trainer's tensors, for vLLM from 0.26 on."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights.items())

    if plug._HAS_CONFIG:
        __iter__ = iter_full  # type: ignore[assignment]

        def metadata(self) -> Any:
            return [plug.base.ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self._weights.items()]

    else:
        import functools

        @functools.cached_property
        def metadata(self) -> Any:
            return [plug.base.ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self._weights.items()]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work(pipe: Connection, rank: int, layers: int, size: int, device: str, backend: str) -> None:
    """Be a worker: genuine vLLM makes its engine, and calls come as vLLM's executor makes them."""
    plug.register()
    model = Model(layers, size, device)
    record_metadata_for_reloading(model)
    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(rank=rank), model_config=types.SimpleNamespace(dtype=torch.float32)
    )
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend), config, torch.device(device), model
    )
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    load = model.load_weights
    ends: dict[str, Any] = {}

    def load_weights(weights: Any) -> None:
        if ends.get("at") == "claimed":
            die()
        if ends.get("at") == "refuses":
            ends.clear()
            raise ValueError("the test's model refuses")
        load(weights)
        if ends.get("at") == "loaded":
            die()

    model.load_weights = load_weights  # type: ignore[method-assign]
    while True:
        try:
            call, *given = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        if ends.get("at") == call:
            die()
        answer: Any = None
        try:
            if call == "init_weight_transfer_engine":
                engine.init_transfer_engine(engine.parse_init_info(*given))
            elif call == "values":
                answer = model.values()
            elif call == "are_addresses_kept":
                answer = addresses == [parameter.data_ptr() for parameter in model.parameters()]
            elif call == "end_at":
                ends["at"] = given[0]
            elif call == "sleeps":
                sleeps(given[0])
            elif call == "keeps":
                engine._own = lambda bucket: None  # type: ignore[method-assign]
            elif call == "shutdown":
                engine.shutdown()
            else:
                getattr(engine, call)(*given)
        except Exception as error:
            pipe.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        else:
            pipe.send_bytes(json.dumps({"answer": answer}).encode())


def sleeps(yes: bool) -> None:
    """Put vLLM's own allocator into the state that its `sleep` leaves; there is no GPU for the call itself."""
    from vllm.device_allocator import AllocationData, cumem

    cumem.CuMemAllocator.instance = allocator = cumem.CuMemAllocator()
    allocator.pointer_to_data[0] = AllocationData((0, 1 << 20, 0, 0), "weights", is_asleep=yes)


class WorkerFailed(Exception):
    """A worker's call failed, or the worker is dead."""


class Worker:
    def __init__(self, rank: int, *model: Any) -> None:
        self.rank = rank
        self.pipe, theirs = spawning.Pipe()
        self.process = spawning.Process(target=work, args=(theirs, rank, *model), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, call: str, *given: Any) -> None:
        self.sent = len(data := json.dumps([call, *given]).encode())
        self.pipe.send_bytes(data)

    def answer(self) -> Any:
        if not self.pipe.poll(PATIENCE):
            raise WorkerFailed(f"worker {self.rank} did not answer within {PATIENCE:.0f} s")
        told = json.loads(self.pipe.recv_bytes())
        if "error" in told:
            raise WorkerFailed(f"worker {self.rank}: {told['error']}")
        return told["answer"]

    def ask(self, call: str, *given: Any) -> Any:
        self.send(call, *given)
        return self.answer()

    def end(self) -> None:
        self.pipe.close()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Engine:
    """A client as vLLM's protocol wants one: each call goes to all workers, and fails where one of them does."""

    def __init__(self, workers: int, layers: int, size: int, device: str = "cpu", backend: str = "gpu_ipc") -> None:
        self._of = layers, size, device, backend
        self.workers = [Worker(rank, *self._of) for rank in range(workers)]
        self.sent = 0

    def all(self, call: str, *given: Any) -> list[Any]:
        failed = []
        asked = []
        for worker in self.workers:
            try:
                worker.send(call, *given)
                asked.append(worker)
                self.sent += worker.sent
            except OSError as error:
                failed.append(f"worker {worker.rank} is gone: {error!r}")
        answers = []
        for worker in asked:
            try:
                answers.append(worker.answer())
            except (OSError, EOFError) as error:
                failed.append(f"worker {worker.rank} is gone: {error!r}")
            except WorkerFailed as error:
                failed.append(str(error))
        if failed:
            raise WorkerFailed("; ".join(failed))
        return answers

    def replace(self, rank: int) -> None:
        self.workers[rank].end()
        self.workers[rank] = Worker(rank, *self._of)

    def end(self) -> None:
        for worker in self.workers:
            worker.end()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.all("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.all("finish_weight_update")
