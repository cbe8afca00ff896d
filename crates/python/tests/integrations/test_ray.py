"""The tensor transport for Ray, with genuine Ray and NumPy's arrays: no GPU and no PyTorch."""

import asyncio
import inspect
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
}

import numpy
import pytest

import gpu_ipc

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'gpu-ipc[ray]'")
from gpu_ipc.integrations import ray as plug

WATCHDOG = 120.0
MIB = 1 << 20

# Actors are sent by value: their processes cannot import this file.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
plug.register(numpy.ndarray)


def transport() -> Any:
    from ray.experimental.rdt.util import get_tensor_transport_manager

    return get_tensor_transport_manager("GPU_IPC")


def usage() -> dict[str, int]:
    """Count what this process lends, the leases on it, and the bytes that both keep."""
    seen = [session.stats() for session in transport()._sessions.values()]
    return {
        "lent": len(transport()._lent),
        "held": sum(stats.held for stats in seen),
        "bytes": sum(stats.source.in_use for stats in seen),
    }


NOTHING = {"lent": 0, "held": 0, "bytes": 0}


class SourceMethods:
    def pid(self) -> int:
        return os.getpid()

    def usage(self) -> dict[str, int]:
        return usage()

    @ray.method(tensor_transport="GPU_IPC")
    def make(self, size: int, value: int) -> Any:
        return numpy.full(size, value, dtype=numpy.uint8)

    @ray.method(tensor_transport="GPU_IPC")
    def nested(self) -> Any:
        return {
            "list": [numpy.arange(6, dtype=numpy.float32).reshape(2, 3).T, numpy.empty(0)],
            "text": "kept",
            "scalar": numpy.array(7, dtype=numpy.int64),
            "time": numpy.array(["2026-11-24"], dtype="datetime64[s]"),
        }

    @ray.method(tensor_transport="GPU_IPC")
    def of_objects(self) -> Any:
        return [numpy.zeros(MIB, dtype=numpy.uint8), numpy.array([object()])]

    @ray.method(tensor_transport="GPU_IPC")
    def echo(self, array: Any) -> Any:
        return array

    def plain(self, array: Any) -> Any:
        return array

    def put(self, value: int) -> Any:
        return [ray.put(numpy.full(MIB, value, dtype=numpy.uint8), _tensor_transport="GPU_IPC")]


class ReceiverMethods:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def check(self, array: Any, size: int, value: int) -> bool:
        return array.shape == (size,) and bool((array == value).all()) and not array.flags.writeable

    def keep(self, array: Any) -> None:
        self.kept.append(array)

    def first_kept(self) -> Any:
        return self.kept[0].copy()

    def drop(self) -> None:
        self.kept.clear()

    def stall(self, began: str) -> None:
        """Make every later transfer to this process last for ever."""

        def claim(*_: Any) -> Any:
            pathlib.Path(began).touch()
            threading.Event().wait()

        plug.Transport._claim = claim  # type: ignore[method-assign]

    def set_time_limit(self, seconds: float) -> None:
        """Set what this process takes for Ray's time limit of a transfer."""
        ray._private.ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS = seconds


@ray.remote(num_cpus=0)
class Source(SourceMethods):
    pass


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Receiver(ReceiverMethods):
    pass


@ray.remote(num_cpus=0)
class AsyncSource:
    @ray.method(tensor_transport="GPU_IPC")
    async def make(self, size: int, value: int) -> Any:
        await asyncio.sleep(0)
        return numpy.full(size, value, dtype=numpy.uint8)

    async def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class AsyncReceiver:
    async def check(self, array: Any, value: int) -> bool:
        return bool((array == value).all())

    async def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0, max_restarts=1, max_task_retries=0)
class RestartedSource(SourceMethods):
    def __init__(self) -> None:
        plug.register(numpy.ndarray)


@ray.remote(num_cpus=0, max_restarts=1, max_task_retries=0, enable_tensor_transport=True)
class RestartedReceiver(ReceiverMethods):
    pass


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # Ray's monitor imports its collectives, and with them PyTorch, at the first transfer that fails.
    stub = types.ModuleType("ray.experimental.collective")
    stub.destroy_collective_group = lambda *_: None  # type: ignore[attr-defined]
    sys.modules["ray.experimental.collective"] = stub
    # Sockets' paths are short.
    folder = f"/tmp/gpu-ipc-ray-{os.getpid()}"
    memory = 100 * MIB
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=memory, _temp_dir=folder)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def start(kind: Any, count: int = 1) -> list[tuple[Any, int]]:
    """Start actors and wait for them, since Ray's time limit of a transfer includes the start of its actors."""
    started = [kind.remote() for _ in range(count)]
    return list(zip(started, ray.get([actor.pid.remote() for actor in started]), strict=True))


