"""What jobs measured, as `gpu-ipc bench --json` writes it: `gpu-ipc bench --from FILE` shows it, `ci/device/chart` draws it."""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def figures(samples: Sequence[float]) -> dict[str, Any] | None:
    """Sum up samples, in nanoseconds or bytes."""
    ordered = sorted(samples)
    if not ordered:
        return None
    p99 = ordered[-(-len(ordered) * 99 // 100) - 1]
    return {"median": statistics.median(ordered), "p99": p99, "samples": len(ordered), "calls": 1}


def row(
    name: str,
    what: str,
    beside: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    at: int,
    unit: str = "ns",
    note: str | None = None,
) -> dict[str, Any]:
    """Put samples of ours beside those of PyTorch. A row without samples of ours says in its note why."""
    mine, other = figures(ours), figures(theirs)
    ratio = mine["median"] / other["median"] if mine and other and other["median"] > 0 else None
    goal = "no more than PyTorch" if ratio is not None else None
    met = ratio <= 1 if ratio is not None else None
    given = {"row": name, "what": what, "floor_is": beside, "at": at, "unit": unit, "ours": mine, "floor": None}
    return given | {"ratio": ratio, "baseline": other, "goal": goal, "met": met, "note": note, "error": None}


def failed(name: str, why: str) -> dict[str, Any]:
    """Make the row of something that has no figures because it went wrong."""
    return row(name, "", "", [], [], at=0) | {"error": why}


def driver() -> str:
    """Return NVIDIA's driver's version, out of the sentence that it is in."""
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.exists() else []
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def report(device: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Say where the rows were measured."""
    commit = Path(__file__).resolve().parents[2] / "COMMIT"
    kind = torch.device(device).type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else kind
    return {
        "ok": all(row["error"] is None for row in rows),
        "backend": kind,
        "device": f"{name}, PyTorch {torch.__version__}",
        "driver": driver(),
        "kernel": os.uname().release,
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit.read_text().split("\n")[0] if commit.exists() else None,
        "quick": False,
        "debug": False,
        "jobs": True,
        "rows": rows,
    }


def written(number: float, unit: str) -> str:
    """Write a number in a unit that fits."""
    units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("B", 1)] if unit == "B" else [("ms", 1e6), ("us", 1e3), ("ns", 1)]
    name, size = next((one for one in units if number >= one[1]), units[-1])
    return f"{number / size:.3g} {name}" if number < 1000 * size else f"{number / size:.0f} {name}"


def table(report: dict[str, Any]) -> str:
    """Make what people read, with what is slower than PyTorch first."""
    rows = sorted(report["rows"], key=lambda row: -(row["ratio"] or 0))
    slower = [f"{row['row']} {row['ratio']:.2f} x" for row in rows if (row["ratio"] or 0) > 1]
    lines = [
        f"{report['device']}. Medians and 99th percentiles.",
        f"Slower than PyTorch: {', '.join(slower) or 'nothing'}",
        "",
        "| job | what | gpu_ipc | PyTorch | ratio |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        pair = [
            "; ".join(written(one[key], row["unit"]) for key in ("median", "p99")) if one else ""
            for one in (row["ours"], row["baseline"])
        ]
        ratio = f"{row['ratio']:.3f}" if row["ratio"] is not None else ""
        lines.append(f"| {row['row']} | {row['what']}; PyTorch: {row['floor_is']} | {pair[0]} | {pair[1]} | {ratio} |")
    lines += [f"{row['row']}: {row['note']}" for row in rows if row["note"]]
    lines += [f"{row['row']} FAILED: {row['error']}" for row in rows if row["error"]]
    return "\n".join(lines)


def write(file: str, report: dict[str, Any]) -> None:
    Path(file).write_text(json.dumps(report), encoding="utf-8")
