"""Weights that outlive vLLM's engines, `docs/integrations/VLLM.md`: ``--load-format gpu_ipc``.

The first engine loads its model as always, and `publish` puts it into a broker. An engine that comes later maps it: it reads no
file and takes no memory for parameters, and it needs neither the first engine nor the broker to stay.
"""

import contextlib
import hashlib
import json
from collections.abc import Generator
from typing import Any

import torch
import vllm
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

import gpu_ipc
from gpu_ipc.integrations import _buckets, _modules

NAME = "gpu_ipc"
# What makes one model's tensors another's, beside the place of this worker among those of its engine.
_MODEL = ("model", "revision", "dtype", "quantization", "max_model_len")
_PLACE = ("rank", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")


class Loader(BaseModelLoader):  # type: ignore[misc]
    """Maps a model of a broker, or loads it as `source` says when the broker has none.

    The keys of `--model-loader-extra-config`, in JSON:
        dir: the broker's folder; that of `docs/OBJECTS.md` unless said.
        source: the load format for the first engine, `auto` unless said; `""` refuses to load.
        object: the object's name, instead of one that the configuration gives.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        self._dir: str | None = extra.pop("dir", None)
        self._source: str = extra.pop("source", "auto")
        self._object: str | None = extra.pop("object", None)
        if extra:
            raise gpu_ipc.Invalid(f"`--model-loader-extra-config` has {sorted(extra)}, but may have dir, source and object")

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Return the bytes of the object, which are no memory of this process."""
        device = torch.device(vllm_config.device_config.device)
        with gpu_ipc.connect_broker(self._dir, _buckets.name_of(device)) as broker:
            with contextlib.suppress(gpu_ipc.NotFound):
                return sum(part.nbytes for part in broker.open(self._name(vllm_config, vllm_config.model_config)).values())
        return 0

    def download_model(self, model_config: Any) -> None:
        """Fetch the model's files for an engine that has to load it."""
        if self._source:
            get_model_loader(self._before()).download_model(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Refuse: parameters that are mapped are read by other engines, too."""
        raise gpu_ipc.Unsupported(
            "the weights are an object's, which never changes: put a new epoch and call `advance`, or load with another format"
        )

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Map the model, or load it.

        Raises:
            Mismatch: the object has other tensors than the model.
            Unsupported: a layer's quantisation cannot begin with tensors that it has processed.
            NotFound: the broker has no such object, and `source` is empty.
        """
        device = torch.device(self.load_config.device or vllm_config.device_config.device)
        name = self._name(vllm_config, model_config)
        with gpu_ipc.connect_broker(self._dir, _buckets.name_of(device), name=f"vLLM {name}") as broker:
            try:
                found = broker.open(name)
            except gpu_ipc.NotFound as error:
                if not self._source:
                    error.add_note("`source` is empty, so this engine does not load the model itself.")
                    raise
                model = get_model_loader(self._before()).load_model(vllm_config, model_config, prefix)
                model.gpu_ipc_publication = (name, self._dir, _buckets.name_of(device), self._about(vllm_config, model_config))
                return model
        if _modules.read(found)["about"] != (about := self._about(vllm_config, model_config)):
            raise gpu_ipc.Mismatch(
                f"the object {name!r} is of {_modules.read(found)['about']}, this engine has {about}: publish it under another name"
            )
        with set_default_torch_dtype(model_config.dtype):
            with torch.device("meta"):
                model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            _refuse_quantised(model)
            _modules.adopt(found, model, processed=_has_processed())
            with _processed():
                process_weights_after_loading(model, model_config, device)
        return model.eval()

    def _before(self) -> Any:
        return LoadConfig(load_format=self._source, device=self.load_config.device, download_dir=self.load_config.download_dir)

    def _about(self, vllm_config: Any, model_config: Any) -> dict[str, Any]:
        about = {key: str(getattr(model_config, key, None)) for key in _MODEL}
        about |= {key: str(getattr(vllm_config.parallel_config, key, None)) for key in _PLACE}
        return about | {"vllm": vllm.__version__, "torch": torch.__version__}

    def _name(self, vllm_config: Any, model_config: Any) -> str:
        if self._object:
            rank = getattr(vllm_config.parallel_config, "rank", 0)
            return f"{self._object}-{rank}"
        text = json.dumps(self._about(vllm_config, model_config), sort_keys=True)
        return f"vllm-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def publish(model: Any) -> int | None:
    """Put the model of a worker into its broker, for engines to come, and return the epoch; None where it is mapped already.

    Call it once the engine has started, so that vLLM's profiling of memory is over: ``llm.apply_model(publish)``.

    Raises:
        Invalid: the engine was not started with ``--load-format gpu_ipc``.
        OutOfMemory: the broker's limit, or the device, has no room.
    """
    if hasattr(model, "gpu_ipc_object"):
        return None
    if not hasattr(model, "gpu_ipc_publication"):
        raise gpu_ipc.Invalid("the model was loaded by another loader: start the engine with `--load-format gpu_ipc`")
    name, where, device, about = model.gpu_ipc_publication
    with gpu_ipc.connect_broker(where, device) as broker:
        return _modules.publish(broker, name, model, about=about)


def _has_processed() -> bool:
    """Say whether this vLLM has layers that begin with tensors in their last layout: from 0.30 on."""
    from vllm.model_executor import utils

    return hasattr(utils, "weights_already_processed")


@contextlib.contextmanager
def _processed() -> Generator[None, None, None]:
    from vllm.model_executor import utils

    with utils.weights_already_processed() if _has_processed() else contextlib.nullcontext():
        yield


def _refuse_quantised(model: Any) -> None:
    """Refuse layers that would lay mapped tensors out anew."""
    plain = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        can = getattr(method, "supports_pre_processed_weights", False) if _has_processed() else type(method).__name__ in plain
        if method is not None and not can:
            raise gpu_ipc.Unsupported(
                f"the layer {name!r} has {type(method).__name__}, which cannot begin with tensors that were processed before: use"
                " another load format for this model"
            )


def register() -> None:
    """Register the loader with vLLM in this process, once; later calls change nothing."""
    if NAME not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(NAME)(Loader)