@pytest.fixture
def actors() -> Iterator[Callable[[Any], Any]]:
    """Actors of a test's own, which it may kill."""
    started: list[Any] = []

    def one(kind: Any) -> Any:
        started.append(start(kind)[0][0])
        return started[-1]

    yield one
    for actor in started:
        ray.kill(actor)


@pytest.fixture(scope="module")
def shared(cluster: None) -> tuple[Any, list[Any]]:
    """A source and three receivers, which live through all tests."""
    return start(Source)[0][0], [actor for actor, _ in start(Receiver, 3)]


@pytest.fixture
def source(shared: tuple[Any, list[Any]]) -> Iterator[Any]:
    yield shared[0]
    comes_back(shared[0])


@pytest.fixture
def receivers(shared: tuple[Any, list[Any]]) -> Iterator[list[Any]]:
    yield shared[1]
    ray.get([receiver.drop.remote() for receiver in shared[1]])


@pytest.fixture
def receiver(receivers: list[Any]) -> Any:
    return receivers[0]


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WATCHDOG
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def comes_back(source: Any) -> None:
    until(lambda: ray.get(source.usage.remote()) == NOTHING, f"the source keeps {ray.get(source.usage.remote())}")


def test_every_element_of_200_objects_arrives_and_their_memory_comes_back(source: Any, receiver: Any) -> None:
    for value in range(200):
        reference = source.make.remote(MIB, value)
        assert ray.get(receiver.check.remote(reference, MIB, value))
    del reference
    comes_back(source)


def test_three_receivers_and_the_driver_share_one_block(source: Any, receivers: list[Any]) -> None:
    reference = source.make.remote(MIB, 5)
    ray.get([receiver.keep.remote(reference) for receiver in receivers])
    mine = ray.get(reference)
    assert (mine == 5).all()
    assert ray.get(source.usage.remote()) == {"lent": 1, "held": 4, "bytes": MIB}


def test_receivers_keep_what_they_hold_when_references_are_gone(source: Any, receivers: list[Any]) -> None:
    reference = source.make.remote(MIB, 6)
    ray.get([receiver.keep.remote(reference) for receiver in receivers])
    del reference
    held = {"lent": 0, "held": 3, "bytes": MIB}
    until(lambda: ray.get(source.usage.remote()) == held, "the loan does not end")
    for receiver in receivers:
        assert (ray.get(receiver.first_kept.remote()) == 6).all()
    ray.get([receiver.drop.remote() for receiver in receivers])
    comes_back(source)


def test_a_nested_value_arrives_whole(source: Any) -> None:
    value = ray.get(source.nested.remote())
    assert value["text"] == "kept" and value["scalar"] == 7 and value["scalar"].shape == ()
    assert value["time"] == numpy.datetime64("2026-11-24T00:00:00")
    transposed, empty = value["list"]
    assert (transposed == numpy.arange(6, dtype=numpy.float32).reshape(2, 3).T).all()
    assert empty.shape == (0,) and empty.dtype == numpy.float64


def test_an_actor_passes_on_what_it_received_and_plain_methods_stay_as_they_are(
    actors: Any, source: Any, receiver: Any
) -> None:
    second = actors(Source)
    passed = second.echo.remote(source.make.remote(300, 4))
    assert ray.get(receiver.check.remote(passed, 300, 4))
    assert (ray.get(source.plain.remote(numpy.full(300, 4))) == 4).all()
    del passed
    comes_back(second)


def test_the_driver_puts_an_array(receiver: Any) -> None:
    reference = ray.put(numpy.full(MIB, 8, dtype=numpy.uint8), _tensor_transport="GPU_IPC")
    assert ray.get(receiver.check.remote(reference, MIB, 8)) and (ray.get(reference) == 8).all()
    del reference
    until(lambda: usage() == NOTHING, "the driver's block does not come back")


