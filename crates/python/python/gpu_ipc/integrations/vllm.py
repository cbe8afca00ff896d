"""New weights for vLLM's engines by lease, `docs/integrations/VLLM.md`: ``--weight-transfer-config '{"backend": "gpu_ipc"}'``.

A trainer packs its tensors into buckets of its session and sends one JSON message a bucket: no pickle, and nothing to allow. Each
worker claims the bucket and loads from it. The bucket is packed again once every lease on it has ended, by its worker's work or by
the proof of its worker's death.
"""

import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

import gpu_ipc
from gpu_ipc.integrations import _buckets
from gpu_ipc.integrations._buckets import Device, Tensor

NAME = "gpu_ipc"
# vLLM before 0.27 gives its trainer classes a configuration first, and iterates a source itself.
_HAS_CONFIG = "config" in inspect.signature(base.TrainerWeightTransferEngine.__init__).parameters


@dataclasses.dataclass
class InitInfo(base.WeightTransferInitInfo):  # type: ignore[misc]
    """Where a worker finds its trainer: the path of the session, and the device that its buckets lie on."""

    session: str
    device: str


@dataclasses.dataclass
class TrainerInitInfo(base.TrainerInitInfo):  # type: ignore[misc]
    """How a trainer sends.

    Args:
        rank: this process's rank among the trainers; 0 sends, and the others take part in the source's collectives.
        device: where the buckets lie; the current GPU unless said.
        bucket_bytes: the size of a bucket, and so of a message; a model that is smaller goes in one.
        buckets: how many there are at most.
        patience: seconds to wait for a bucket that workers hold.
    """

    backend: ClassVar[str] = NAME
    device: str | None = None
    bucket_bytes: int = _buckets.GIB
    buckets: int = 4
    patience: float = 60.0


@dataclasses.dataclass
class UpdateInfo(_buckets.Message, base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """What a bucket holds, in JSON."""


class WorkerEngine(base.WeightTransferEngine):  # type: ignore[misc]
    """The half of a transfer in each worker of an engine; vLLM makes it."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._reader: _buckets.Reader | None = None
        self._updating: tuple[Any, Any] | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Connect to the trainer's session; a second time to the same one changes nothing."""
        if self._reader is not None:
            if self._reader.participant.session == init_info.session and not self._reader.participant.is_producer_gone:
                return
            self._reader.close()
        rank = getattr(self.parallel_config, "rank", 0)
        name = f"vllm worker {rank}, process {os.getpid()}"
        self._reader = _buckets.Reader(init_info.session, init_info.device, self.device, name)

    def start_weight_update(self) -> None:
        """Prepare the model's layers. What an update that ended half-way left is given back first.

        Raises:
            Asleep: the weights of the engine are asleep.
            Unsupported: they are an object's, mapped by `--load-format gpu_ipc`.
        """
        from vllm.model_executor.model_loader import reload

        _refuse_asleep()
        if hasattr(self.model, "gpu_ipc_object"):
            raise gpu_ipc.Unsupported(
                f"this engine maps its weights from the object {self.model.gpu_ipc_object.name!r}, which never changes: put a new"
                " epoch and call `advance`, or start it with another load format"
            )
        self._abandon()
        reload.initialize_layerwise_reload(self.model)
        self._updating = self.model, self.model_config

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load what a bucket holds, and return when the device has done so."""
        self.receive_weights(self.parse_update_info(dict(update_info)))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load what a bucket holds.

        Raises:
            ProducerGone: the trainer is dead.
            Revoked: the trainer gave the update up.
            Asleep: the weights of the engine are asleep.
        """
        _refuse_asleep()
        if self._reader is None:
            raise gpu_ipc.Invalid(
                "a weight update came before the trainer's address: let the trainer call `connect_workers` after a worker starts"
            )
        bucket = self._reader.bucket(update_info)
        try:
            with _incomplete():
                self.model.load_weights(_buckets.unpacked(bucket, update_info))
            if update_info.more:
                self._own(bucket)
        except BaseException:
            # The layers keep tensors, and those the lease.
            self._abandon()
            raise

    def finish_weight_update(self) -> None:
        """Process what no complete layer had."""
        from vllm.model_executor.model_loader import reload

        reload.finalize_layerwise_reload(self.model, self.model_config)
        self._updating = None

    def shutdown(self) -> None:
        """End the connection. The trainer is told."""
        self._abandon()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: dict[str, Any]) -> None:
        """Send tensors by `trainer_args["trainer"]`, a `TrainerEngine`, between the caller's start and finish."""
        trainer_args["trainer"].send(iterator)

    def _own(self, bucket: Tensor) -> None:
        """Copy what layers that are not complete keep of a bucket, so that it goes back before the next message."""
        begin, end = bucket.data_ptr(), bucket.data_ptr() + bucket.numel()
        for info in self._layers(self.model):
            for _, bound in info.loaded_weights:
                for name, value in bound.arguments.items():
                    if isinstance(value, torch.Tensor) and begin <= value.data_ptr() < end:
                        bound.arguments[name] = value.clone()

    def _abandon(self) -> None:
        """Give back what an update that was not finished left: layers keep the weights that they have."""
        if self._updating is None:
            return
        from vllm.model_executor.model_loader import reload

        model, model_config = self._updating
        self._updating = None
        for info in self._layers(model):
            info.loaded_weights.clear()
            info.load_numel = 0
        reload.finalize_layerwise_reload(model, model_config)

    @staticmethod
    def _layers(model: Any) -> Iterator[Any]:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        return (info for info in map(get_layerwise_info, model.modules()) if info.can_load())


