"""Weights that outlive vLLM's engines: genuine loaders of vLLM, and its Llama with two layers on the CPU."""

import json
import pathlib
from typing import Any

import pytest

import gpu_ipc

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")
# vLLM's platform for no device at all has no attention; the CPU's is made, and not run.
from vllm.platforms.interface import UnspecifiedPlatform

UnspecifiedPlatform.get_attn_backend_cls = classmethod(
    lambda *_, **__: "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
)
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import get_model_loader

from gpu_ipc.integrations import _modules, vllm, vllm_loader

vllm_loader.register()
vllm_loader.register()

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    config = ModelConfig(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="float32")
    with set_current_vllm_config(VllmConfig(model_config=config, device_config=DeviceConfig("cpu"))):
        store = tmp_path_factory.mktemp("rendezvous") / "store"
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
    return config


def load(model_config: Any, directory: pathlib.Path, **extra: Any) -> Any:
    """Load as an engine does that was started with `--load-format gpu_ipc`."""
    load_config = LoadConfig(load_format="gpu_ipc", model_loader_extra_config={"dir": str(directory)} | extra)
    config = VllmConfig(model_config=model_config, load_config=load_config, device_config=DeviceConfig("cpu"))
    loader = get_model_loader(load_config)
    with set_current_vllm_config(config):
        return loader.load_model(vllm_config=config, model_config=model_config), loader, config


def test_a_successor_maps_what_the_first_engine_loaded(model_config: Any, directory: pathlib.Path) -> None:
    first, loader, config = load(model_config, directory, source="dummy")
    assert loader.get_external_weight_memory(config) == 0
    assert vllm_loader.publish(first) == 1
    second, loader, config = load(model_config, directory, source="")
    theirs, ours = first.state_dict(), second.state_dict()
    assert list(theirs) == list(ours) and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert second.lm_head.weight is second.model.embed_tokens.weight
    found = second.gpu_ipc_object
    mapped = {part.data_ptr for part in found.values()}
    assert all(parameter.data_ptr() in mapped for parameter in second.parameters())
    assert not mapped & {buffer.data_ptr() for buffer in second.buffers()}
    assert loader.get_external_weight_memory(config) == sum(part.nbytes for part in found.values())
    # The classes and attributes by which vLLM loads a parameter are the model's own.
    for name, parameter in first.named_parameters():
        other = dict(second.named_parameters())[name]
        assert type(parameter) is type(other) and set(vars(parameter)) == set(vars(other)), name
    assert not any(tensor.is_meta for _, tensor, _ in _modules._tensors(second))
    assert vllm_loader.publish(second) is None
    with pytest.raises(gpu_ipc.Unsupported, match="put a new epoch and call `advance`"):
        loader.load_weights(second, model_config)
    engine = vllm.WorkerEngine(None, config, torch.device("cpu"), second)
    with pytest.raises(gpu_ipc.Unsupported, match="maps its weights from the object 'vllm-.*put a new epoch"):
        engine.start_weight_update()


def test_a_new_epoch_comes_at_the_same_addresses(model_config: Any, directory: pathlib.Path) -> None:
    first, _, _ = load(model_config, directory, source="dummy")
    vllm_loader.publish(first)
    second, _, _ = load(model_config, directory, source="")
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in second.named_parameters()}
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(1)
    assert vllm_loader.publish(first) == 2
    assert second.gpu_ipc_object.advance()
    for name, parameter in second.named_parameters():
        assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1] + 1), name
    second.gpu_ipc_object.sleep()
    second.gpu_ipc_object.wake()
    assert torch.equal(second.lm_head.weight, first.lm_head.weight)


def test_an_engine_that_cannot_map_says_why(model_config: Any, directory: pathlib.Path) -> None:
    with pytest.raises(gpu_ipc.NotFound) as error:
        load(model_config, directory, source="")
    assert "does not load the model itself" in "".join(error.value.__notes__)
    with pytest.raises(gpu_ipc.Invalid, match=r"has \['socket'\], but may have dir, source and object"):
        load(model_config, directory, socket="x")
    with pytest.raises(gpu_ipc.Invalid, match="was loaded by another loader"):
        vllm_loader.publish(torch.nn.Linear(1, 1))
    first, _, _ = load(model_config, directory, source="dummy", object="named")
    first.gpu_ipc_publication[3]["quantization"] = "another"
    vllm_loader.publish(first)
    with pytest.raises(gpu_ipc.Mismatch, match="the object 'named-0' is of .*another.*publish it under another name"):
        load(model_config, directory, object="named")


def test_layers_that_lay_tensors_out_anew_are_refused_by_name() -> None:
    class Fp8LinearMethod:
        supports_pre_processed_weights = False

    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].quant_method = Fp8LinearMethod()
    with pytest.raises(gpu_ipc.Unsupported, match="the layer '0' has Fp8LinearMethod"):
        vllm_loader._refuse_quantised(model)