def test_an_actor_puts_an_array(actors: Any, receiver: Any) -> None:
    source = actors(Source)
    [reference] = ray.get(source.put.remote(9))
    ray.wait([reference])
    assert ray.get(receiver.check.remote(reference, MIB, 9))


def test_asyncio_actors_make_and_take(actors: Any) -> None:
    source, receiver = actors(AsyncSource), actors(AsyncReceiver)
    checks = [receiver.check.remote(source.make.remote(MIB, value), value) for value in range(8)]
    assert all(ray.get(checks))


def test_one_process_takes_an_object_twice_and_again_after_dropping_it(source: Any, receiver: Any) -> None:
    reference = source.make.remote(MIB, 3)
    first, second = ray.get(reference), ray.get(reference)
    assert (first == 3).all() and (second == 3).all()
    del first, second
    assert (ray.get(reference) == 3).all()
    for _ in range(2):
        assert ray.get(receiver.check.remote(reference, MIB, 3))


def test_an_object_that_cannot_be_lent_fails_its_task_alone(source: Any, receiver: Any) -> None:
    with pytest.raises(ray.exceptions.RayTaskError):
        ray.get(source.of_objects.remote())
    # The array before it is lent no more.
    comes_back(source)
    assert ray.get(receiver.check.remote(source.make.remote(MIB, 1), MIB, 1))


def test_a_killed_receivers_lease_comes_back_and_the_source_lives(actors: Any, source: Any, receiver: Any) -> None:
    killed = actors(Receiver)
    reference = source.make.remote(16 * MIB, 1)
    ray.get(killed.keep.remote(reference))
    assert ray.get(source.usage.remote())["held"] == 1
    os.kill(ray.get(killed.pid.remote()), signal.SIGKILL)
    until(lambda: ray.get(source.usage.remote())["held"] == 0, "the dead receiver's lease does not end")
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(killed.pid.remote())
    assert ray.get(receiver.check.remote(reference, 16 * MIB, 1))
    # The frame outlives the test, by the traceback of what was raised.
    del reference


def test_a_receiver_that_is_killed_in_a_transfer_dies_alone(
    actors: Any, source: Any, receiver: Any, tmp_path: pathlib.Path
) -> None:
    killed = actors(Receiver)
    began = tmp_path / "began"
    ray.get(killed.stall.remote(str(began)))
    pid = ray.get(killed.pid.remote())
    reference = source.make.remote(MIB, 2)
    check = killed.check.remote(reference, MIB, 2)
    until(began.exists, "the transfer does not begin")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(check)
    assert ray.get(receiver.check.remote(reference, MIB, 2))
    del reference, check


def test_1000_objects_with_a_receiver_killed_in_every_tenth(source: Any) -> None:
    receivers: list[tuple[Any, int]] = []
    for round in range(100):
        receivers = receivers or start(Receiver, 5)
        receiver, _ = receivers.pop()
        for index in range(9):
            reference = source.make.remote(4096, index)
            assert ray.get(receiver.check.remote(reference, 4096, index))
        reference = source.make.remote(4096, round)
        kept = receiver.keep.remote(reference)
        if round % 2:
            ray.get(kept)
        # Holding the object, or before, while or after it claims.
        ray.kill(receiver)
        # What the dead receiver was given stays whole.
        assert (ray.get(reference) == round).all()
    del reference, kept
    comes_back(source)


def test_a_killed_source_leaves_receivers_alive_and_what_they_hold_readable(
    actors: Any, source: Any, receivers: list[Any]
) -> None:
    killed, (holder, late, _) = actors(Source), receivers
    reference = killed.make.remote(MIB, 4)
    ray.get(holder.keep.remote(reference))
    os.kill(ray.get(killed.pid.remote()), signal.SIGKILL)
    assert (ray.get(holder.first_kept.remote()) == 4).all()
    with pytest.raises((ray.exceptions.ObjectLostError, ray.exceptions.RayTaskError)) as lost:
        ray.get(late.check.remote(reference, MIB, 4))
    assert isinstance(getattr(lost.value, "cause", lost.value), ray.exceptions.ObjectLostError)
    assert "GPU_IPC: no object from process" in str(lost.value)
    for receiver in (holder, late):
        assert ray.get(receiver.check.remote(source.make.remote(MIB, 2), MIB, 2))