class TrainerEngine(base.TrainerWeightTransferEngine):  # type: ignore[misc]
    """The half of a transfer in the trainer: `send_weights` after each step."""

    init_info_cls = TrainerInitInfo
    config_cls = object

    def __init__(self, init_info: TrainerInitInfo, *, client: Any, source: Any) -> None:
        former = {"config": None} if _HAS_CONFIG else {"rank": init_info.rank}
        super().__init__(**former, client=client, source=source, is_sender=init_info.is_sender)
        self.sender: _buckets.Sender | None = None
        if self.is_sender:
            self.sender = _buckets.Sender(
                torch.device(init_info.device or ("cuda" if torch.cuda.is_available() else "cpu")),
                bucket_bytes=init_info.bucket_bytes,
                buckets=init_info.buckets,
                patience=init_info.patience,
            )

    @classmethod
    def trainer_init(
        cls, *infos: Any, client: Any, source: Any = None, config: Any = None, init_info: Any = None
    ) -> "TrainerEngine":
        """Open the session and connect the workers. vLLM 0.26 passes a configuration first, which is not used."""
        engine = cls(init_info or infos[-1], client=client, source=source)
        engine.connect_workers()
        return engine

    def connect_workers(self) -> None:
        """Tell the workers where the session is. Call it again after one was started anew."""
        if self.sender is not None:
            info = InitInfo(self.sender.session.path, self.sender.session.device.uuid)
            self._named(self.client.init_weight_transfer_engine, dataclasses.asdict(info))

    def send_weights(self) -> None:
        """Send the source's tensors to all workers, from start to finish, on every rank of the trainers.

        Raises:
            ParticipantGone: a worker was killed; the text names it. The others are well, and so is the next update.
            Timeout: workers hold all buckets; the text names them.
        """
        named = self.source.iter_full() if hasattr(self.source, "iter_full") else iter(self.source)
        if self.sender is None:
            for _ in named:
                pass
            return
        self._named(self.client.start_weight_update)
        self.send(named)
        self._named(self.client.finish_weight_update)

    def send(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Send tensors alone, between a start and a finish of the caller's."""
        assert self.sender is not None, "only rank 0 sends"
        with contextlib.closing(self.sender.messages(named, self._total())) as messages:
            for message in messages:
                self._named(self.client.update_weights, message)

    def shutdown(self) -> None:
        """End the session. Workers keep what they hold."""
        if self.sender is not None:
            self.sender.close()

    def _total(self) -> int | None:
        if self.source is None:
            return None
        # A property from 0.27 on, and a method before.
        metas: Any = self.source.metadata() if _HAS_CONFIG else self.source.metadata
        return sum(_buckets.room(meta.dtype.itemsize * torch.Size(meta.shape).numel()) for meta in metas)

    def _named(self, call: Callable[..., None], *given: Any) -> None:
        """Call the client, and name the workers whose death made it fail."""
        assert self.sender is not None
        try:
            call(*given)
        except Exception as error:
            if not (lost := self.sender.lost()):
                raise
            names = ", ".join(repr(notice.name) for notice in lost)
            gone = gpu_ipc.ParticipantGone(
                f"the weight update ended, since {names} died: start what died, call `connect_workers`, and send again"
            )
            gone.participant = lost[0].participant
            raise gone from error


def _refuse_asleep() -> None:
    """Refuse an update whose parameters have no memory; vLLM would write there, and its process would end."""
    cumem = sys.modules.get("vllm.device_allocator.cumem")
    if cumem is None or cumem.CuMemAllocator.instance is None:
        return
    if any(data.is_asleep and data.tag == "weights" for data in cumem.CuMemAllocator.instance.pointer_to_data.values()):
        raise gpu_ipc.Asleep('the weights of this engine sleep: call `wake_up(tags=["weights"])` before a weight update')


def _incomplete() -> Any:
    """Let a model load a part of its weights; vLLM before 0.27 checks nothing that needs this."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return contextlib.nullcontext()
    return disable_mtp_completeness_check()


def register() -> None:
    """Register the engine of workers and that of trainers with vLLM in this process, once; later calls change nothing."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, WorkerEngine)
    if NAME not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(NAME, TrainerEngine)
