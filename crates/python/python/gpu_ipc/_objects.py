"""Nested names of an object's parts, and its tensors."""

from collections.abc import Mapping
from typing import Any

from gpu_ipc._errors import Invalid
from gpu_ipc._gpu_ipc import Object, Pool, PoolReader, Scratch

# Between the keys on the way to a part. Names of PyTorch's parameters hold dots, so those tell nothing.
SEPARATOR = "/"


def flat(parts: Any, before: str = "") -> dict[str, Any]:
    """Lay nested mappings out flat: ``{"model": {"w": x}}`` becomes ``{"model/w": x}``."""
    if not isinstance(parts, Mapping):
        raise Invalid(f"the parts are {type(parts).__name__}, but must be a mapping of names to arrays")
    if not parts:
        raise Invalid(f"the mapping {before[:-1]!r} is empty, but must hold a part: an object has no others")
    laid: dict[str, Any] = {}
    items: Any = parts.items()
    for key, value in items:
        if not isinstance(key, str) or SEPARATOR in key or not key:
            raise Invalid(
                f"a part's key is {key!r}, but must be a text, not empty, without `{SEPARATOR}`; of an optimizer's"
                " state, put the tensors under such names and the rest into `meta`"
            )
        if isinstance(value, Mapping):
            laid.update(flat(value, before + key + SEPARATOR))
        elif value is None or isinstance(value, (bool, int, float, str, list)):
            raise Invalid(
                f"the part {before + key!r} is a {type(value).__name__}, but must be an array: put other values into `meta`"
            )
        else:
            laid[before + key] = value
    return laid


def nested(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Make nested dictionaries of flat names again."""
    whole: dict[str, Any] = {}
    for name, value in parts.items():
        *way, last = name.split(SEPARATOR)
        inner = whole
        for key in way:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return whole


def expanded(parts: Mapping[str, Any], names: list[str]) -> list[str]:
    """Put the parts of a mapping in the place of its name; a name of neither stays, to be refused by it."""
    found: list[str] = []
    for name in names:
        inside = [part for part in parts if part.startswith(name + SEPARATOR)]
        found += [name] if name in parts or not inside else inside
    return found


def tensors(of: Object | Scratch | Pool | PoolReader) -> dict[str, Any]:
    """Make PyTorch tensors of all parts; those of an object or a reader are on memory that faults when it is written."""
    return nested({name: part.without_read_only_flag().torch() for name, part in of.items()})


def register() -> None:
    """Let `isinstance(object, Mapping)` say what is so."""
    mapping: Any = Mapping
    for kind in (Object, Pool, PoolReader, Scratch):
        mapping.register(kind)