@pytest.mark.parametrize("ends_by", ["its own time limit", "Ray's abort"])
def test_a_claim_that_hangs_ends_and_both_actors_live(
    actors: Any, source: Any, ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, receiver = actors(Source), actors(Receiver)
    assert ray.get(receiver.check.remote(stopped.make.remote(MIB, 3), MIB, 3))
    reference = stopped.make.remote(MIB, 4)
    ray.wait([reference])
    pid = ray.get(stopped.pid.remote())
    constants = ray._private.ray_constants
    if ends_by == "Ray's abort":
        # The driver's limit is Ray's own, and the receiver's the claim's.
        ray.get(receiver.set_time_limit.remote(10 * WATCHDOG))
        monkeypatch.setattr(constants, "RDT_FETCH_FAIL_TIMEOUT_SECONDS", 2.0)
    else:
        ray.get(receiver.set_time_limit.remote(4.0))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ray.exceptions.RayTaskError) as late:
            ray.get(receiver.check.remote(reference, MIB, 4))
        assert isinstance(late.value.cause, ray.exceptions.ObjectLostError)
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    ray.get(receiver.set_time_limit.remote(constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS))
    assert ray.get(stopped.pid.remote()) == pid
    assert ray.get(receiver.check.remote(source.make.remote(MIB, 5), MIB, 5))
    assert ray.get(receiver.check.remote(stopped.make.remote(MIB, 6), MIB, 6))
    del reference, late
    comes_back(stopped)


def test_restarted_actors_make_and_take_again(actors: Any) -> None:
    source, receiver = actors(RestartedSource), actors(RestartedReceiver)
    assert ray.get(receiver.check.remote(source.make.remote(MIB, 1), MIB, 1))
    for actor in (source, receiver):
        before = ray.get(actor.pid.remote())
        ray.kill(actor, no_restart=False)

        def restarted(actor: Any = actor, before: int = before) -> bool:
            try:
                return bool(ray.get(actor.pid.remote()) != before)
            except ray.exceptions.RayActorError:
                return False

        until(restarted, "the actor does not restart")
        assert ray.get(receiver.check.remote(source.make.remote(MIB, 2), MIB, 2))


# The transport itself, in this process.


def test_what_another_node_asks_for_is_refused_with_the_transport_that_can() -> None:
    metadata = plug.Metadata(tensor_meta=[], node="another", descriptors=b"some", session="/nowhere")
    with pytest.raises(ValueError, match="NIXL"):
        plug.Transport().recv_multiple_tensors("1", metadata, None)


