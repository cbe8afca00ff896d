"""Modules of PyTorch as objects of a broker: what vLLM's loader maps."""

import json
from typing import Any

import pytest

import gpu_ipc

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
from gpu_ipc.integrations import _modules


class Special(torch.nn.Parameter):
    """A parameter of a class of its own, as vLLM's."""


class Model(torch.nn.Module):
    def __init__(self, width: int = 8, head: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, width)
        self.norm = torch.nn.BatchNorm1d(width)
        if head:
            self.head = torch.nn.Linear(width, 16, bias=False)
            self.head.weight = self.embed.weight
            self.twin = self.head
        self.register_parameter("special", Special(torch.arange(12.0).reshape(3, 4).t(), requires_grad=False))
        self.special.weight_loader = "kept"
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_parameter("none", None)
        self.scale = torch.tensor([2.5])
        self.placeholder = torch.nn.Parameter(torch.empty(0))


def on_meta(**kind: Any) -> Model:
    with torch.device("meta"):
        return Model(**kind)


def test_a_module_is_mapped_as_it_was(broker: gpu_ipc.Broker) -> None:
    model = Model().requires_grad_(False)
    epoch = _modules.publish(broker, "model", model, about={"dtype": "float32"})
    found = broker.open("model")
    assert found.epoch == epoch and _modules.read(found)["about"] == {"dtype": "float32"}
    successor = on_meta()
    _modules.adopt(found, successor)
    first, second = model.state_dict(), successor.state_dict()
    assert list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)
    x = torch.tensor([3, 5])
    assert torch.equal(model.head(model.embed(x)), successor.head(successor.embed(x)))
    # One object for all names of a tied parameter, and each as the module's own.
    assert successor.head.weight is successor.embed.weight is successor.twin.weight
    assert type(successor.special) is Special and successor.special.weight_loader == "kept"
    assert successor.special.stride() == model.special.stride()
    assert "passing" in dict(successor.named_buffers()) and "passing" not in second
    assert successor.placeholder.shape == (0,) and successor.none is None
    # Parameters are the object's memory; what modules write to is not.
    assert successor.embed.weight.data_ptr() == found["embed.weight"].data_ptr and found["embed.weight"].read_only
    for written in (successor.norm.running_mean, successor.passing, successor.scale):
        written.add_(1)
    assert successor.scale.item() == 3.5 and broker.open("model").tensors()["scale"].item() == 2.5
    assert not any(tensor.is_meta for _, tensor, _ in _modules._tensors(successor))


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ({"width": 9}, r"'embed.weight' is \[16, 8\] of torch.float32 in the object 'model', but \[16, 9\]"),
        ({"head": False}, "the object 'model' has 'head.weight', but the module has nothing of that name"),
    ],
)
def test_another_module_is_refused_and_not_changed(broker: gpu_ipc.Broker, kind: dict[str, Any], error: str) -> None:
    _modules.publish(broker, "model", Model())
    other = on_meta(**kind)
    with pytest.raises(gpu_ipc.Mismatch, match=error):
        _modules.adopt(broker.open("model"), other)
    assert all(tensor.is_meta for _, tensor, _ in _modules._tensors(other))


def test_what_is_missing_or_no_module_is_refused_by_name(broker: gpu_ipc.Broker) -> None:
    _modules.publish(broker, "smaller", Model(head=False))
    with pytest.raises(gpu_ipc.Mismatch, match="the object 'smaller' lacks 'head.weight' and 1 more"):
        _modules.adopt(broker.open("smaller"), on_meta())
    broker.put("plain", {"w": torch.ones(2)})
    broker.put("older", {"w": torch.ones(2)}, meta=json.dumps({"schema": 0}).encode())
    broker.put("list", {"w": torch.ones(2)}, meta=b'{"schema": 1, "kinds": [3]}')
    for name, error in (("plain", "does not say what its parts are"), ("older", "has schema 0"), ("list", "does not say")):
        with pytest.raises(gpu_ipc.Mismatch, match=error):
            _modules.adopt(broker.open(name), on_meta())
    with pytest.raises(gpu_ipc.Invalid, match="'special' is on the device `meta`|'embed.weight' is on the device `meta`"):
        _modules.publish(broker, "model", on_meta())


def test_a_plain_reader_needs_nothing_but_the_schema(broker: gpu_ipc.Broker) -> None:
    model = Model().requires_grad_(False)
    _modules.publish(broker, "model", model)
    found = broker.open("model")
    meta = json.loads(found.meta)
    state = {name: found[meta["aliases"].get(name, name)] for name in model.state_dict() if name not in meta["empty"]}
    assert torch.equal(torch.from_dlpack(state["head.weight"].without_read_only_flag()), model.head.weight)
    assert meta["kinds"] == {
        "norm.running_mean": "buffer",
        "norm.running_var": "buffer",
        "norm.num_batches_tracked": "buffer",
        "passing": "passing",
        "scale": "attribute",
    }
