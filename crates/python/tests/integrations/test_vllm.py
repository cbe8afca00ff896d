"""New weights for vLLM's workers, with genuine Python of vLLM and PyTorch's CPU tensors: no GPU."""

import contextlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import gpu_ipc

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")
import engines
from conftest import until
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from gpu_ipc.integrations import _buckets
from gpu_ipc.integrations import vllm as plug

WORKERS = 4
LAYERS = 17
SIZE = int(os.environ.get("GPU_IPC_TEST_SIZE", "128"))
ROUNDS = int(os.environ.get("GPU_IPC_TEST_ROUNDS", "40"))
TENSOR = SIZE * SIZE * 4

plug.register()


@pytest.fixture
def weights() -> dict[str, Any]:
    return engines.checkpoint(LAYERS, SIZE)


@pytest.fixture
def engine() -> Iterator[engines.Engine]:
    engine = engines.Engine(2, LAYERS, SIZE)
    yield engine
    engine.end()


def trainer_of(engine: Any, weights: dict[str, Any], **settings: Any) -> Any:
    """Make the trainer's half by vLLM's own factory, as each version wants it."""
    info = plug.TrainerInitInfo(rank=0, device="cpu", **settings)
    named: dict[str, Any] = {"client": engine, "source": engines.Source(weights)}
    if plug._HAS_CONFIG:
        return WeightTransferTrainerFactory.trainer_init("gpu_ipc", None, info, **named)
    return WeightTransferTrainerFactory.trainer_init(info, **named)


def send(trainer: Any, engine: engines.Engine, weights: dict[str, Any], step: int) -> None:
    engines.fill(weights, step)
    trainer.send_weights()
    assert all(values == engines.expected(weights) for values in engine.all("values")), step


def lent(trainer: Any) -> tuple[int, int]:
    """Return the leases on the trainer's buckets, and the bytes of its memory."""
    trainer.sender.session.collect()
    stats = trainer.sender.session.stats()
    return stats.held + stats.in_flight + stats.tickets, stats.source.in_use


def test_registering_again_changes_nothing() -> None:
    plug.register()
    assert WeightTransferEngineFactory._registry["gpu_ipc"]() is plug.WorkerEngine
    assert WeightTransferTrainerFactory._registry["gpu_ipc"]() is plug.TrainerEngine


@pytest.mark.parametrize("tensors", [100, 3, 1])
def test_every_worker_has_the_new_weights_at_the_same_addresses(
    engine: engines.Engine, weights: dict[str, Any], tensors: int
) -> None:
    trainer = trainer_of(engine, weights, bucket_bytes=tensors * TENSOR)
    for step in range(1, 4):
        send(trainer, engine, weights, step)
    assert engine.all("are_addresses_kept") == [True, True]
    assert lent(trainer)[0] == 0
    trainer.shutdown()


def test_one_message_goes_to_each_worker_where_the_model_fits_a_bucket(
    engine: engines.Engine, weights: dict[str, Any]
) -> None:
    trainer = trainer_of(engine, weights)
    sent: list[str] = []
    former = engine.all

    def all(call: str, *given: Any) -> list[Any]:
        sent.append(call)
        return former(call, *given)

    engine.all = all  # type: ignore[method-assign]
    trainer.send_weights()
    assert sent == ["start_weight_update", "update_weights", "finish_weight_update"]
    # The bucket is as large as the model.
    assert lent(trainer) == (0, trainer.sender._buckets[0].block.nbytes)
    assert trainer.sender._buckets[0].block.nbytes == TENSOR * len(weights)