def test_a_gpu_that_is_hidden_from_the_receiver_is_named_with_the_variable_that_shows_it() -> None:
    one = plug.Transport()
    metadata = one.extract_tensor_transport_metadata("1", [numpy.ones(4)])
    metadata.gpu = "00000000-0000-0000-0000-000000000007"
    with pytest.raises(ValueError, match="000000000007 is hidden here; set RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        plug.Transport().recv_multiple_tensors("1", metadata, None)


def test_a_source_waits_for_room_and_then_names_who_holds_it() -> None:
    small = type("Small", (plug.Transport,), {"limit": 2 * MIB, "room": 0.05})()
    array = numpy.zeros(2 * MIB, dtype=numpy.uint8)
    metadata = small.extract_tensor_transport_metadata("1", [array])
    with pytest.raises(gpu_ipc.OutOfMemory) as referenced:
        small.extract_tensor_transport_metadata("2", [array])
    assert referenced.value.__notes__ == ["Waited 0.05 s; Ray references 1 objects of this process."]
    held = plug.Transport().recv_multiple_tensors("1", metadata, None)
    small.garbage_collect("1", None, [])
    with pytest.raises(gpu_ipc.OutOfMemory, match=rf"process {os.getpid()} \(ray driver\) holds 2 MiB"):
        small.extract_tensor_transport_metadata("2", [array])
    # Room that comes while the source waits is taken.
    small.room = WATCHDOG
    threading.Timer(0.05, held.clear).start()
    small.extract_tensor_transport_metadata("2", [array])
    small.garbage_collect("2", None, [])


def test_buffers_of_the_receiver_are_filled() -> None:
    one, other = plug.Transport(), plug.Transport()
    metadata = one.extract_tensor_transport_metadata("1", [numpy.arange(10), numpy.ones((2, 3))])
    buffers = [numpy.zeros(10, dtype=int), numpy.zeros((2, 3))]
    assert other.recv_multiple_tensors("1", metadata, None, buffers) is buffers
    assert (buffers[0] == numpy.arange(10)).all() and (buffers[1] == 1).all()
    # Nothing is held on.
    [session] = one._sessions.values()
    until(lambda: session.stats().held == 0, "the lease does not end with the call")


def test_an_object_that_is_extracted_twice_is_lent_once() -> None:
    one = plug.Transport()
    arrays = [numpy.arange(10)]
    assert one.extract_tensor_transport_metadata("1", arrays) is one.extract_tensor_transport_metadata("1", arrays)
    one.garbage_collect("1", None, arrays)
    one.garbage_collect("1", None, arrays)


def test_an_object_without_tensors_needs_no_session() -> None:
    one = plug.Transport()
    metadata = one.extract_tensor_transport_metadata("1", [])
    assert plug.Transport().recv_multiple_tensors("1", metadata, None) == [] and not one._sessions
    one.garbage_collect("1", None, [])


def test_participants_of_sources_that_are_gone_are_forgotten() -> None:
    receiver = plug.Transport()
    for value in range(3):
        source = plug.Transport()
        metadata = source.extract_tensor_transport_metadata("1", [numpy.full(8, value)])
        [array] = receiver.recv_multiple_tensors("1", metadata, None)
        assert (array == value).all()
        # Those of the rounds before are gone.
        assert len(receiver._participants) == 1
        [session] = source._sessions.values()
        participant = receiver._participants[session.path]
        del array
        session.close()
        del session, source
        until(lambda kept=participant: kept.is_producer_gone, "the session's end is not seen")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("is_asyncio", "has_task", "stream"), [(False, True, "current"), (True, True, None), (False, False, None)]
)
def test_a_tasks_own_thread_has_its_stream_and_any_other_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, is_asyncio: bool, has_task: bool, stream: str | None
) -> None:
    synchronized: list[str] = []
    cuda = types.SimpleNamespace(synchronize=synchronized.append, current_stream=lambda _: "current")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    task = types.SimpleNamespace(is_nil=lambda: not has_task)
    core = types.SimpleNamespace(current_actor_is_asyncio=lambda: is_asyncio, get_current_task_id=lambda: task)
    worker = types.SimpleNamespace(global_worker=types.SimpleNamespace(core_worker=core))
    monkeypatch.setattr(plug.ray._private, "worker", worker)
    assert plug._stream(types.SimpleNamespace(device="cuda:0")) == stream
    assert synchronized == ([] if stream else ["cuda:0"])


def test_ray_says_of_which_actor_and_task_a_thread_is() -> None:
    core = ray._private.worker.global_worker.core_worker
    assert not core.current_actor_is_asyncio() and not core.get_current_task_id().is_nil()


# The names and signatures of Ray that the plug relies on.

SIGNATURES = {
    "extract_tensor_transport_metadata": ["self", "obj_id", "rdt_object"],
    "get_communicator_metadata": ["self", "src_actor", "dst_actor", "backend"],
    "recv_multiple_tensors": ["self", "obj_id", "tensor_transport_metadata", "communicator_metadata", "target_buffers"],
    "send_multiple_tensors": ["self", "tensors", "tensor_transport_metadata", "communicator_metadata"],
    "garbage_collect": ["self", "obj_id", "tensor_transport_meta", "tensors"],
    "abort_transport": ["self", "obj_id", "communicator_metadata"],
    "actor_has_tensor_transport": ["self", "actor"],
}


@pytest.mark.parametrize("method", SIGNATURES)
def test_rays_interface_is_the_one_that_the_plug_implements(method: str) -> None:
    from ray.experimental import TensorTransportManager

    for owner in (TensorTransportManager, plug.Transport):
        assert list(inspect.signature(getattr(owner, method)).parameters) == SIGNATURES[method]


def test_rays_abstract_methods_are_all_implemented() -> None:
    assert not plug.Transport.__abstractmethods__
    names = list(inspect.signature(ray.experimental.register_tensor_transport).parameters)
    assert names == ["transport_name", "devices", "transport_manager_class", "data_type"]
    fields = list(inspect.signature(ray.experimental.TensorTransportMetadata).parameters)
    assert fields == ["tensor_meta", "tensor_device"]
    assert ray._private.ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS == 60.0
