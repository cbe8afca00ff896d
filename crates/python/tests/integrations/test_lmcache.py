"""The module for LMCache, with genuine servers and workers of LMCache on PyTorch: no GPU and no vLLM."""

import argparse
import ast
import contextlib
import inspect
import os
import pathlib
import signal
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {"LMCACHE_TRACK_USAGE": "false", "GPU_IPC_HOST_BYTES": str(16 << 20)}
# The program whose figures a GPU gives has the server and the worker.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "gpu"))

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed: pip install 'gpu-ipc[lmcache]'")
import lmcache_deaths
import torch
from gpu_ipc.integrations import _waits
from gpu_ipc.integrations import lmcache as plug
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter
from lmcache.v1.platform.base.cache_context import BaseCacheContext
from lmcache.v1.platform.devices.cuda import ipc_wrapper

import gpu_ipc

WATCHDOG = 900.0
lmcache_deaths.Server.patience = WATCHDOG
OPTIONS = argparse.Namespace(device="cpu", mib=16)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WATCHDOG
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class Stage:
    """Servers and workers of a test, which end with it."""

    def __init__(self, out: pathlib.Path) -> None:
        self.out, self.ends = out, []

    def server(self, *more: str, **how: Any) -> Any:
        server = lmcache_deaths.Server(self.out, *more, **how)
        self.ends.append(server.stop)
        return server.wait()

    def worker(self, server: Any, stage: str, *more: str) -> tuple[Any, int]:
        worker = lmcache_deaths.Worker(self.out, server, OPTIONS, "--stage", stage, *more).begin()
        self.ends.append(worker.kill)
        return worker, worker.told("registered")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("lmcache"))
    yield stage
    for end in reversed(stage.ends):
        end()


@pytest.fixture(scope="module")
def server(shared: Stage) -> Any:
    return shared.server()


@pytest.fixture
def stage(tmp_path: pathlib.Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for end in reversed(stage.ends):
        end()


def registered(server: Any) -> set[int]:
    return set(server.status()["registered_gpu_ids"])


def living(server: Any) -> set[int]:
    return set(server.status()["gpu_ipc"]["workers"])


@pytest.mark.parametrize("at", ["warm-up", "serving"])
def test_a_killed_workers_caches_are_unregistered_and_anothers_stay(stage: Stage, server: Any, at: str) -> None:
    other, others = stage.worker(server, "warm-up")
    worker, instance = stage.worker(server, at)
    if at == "serving":
        worker.told("stored")
    assert {instance, others} <= registered(server) and {instance, others} <= living(server)
    worker.kill()
    until(lambda: instance not in registered(server), "a dead worker's caches stay registered")
    assert others in registered(server) and instance not in living(server)
    # Whatever its client says by then: it can store and retrieve as before.
    other.kill()
    until(lambda: others not in registered(server), "the other's caches stay registered")


def test_without_the_module_they_stay(stage: Stage, server: Any) -> None:
    plain = stage.server(plain=True)
    (worker, instance), (beside, proven) = stage.worker(plain, "warm-up", "--plain"), stage.worker(server, "warm-up")
    worker.kill()
    beside.kill()
    until(lambda: proven not in registered(server), "a dead worker's caches stay registered")
    assert instance in registered(plain)


def test_a_stopped_worker_lives(stage: Stage, server: Any) -> None:
    worker, instance = stage.worker(server, "pinging")
    worker.process.send_signal(signal.SIGSTOP)
    beside, proven = stage.worker(server, "warm-up")
    beside.kill()
    until(lambda: proven not in registered(server), "a dead worker's caches stay registered")
    assert instance in registered(server) and instance in living(server)
    worker.kill()
    until(lambda: instance not in registered(server), "a stopped worker's death is not proven")


def test_an_idle_worker_is_never_reaped(stage: Stage) -> None:
    """The least limits that LMCache takes; it looks at a fourth of them. One that never pinged, and a stopped one."""
    limits = ["--worker-reap-timeout-seconds", "30", "--worker-registration-grace-seconds", "30"]
    server, plain = stage.server(*limits), stage.server(*limits, plain=True)
    _, idle = stage.worker(server, "warm-up")
    stopped, silent = stage.worker(server, "pinging")
    stopped.process.send_signal(signal.SIGSTOP)
    _, control = stage.worker(plain, "warm-up", "--plain")
    seconds = float(os.environ.get("LMCACHE_IDLE_SECONDS", "45"))
    began = time.monotonic()
    until(lambda: control not in registered(plain), "a server without the module reaps nothing: the test has no control")
    while time.monotonic() < began + seconds:
        assert {idle, silent} <= registered(server)
        time.sleep(1)


def test_a_worker_registers_again_with_a_new_server_and_its_death_is_proven_there(stage: Stage) -> None:
    first = stage.server()
    worker, instance = stage.worker(first, "pinging")
    first.process.kill()
    first.process.wait()
    second = stage.server(port=first.port)
    until(lambda: instance in registered(second), "the worker does not register again")
    assert instance in living(second)
    worker.kill()
    until(lambda: instance not in registered(second), "its death is not proven to the new server")


# The module itself, in this process.


class Owner:
    """What LMCache's transfer module is to ours."""

    def __init__(self) -> None:
        self.entries: dict[int, Any] = {}
        self.unregistered: list[int] = []
        self.dropped: list[int] = []
        self.touched: list[int] = []
        self.handlers: dict[str, Callable[[Any], None]] = {}
        self.gate = threading.Event()
        self.gate.set()

    def context_entries_snapshot(self) -> dict[int, Any]:
        return dict(self.entries)

    def report_status(self) -> dict[str, Any]:
        return {"registered_gpu_ids": list(self.entries)}

    def unregister_kv_cache(self, instance: int) -> None:
        del self.entries[instance]
        assert self.gate.wait(WATCHDOG)
        self.unregistered.append(instance)

    def drop_instance_state(self, instance: int) -> None:
        self.dropped.append(instance)

    def touch_instance(self, instance: int) -> None:
        self.touched.append(instance)

    def register_host_func(self, kind: str, handler: Callable[[Any], None], _payload: Any) -> None:
        self.handlers[kind] = handler


class Storage:
    def __init__(self) -> None:
        self.finished: list[Any] = []

    def prepare_write_completion(self, objects: Any) -> Any:
        return [(1, list(objects))]

    def finish_write_by_owner(self, completion: Any) -> None:
        self.finished.append(completion)


class Client:
    """What LMCache's request client is to ours."""

    def __init__(self, module: Any) -> None:
        self.module, self.registered = module, []

    def server_module_call(self, request: Any) -> Any:
        answer = types.SimpleNamespace(success=True, payload=self.module.session(request.payload), error="")
        return types.SimpleNamespace(result=lambda timeout: answer)

    def register_kv_cache(self, instance_id: int, kv_caches: Any, *rest: Any) -> None:
        self.registered.append((instance_id, kv_caches, rest))

    def register_kv_cache_engine_driven_context(self, payload: Any) -> None:
        self.registered.append(payload)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What goes to LMCache's log."""
    plug.logger.addHandler(caplog.handler)
    yield caplog
    plug.logger.removeHandler(caplog.handler)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def module(owner: Owner, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> Iterator[plug.ProofOfDeath]:
    monkeypatch.setattr(BaseCacheContext, "hold_imported_event", hold_imported_event)
    context = types.SimpleNamespace(storage_manager=storage)
    build = types.SimpleNamespace(server_context=context, modules=(owner,), config={})
    module = plug.build_server_modules(build)  # type: ignore[arg-type]
    yield module
    owner.gate.set()
    module.close()


def died(instance: int) -> Any:
    return types.SimpleNamespace(kind="left", how="died", name=f"lmcache {instance}")


class Context:
    """What LMCache's caches of a worker are to ours."""

    device = "cuda:0"

    def __init__(self) -> None:
        self.kv_caches_ = [torch.zeros(256), torch.zeros(256)]
        self._held_imports: dict[int, Any] = {}
        self._held_imports_lock = threading.Lock()


def hold_imported_event(context: Any, event: Any) -> int:
    context._held_imports[len(context._held_imports)] = event
    return len(context._held_imports)


def entry() -> Any:
    return types.SimpleNamespace(cache_context=Context())


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was completed: a device and events."""
    calls: list[Any] = []
    monkeypatch.setattr(plug, "complete", lambda *args: calls.append(args))
    return calls


def test_only_a_proven_death_unregisters(module: plug.ProofOfDeath, owner: Owner) -> None:
    owner.entries = {1: entry(), 2: entry()}
    for how in ("goodbye", "connection_lost", "unknown"):
        module._note(types.SimpleNamespace(kind="left", how=how, name="lmcache 1"))  # type: ignore[arg-type]
    for name in ("lmcache 1x", "lmcache ", "python", "", "lmcache -1", None):
        module._note(types.SimpleNamespace(kind="left", how="died", name=name))  # type: ignore[arg-type]
    module._note(died(2))
    until(lambda: owner.dropped == [2], "the dead worker's state stays")
    assert owner.unregistered == [2] and set(owner.entries) == {1}


def test_a_name_that_is_connected_again_lives(module: plug.ProofOfDeath, owner: Owner) -> None:
    owner.entries = {1: entry()}
    with gpu_ipc.connect(module._session.path, name="lmcache 1"):
        module._note(died(1))
        assert set(owner.entries) == {1}
        until(lambda: 1 in owner.touched, "a worker that lives is not kept from the reaper")
    assert owner.unregistered == []


def test_a_registration_that_arrives_after_the_death_is_ended(module: plug.ProofOfDeath, owner: Owner) -> None:
    module._note(died(1))
    owner.entries = {1: entry()}
    until(lambda: owner.unregistered == [1], "a late registration stays")


def test_one_that_hangs_is_reported_with_its_memory_and_those_after_it_wait(
    module: plug.ProofOfDeath, owner: Owner, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    """What releases memory while a stream waits stops the server, by LMCache's reaper too."""
    monkeypatch.setattr(plug, "_SLOW", 0.01)
    owner.entries = {1: entry(), 2: entry(), 3: entry()}
    owner.gate.clear()
    for dead in (1, 2):
        module._note(died(dead))
        says = f"worker {dead} is dead and LMCache still waits for streams after 0.01 s: its 2048 bytes stay until they end"
        until(lambda says=says: says in told.text, "the log does not say so")  # type: ignore[misc]
    status = module.report_status()["gpu_ipc"]
    assert (status["unregistering"], status["bytes_held"], status["unregistered_after_death"]) == ([1, 2], 4096, 0)
    until(lambda: 2 in owner.touched, "LMCache may reap the second meanwhile")
    assert set(owner.entries) == {2, 3} and 3 not in owner.touched
    owner.gate.set()
    until(lambda: owner.dropped == [1, 2], "they do not end")
    until(lambda: module.report_status()["gpu_ipc"]["bytes_held"] == 0, "what was freed is reported as held")


def test_one_that_cannot_be_unregistered_keeps_no_other_from_it(
    module: plug.ProofOfDeath, owner: Owner, told: pytest.LogCaptureFixture
) -> None:
    owner.entries = {1: entry(), 2: entry()}
    fails = owner.drop_instance_state
    owner.drop_instance_state = lambda instance: fails(instance) if instance == 2 else fails(1 // 0)  # type: ignore[method-assign]
    for dead in (1, 2):
        module._note(died(dead))
    until(lambda: owner.dropped == [2], "the second stays")
    assert "the caches of worker 1, which is dead, cannot be unregistered" in told.text
    assert module.report_status()["gpu_ipc"]["unregistered_after_death"] == 1


def test_waits_for_the_dead_end_and_what_was_not_finished_is_not_stored(
    module: plug.ProofOfDeath, owner: Owner, storage: Storage, completed: list[Any]
) -> None:
    owner.entries = {1: entry(), 2: entry()}
    dead, other = owner.entries[1].cache_context, owner.entries[2].cache_context

    def store(context: Any, event: str, key: str) -> Any:
        assert BaseCacheContext.hold_imported_event(context, event) == len(context._held_imports)  # type: ignore[arg-type]
        return storage.prepare_write_completion({key: None})

    of_dead = [store(dead, "one", "a"), store(dead, "two", "b"), store(dead, "three", "c")]
    of_other = store(other, "four", "d")
    finish = owner.handlers["finish_write_by_owner"]
    finish(of_dead[0])
    # As LMCache does once the stream has passed it.
    del dead._held_imports[0]
    module._note(died(1))
    until(lambda: owner.unregistered == [1], "the dead worker's caches stay")
    # What the stream still waits for; and what the dead had not finished stays out of the cache.
    assert completed == [("cuda:0", ["two", "three"])]
    for completion in (of_dead[1], of_other, of_dead[2]):
        finish(completion)
    assert storage.finished == [of_dead[0], of_other]
    # One that was on its way when its worker died.
    finish(store(dead, "late", "e"))
    assert completed[1:] == [("cuda:0", ["late"])] and len(storage.finished) == 2


def test_waits_that_cannot_be_completed_keep_no_caches(
    module: plug.ProofOfDeath, owner: Owner, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    owner.entries = {1: entry()}
    BaseCacheContext.hold_imported_event(owner.entries[1].cache_context, object())  # type: ignore[arg-type]
    monkeypatch.setattr(plug, "complete", lambda *_: 1 / 0)
    module._note(died(1))
    until(lambda: owner.unregistered == [1], "the dead worker's caches stay")
    assert "what waits for worker 1, which is dead, waits on" in told.text


class Cuda:
    """The calls of `cuda.bindings` that write words, as their arguments; `fails` names one that does not succeed."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls, self.streams = fails, [], 0
        self.cudaStreamNonBlocking = 1

    def CUstream(self, stream: int) -> int:  # noqa: N802
        return stream

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[str, int]:  # noqa: N802
        assert flags == self.cudaStreamNonBlocking
        self.streams += 1
        return self.ended("create"), self.streams

    def cuStreamWriteValue64(self, stream: int, word: int, value: int, flags: int) -> tuple[str]:  # noqa: N802
        self.calls.append(("write", stream, word, value, flags))
        return (self.ended("write"),)

    def cudaStreamDestroy(self, stream: int) -> tuple[str]:  # noqa: N802
        self.calls.append(("destroy", stream))
        return (self.ended("destroy"),)

    def ended(self, call: str) -> str:
        return f"{call} failed" if call == self.fails else ""


def complete(monkeypatch: pytest.MonkeyPatch, cuda: Cuda, *events: Any) -> None:
    from lmcache.v1.platform.devices.cuda import utils

    def check(result: Any, what: str) -> None:
        if result[0]:
            raise RuntimeError(f"{what}: {result[0]}")

    monkeypatch.setattr(utils, "_cuda", types.SimpleNamespace(driver=cuda, runtime=cuda))
    monkeypatch.setattr(utils, "_CHECK_CUDA", check)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    _waits.complete("cuda:0", list(events))


def word(offset: int, value: int) -> Any:
    return types.SimpleNamespace(base_ptr=4096, slot_offset=offset, seq=value)


def test_a_word_gets_its_highest_value_on_a_stream_of_each_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    complete(monkeypatch, cuda, word(8, 5), word(16, 1), object(), word(8, 3), word(24, 0))
    of_one = [("write", 4104, 5, 0), ("write", 4112, 1, 0), ("destroy",)]
    assert cuda.calls == [(what, stream, *rest) for stream in range(1, _waits._QUEUES + 1) for what, *rest in of_one]


@pytest.mark.parametrize("fails", ["create", "write", "destroy"])
def test_a_call_that_fails_is_named_and_leaves_no_stream(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    cuda = Cuda(fails)
    with pytest.raises(RuntimeError, match=f": {fails} failed"):
        complete(monkeypatch, cuda, word(8, 5))
    assert [call[0] for call in cuda.calls] == ([] if fails == "create" else ["write", "destroy"])


def test_events_that_are_no_words_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda("create")
    # One of CUDA's, and a word that was never recorded.
    complete(monkeypatch, cuda, object(), word(8, 0))
    assert cuda.streams == 0


def test_what_a_worker_that_left_in_order_had_finished_is_stored(owner: Owner, storage: Storage, module: Any) -> None:
    context = Context()
    BaseCacheContext.hold_imported_event(context, object())  # type: ignore[arg-type]
    completion = storage.prepare_write_completion({"a": None})
    # LMCache drops the context before its thread hears of the copy.
    del context
    owner.handlers["finish_write_by_owner"](completion)
    assert storage.finished == [completion]


def test_a_registration_is_preceded_by_presence_and_by_deposits(module: plug.ProofOfDeath) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"memory")
    os.close(writer)
    export, closed = uuid.uuid4().bytes, []
    with_fd = types.SimpleNamespace(fd_payload=lambda: (export, reader), close=lambda: closed.append(os.close(reader)))
    without = [types.SimpleNamespace(fd_payload=lambda: None), object()]
    client = Client(module)
    plug.attach(client)
    client.register_kv_cache(5, [with_fd, *without], "model")
    assert client.registered == [(5, [with_fd, *without], ("model",))] and len(closed) == 1
    assert module.report_status()["gpu_ipc"]["workers"] == [5]
    # What LMCache calls when it maps the memory.
    with os.fdopen(ipc_wrapper._resolve_vmm_fd(export), "rb") as fetched:
        assert fetched.read() == b"memory"
    payload = types.SimpleNamespace(instance_id=6)
    client.register_kv_cache_engine_driven_context(payload)
    assert client.registered[1] is payload and module.report_status()["gpu_ipc"]["workers"] == [5, 6]


def test_a_server_without_the_module_is_named_with_the_remedy(module: plug.ProofOfDeath) -> None:
    client = Client(module)
    refusal = types.SimpleNamespace(success=False, payload=b"", error="unknown server module method")
    client.server_module_call = lambda _: types.SimpleNamespace(result=lambda timeout: refusal)  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="--server-module"):
        plug.Presence(client).ensure(1)

    def late(timeout: float) -> Any:
        raise TimeoutError

    client.server_module_call = lambda _: types.SimpleNamespace(result=late)  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="in 10.0 s: start it with --server-module"):
        plug.Presence(client).ensure(1)


def test_an_unknown_option_is_refused(owner: Owner, storage: Storage) -> None:
    build = types.SimpleNamespace(modules=(owner,), config={"pathh": "/tmp/s"})
    with pytest.raises(ValueError, match=r"\['pathh'\]; it takes \['allow_uids', 'path'\]"):
        plug.build_server_modules(build)  # type: ignore[arg-type]


CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"


def test_vllms_connector_attaches_before_its_caches_are_registered(
    module: plug.ProofOfDeath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's class needs vLLM, so one of its shape stands in for it; its names are checked below."""
    client = Client(module)

    class Theirs:
        worker_adapter = types.SimpleNamespace(req_client=client)

        def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
            client.register_kv_cache(9, [], kv_caches)

    monkeypatch.setitem(sys.modules, CONNECTOR, types.SimpleNamespace(LMCacheMPConnector=Theirs))
    monkeypatch.setattr(sys.modules["lmcache.integration.vllm"], CONNECTOR.rsplit(".")[-1], sys.modules[CONNECTOR], raising=False)
    # As vLLM loads it.
    kind = getattr(plug, "LMCacheMPConnector")  # noqa: B009
    monkeypatch.delitem(vars(plug), "LMCacheMPConnector")
    connector = kind()
    for _ in range(2):
        connector.register_kv_caches({"layer": None})
    assert client.registered == [(9, [], ({"layer": None},))] * 2
    assert module.report_status()["gpu_ipc"]["workers"] == [9]
    assert (kind.__module__, kind.__qualname__) == (plug.__name__, "LMCacheMPConnector")
    with pytest.raises(AttributeError, match="nothing"):
        getattr(plug, "nothing")  # noqa: B009


def test_lmcaches_connector_has_the_names_that_ours_uses() -> None:
    source = pathlib.Path(inspect.getfile(sys.modules["lmcache"])).parent.joinpath(*CONNECTOR.split(".")[1:])
    tree = ast.parse(source.with_suffix(".py").read_text(encoding="utf-8"))
    [connector] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LMCacheMPConnector"]
    methods = {node.name: node for node in connector.body if isinstance(node, ast.FunctionDef)}
    assert [one.arg for one in methods["register_kv_caches"].args.args] == ["self", "kv_caches"]
    assert "self.worker_adapter.register_kv_caches(" in ast.unparse(methods["register_kv_caches"])
    assert "self.worker_adapter = LMCacheMPWorkerAdapter(" in ast.unparse(methods["__init__"])
    assert "self.req_client = " in inspect.getsource(LMCacheMPWorkerAdapter.__init__)


# The names and signatures of LMCache that the module relies on.


def parameters(of: Any) -> list[str]:
    return list(inspect.signature(of).parameters)


def test_lmcaches_interfaces_are_those_that_the_module_uses() -> None:
    from lmcache.v1.distributed.storage_manager import StorageManager
    from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule
    from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
    from lmcache.v1.multiprocess.transport.base import RequestClient
    from lmcache.v1.platform.devices.cuda import utils
    from lmcache.v1.platform.devices.cuda.timeline_semaphore_event_ipc import TimelineSemaphoreEvent

    for module in (LMCacheDrivenTransferModule, EngineDrivenTransferModule):
        assert parameters(module.unregister_kv_cache) == ["self", "instance_id"]
        assert parameters(module.touch_instance) == ["self", "instance_id"]
    driven = LMCacheDrivenTransferModule
    assert parameters(driven.context_entries_snapshot) == ["self"]
    assert parameters(driven.register_host_func) == ["self", "kind", "handler", "payload_type"]
    assert '"finish_write_by_owner"' in inspect.getsource(driven.store_with_chunk_mask)
    assert "hold_imported_event" in inspect.getsource(driven.store_with_chunk_mask)
    assert '"registered_gpu_ids"' in inspect.getsource(driven.report_status)
    assert '"registered_non_cuda_instance_ids"' in inspect.getsource(EngineDrivenTransferModule.report_status)
    assert parameters(BaseCacheContext.hold_imported_event) == ["self", "event"]
    assert "self._held_imports[token] = event" in inspect.getsource(BaseCacheContext.hold_imported_event)
    assert "with self._held_imports_lock" in inspect.getsource(BaseCacheContext.release_imported_event)
    assert "self.kv_caches_ = " in inspect.getsource(BaseCacheContext.__init__)
    # Each wait of a stream is held until the stream has passed it.
    for wait in (driven.store_with_chunk_mask, driven.retrieve):
        source = inspect.getsource(wait)
        assert source.index("wait_event(") < source.index("hold_imported_event(") < source.index('"release_imported_event"')
    assert parameters(StorageManager.prepare_write_completion) == ["self", "objects"]
    assert parameters(StorageManager.finish_write_by_owner) == ["self", "completion"]
    assert {"base_ptr", "slot_offset", "seq"} <= set(parameters(TimelineSemaphoreEvent))
    assert parameters(RequestClient.register_kv_cache)[:3] == ["self", "instance_id", "kv_cache"]
    assert len(parameters(RequestClient.register_kv_cache_engine_driven_context)) == 2
    assert parameters(RequestClient.server_module_call) == ["self", "request"]
    assert parameters(ipc_wrapper.set_vmm_fd_resolver) == ["resolver"]
    assert parameters(ipc_wrapper.VmmCudaIPCWrapper.fd_payload) == ["self"]
    assert callable(utils._CHECK_CUDA) and hasattr(utils, "_cuda")
    assert torch.__version__
