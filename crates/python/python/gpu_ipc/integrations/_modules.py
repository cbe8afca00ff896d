"""A module of PyTorch as an object of a broker, and back: the schema of an object's `meta` in `docs/OBJECTS.md`."""

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

import gpu_ipc

SCHEMA = 1
# PyTorch's classes, which are not there where types are checked.
Module: TypeAlias = Any
Tensor: TypeAlias = Any


def publish(broker: gpu_ipc.Broker, name: str, module: Module, *, about: dict[str, Any] | None = None, replace: bool = False) -> int:
    """Copy the tensors of a module into an object, and return its epoch.

    Tensors that several modules have are one part. Attributes of modules that are tensors are parts as well.

    Args:
        name: the object's.
        module: its tensors are on the broker's device.
        about: what a reader compares with its own before it maps; JSON.
        replace: give up the epochs before, for room.

    Raises:
        OutOfMemory: the broker's limit, or the device, has no room.
        Invalid: the module has no tensors, or one that no part can be.
    """
    parts: dict[str, Any] = {}
    meta: dict[str, Any] = {"schema": SCHEMA, "aliases": {}, "kinds": {}, "empty": {}, "about": about or {}}
    seen: dict[tuple[Any, ...], str] = {}
    for path, tensor, kind in _tensors(module):
        if tensor.is_meta:
            raise gpu_ipc.Invalid(f"{path!r} is on the device `meta`: load the module before it is published")
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if kind != "parameter":
            meta["kinds"][path] = kind
        if not tensor.numel():
            meta["empty"][path] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        elif (first := seen.setdefault(place, path)) != path:
            meta["aliases"][path] = first
        else:
            parts[path] = tensor.detach()
    return broker.put(name, parts, meta=json.dumps(meta).encode(), replace=replace)


def read(found: gpu_ipc.Object) -> dict[str, Any]:
    """Return an object's `meta` by the schema.

    Raises:
        Mismatch: it has another.
    """
    try:
        meta = json.loads(found.meta)
        fields = {field: dict(meta.get(field, {})) for field in ("aliases", "kinds", "empty", "about")}
        schema = meta["schema"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise gpu_ipc.Mismatch(f"the object {found.name!r} does not say what its parts are: publish a module by it") from error
    if schema != SCHEMA:
        raise gpu_ipc.Mismatch(f"the object {found.name!r} has schema {schema}, this gpu_ipc reads {SCHEMA}: publish it again")
    return fields


def adopt(found: gpu_ipc.Object, module: Module, *, processed: bool = False) -> None:
    """Put an object's tensors in the place of a module's, which were made on the device `meta`.

    Parameters are the object's own memory, to be read only. Everything else is a copy, since modules write there. The module
    keeps the object. Nothing is changed where anything differs.

    Args:
        found: an object that `publish` made.
        module: as the one that was published, before its tensors were loaded.
        processed: the parts have been laid out anew since, so that shapes may differ and tensors may be missing.

    Raises:
        Mismatch: module and object have other tensors; the text names the first of them.
    """
    meta = read(found)
    tensors = found.tensors()
    for path, (dtype, shape) in meta["empty"].items():
        tensors[path] = torch.empty(shape, dtype=getattr(torch, dtype))
    for alias, path in meta["aliases"].items():
        tensors[alias] = tensors[path]
    modules = dict(module.named_modules(remove_duplicate=False))
    own = {path: tensor for path, tensor, _ in _tensors(module)}
    for path, tensor in tensors.items():
        if path.rpartition(".")[0] not in modules:
            raise gpu_ipc.Mismatch(f"the object {found.name!r} has {path!r}, but the module has nothing of that name")
        if not processed and path in own and (own[path].shape, own[path].dtype) != (tensor.shape, tensor.dtype):
            raise gpu_ipc.Mismatch(
                f"{path!r} is {list(tensor.shape)} of {tensor.dtype} in the object {found.name!r}, but {list(own[path].shape)} of"
                f" {own[path].dtype} in the module"
            )
    if not processed and (missing := [path for path, tensor in own.items() if path not in tensors and tensor.is_meta]):
        raise gpu_ipc.Mismatch(f"the object {found.name!r} lacks {missing[0]!r} and {len(missing) - 1} more of the module")
    made: dict[str, Any] = {}
    for path, tensor in tensors.items():
        first = meta["aliases"].get(path, path)
        if first not in made:
            made[first] = _parameter(tensor, own.get(first)) if first not in meta["kinds"] else tensor.clone()
        before, _, leaf = path.rpartition(".")
        _place(modules[before], leaf, made[first], meta["kinds"].get(path, "parameter"))
    module.gpu_ipc_object = found


def _tensors(module: Module) -> Iterator[tuple[str, Tensor, str]]:
    """Yield the path, the tensor and the kind of all that a module and those in it have."""
    for before, inner in module.named_modules(remove_duplicate=False):
        prefix = f"{before}." if before else ""
        for leaf, tensor in inner._parameters.items():
            if tensor is not None:
                yield prefix + leaf, tensor, "parameter"
        for leaf, tensor in inner._buffers.items():
            if tensor is not None:
                yield prefix + leaf, tensor, "passing" if leaf in inner._non_persistent_buffers_set else "buffer"
        for leaf, value in vars(inner).items():
            if isinstance(value, torch.Tensor):
                yield prefix + leaf, value, "attribute"


def _parameter(tensor: Tensor, before: Tensor | None) -> Tensor:
    """Make a parameter of the class that the module had, with its attributes, such as how it is loaded."""
    kind = type(before) if isinstance(before, torch.nn.Parameter) else torch.nn.Parameter
    made = torch.Tensor._make_subclass(kind, tensor, False)
    made.__dict__.update(getattr(before, "__dict__", {}))
    return made


def _place(module: Module, leaf: str, tensor: Tensor, kind: str) -> None:
    stores: dict[str, Any] = {"parameter": module._parameters, "buffer": module._buffers, "attribute": module.__dict__}
    stores["passing"] = stores["buffer"]
    # In its place, so that the module's order stays.
    for store in (module._parameters, module._buffers, module.__dict__):
        if store is not stores[kind]:
            store.pop(leaf, None)
    stores[kind][leaf] = tensor
    module._non_persistent_buffers_set.discard(leaf)
    if kind == "passing":
        module._non_persistent_buffers_set.add(leaf)