def test_one_worker_is_killed_in_every_tenth_update(weights: dict[str, Any]) -> None:
    engine = engines.Engine(WORKERS, LAYERS, SIZE)
    trainer = trainer_of(engine, weights, bucket_bytes=5 * TENSOR)
    send(trainer, engine, weights, 0)
    sizes = [lent(trainer)[1]]
    ways = ["start_weight_update", "update_weights", "claimed", "loaded", "finish_weight_update"]
    killed = 0
    for step in range(1, ROUNDS + 1):
        if step % 10 == 0:
            rank, way = killed % WORKERS, ways[killed % len(ways)]
            lives = [worker.process.pid for worker in engine.workers]
            victim = engine.workers[rank]
            victim.ask("end_at", way)
            engines.fill(weights, step)
            with pytest.raises(gpu_ipc.ParticipantGone, match=f"'vllm worker {rank}, process {victim.process.pid}' died"):
                trainer.send_weights()
            killed += 1
            engine.replace(rank)
            trainer.connect_workers()
            assert [worker.process.pid for worker in engine.workers if worker.rank != rank] == [
                pid for pid in lives if pid != victim.process.pid
            ]
        send(trainer, engine, weights, step)
        sizes.append(lent(trainer)[1])
    assert killed == ROUNDS // 10
    assert engine.all("are_addresses_kept") == [True] * WORKERS
    until(lambda: lent(trainer)[0] == 0, "leases are left")
    # A lease of a killed worker may take one more bucket until its death is proven: never more than there are.
    assert max(sizes) <= 4 * sizes[0] and sizes[-1] <= max(sizes[: max(len(sizes) // 2, 1)])
    assert trainer.sender.session.stats().deaths == killed
    print(f"{ROUNDS} updates, {killed} workers killed: {sizes[0]} bytes at first, {max(sizes)} at most, {sizes[-1]} at last")
    engine.end()
    trainer.shutdown()


def test_what_a_layer_keeps_is_copied_before_the_next_message(engine: engines.Engine, weights: dict[str, Any]) -> None:
    trainer = trainer_of(engine, weights, bucket_bytes=2 * TENSOR, buckets=1, patience=5.0)
    send(trainer, engine, weights, 1)
    engine.workers[1].ask("keeps")
    # The third that came first is kept, and so is its bucket, since there is one only.
    holder = f"'vllm worker 1, process {engine.workers[1].process.pid}'"
    with pytest.raises(gpu_ipc.Timeout, match=f"no bucket of 1 came back within 5.0 s: {holder}"):
        trainer.send_weights()
    assert lent(trainer)[0] == 1


def test_an_update_that_one_worker_refuses_is_whole_the_next_time(
    engine: engines.Engine, weights: dict[str, Any]
) -> None:
    trainer = trainer_of(engine, weights, bucket_bytes=3 * TENSOR, buckets=1)
    send(trainer, engine, weights, 1)
    engine.workers[1].ask("end_at", "refuses")
    engines.fill(weights, 2)
    with pytest.raises(engines.WorkerFailed, match="worker 1: ValueError: the test's model refuses"):
        trainer.send_weights()
    send(trainer, engine, weights, 3)
    assert lent(trainer)[0] == 0


def test_an_update_of_a_sleeping_engine_is_refused_by_name(engine: engines.Engine, weights: dict[str, Any]) -> None:
    trainer = trainer_of(engine, weights)
    send(trainer, engine, weights, 1)
    before = engine.workers[1].ask("values")
    engine.workers[1].ask("sleeps", True)
    engines.fill(weights, 2)
    with pytest.raises(engines.WorkerFailed, match=r'worker 1: Asleep: .* sleep: call `wake_up\(tags=\["weights"\]\)`'):
        trainer.send_weights()
    assert engine.workers[1].ask("values") == before
    engine.workers[1].ask("sleeps", False)
    send(trainer, engine, weights, 3)
    # Between the start and the message, too.
    engine.start_weight_update()
    engine.workers[0].ask("sleeps", True)
    with pytest.raises(engines.WorkerFailed, match="worker 0: Asleep"):
        trainer.send(iter(weights.items()))
    engine.workers[0].ask("sleeps", False)
    send(trainer, engine, weights, 4)


def test_a_worker_says_what_it_lacks_of_its_trainer(engine: engines.Engine, weights: dict[str, Any]) -> None:
    sender = _buckets.Sender(torch.device("cpu"), bucket_bytes=len(weights) * TENSOR)
    message = next(sender.messages(weights.items()))
    engine.start_weight_update()
    worker = engine.workers[0]
    with pytest.raises(engines.WorkerFailed, match="Invalid: .* `connect_workers` after a worker starts"):
        worker.ask("update_weights", message)
    with pytest.raises(engines.WorkerFailed, match="ValueError: Invalid init_info for WorkerEngine"):
        worker.ask("init_weight_transfer_engine", {"path": sender.session.path})
    trainer = trainer_of(engine, weights, bucket_bytes=len(weights) * TENSOR)
    path = trainer.sender.session.path
    worker.ask("start_weight_update")
    for change, error in (
        ({"shapes": message["shapes"][1:]}, "Invalid: the message has 20 names, 20 element types and 19 shapes"),
        ({"dtype_names": ["quarter"] * 20}, "Mismatch: the element type is 'quarter'"),
        ({"shapes": [[SIZE, SIZE * 100]] * 20}, "Mismatch: a tensor .* does not fit into its bucket"),
        ({"shapes": [[-1, -SIZE]] * 20}, "Mismatch: a tensor .* does not fit into its bucket"),
        ({"bucket": "AAAA"}, "BadDescriptor"),
        ({"bucket": "?"}, "BadDescriptor"),
    ):
        with contextlib.closing(trainer.sender.messages(weights.items())) as messages:
            good = next(messages)
            with pytest.raises(engines.WorkerFailed, match=error):
                worker.ask("update_weights", good | change)
            worker.ask("start_weight_update")
        assert lent(trainer)[0] == 0
    # The descriptor of an update that was given up.
    with pytest.raises(engines.WorkerFailed, match="Revoked"):
        worker.ask("update_weights", good)
    send(trainer, engine, weights, 5)
    trainer.shutdown()
    with pytest.raises(engines.WorkerFailed, match=r"ProducerGone|Revoked"):
        worker.ask("update_weights", good)
    with pytest.raises(engines.WorkerFailed, match="ConnectFailed"):
        engine.workers[1].ask("shutdown")
        engine.workers[1].ask("init_weight_transfer_engine", {"session": path, "device": "host"})
    # Another trainer takes over.
    send(trainer_of(engine, weights), engine, weights, 6)


def test_tensors_of_every_kind_arrive_as_they_were() -> None:
    sender = _buckets.Sender(torch.device("cpu"), bucket_bytes=4096)
    sent = {
        "strided": torch.arange(64.0).reshape(8, 8).T,
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "bfloat16": torch.full((5, 3), 1.5, dtype=torch.bfloat16),
        "float8": torch.full((7,), 2.0).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.tensor([1 + 2j]),
        "large": torch.arange(5000, dtype=torch.int16),
        "gradient": torch.ones(3, requires_grad=True),
    }
    reader = _buckets.Reader(sender.session.path, sender.session.device.uuid, torch.device("cpu"), "the test")
    found = {}
    more = []
    for message in sender.messages(sent.items()):
        typed = _buckets.Message(**json.loads(json.dumps(message)))
        found |= {name: tensor.clone() for name, tensor in _buckets.unpacked(reader.bucket(typed), typed)}
        more.append(typed.more)
    assert list(found) == list(sent) and more == [True, True, False]
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name].float(), tensor.detach().float()), name


def test_the_other_ranks_of_a_trainer_take_part_in_collectives_alone(weights: dict[str, Any]) -> None:
    seen = []

    class Gathers(engines.Source):
        def iter_full(self) -> Any:
            for name, tensor in super().iter_full():
                seen.append(name)
                yield name, tensor

        __iter__ = iter_full

    trainer = plug.TrainerEngine(plug.TrainerInitInfo(rank=1), client=None, source=Gathers(weights))
    trainer.connect_workers()
    trainer.send_weights()
    assert seen == list(weights) and trainer.sender is None
    trainer.shutdown()


def test_the_loop_of_vllm_before_its_trainer_classes_sends_too(engine: engines.Engine, weights: dict[str, Any]) -> None:
    trainer = trainer_of(engine, weights)
    engines.fill(weights, 9)
    engine.start_weight_update()
    plug.WorkerEngine.trainer_send_weights(iter(weights.items()), {"trainer": trainer})
    engine.finish_weight_update()
    assert engine.all("values") == [engines.expected(weights)] * 2


def test_messages_go_by_the_http_client_of_vllm(engine: engines.Engine, weights: dict[str, Any]) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            try:
                getattr(engine, self.path.strip("/"))(*body.values())
                self.send_response(200)
            except engines.WorkerFailed as error:
                self.send_response(500, str(error))
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        client = HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{server.server_port}")
        trainer = trainer_of(client, weights, bucket_bytes=4 * TENSOR)
        send(trainer, engine, weights, 1)
        victim = engine.workers[1]
        victim.ask("end_at", "claimed")
        with pytest.raises(gpu_ipc.ParticipantGone, match="vllm worker 1"):
            trainer.send_weights()
        server.shutdown()
        thread.join()
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ
