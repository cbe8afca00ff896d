#!/usr/bin/env python3
"""Pulls objects between two brokers and gateways of one machine, beside raw NIXL and a plain copy.

    pulls.py --programs FOLDER [--from cuda:0] [--to cuda:1] [--mib 64 1024 8192] [--out FILE.json]

FOLDER holds gpu-ipc, gpu-ipc-gateway and nixl_reads, and GPU_IPC_NIXL names NIXL's library. What UCX may take is said by
UCX_TLS. Every pulled byte is compared with what was put. Ends with 1 if one is wrong or a pull fails.
"""

import argparse
import json
import mmap
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20
# A pull that took longer is not repeated.
SLOW_S = 8


def main():
    options = arguments()
    place = pathlib.Path(tempfile.mkdtemp(prefix="pulls-"))
    services = []
    try:
        good = measure(options, place, services)
    finally:
        for service in reversed(services):
            service.kill()
            service.wait()
        shutil.rmtree(place, ignore_errors=True)
        options.file.unlink(missing_ok=True)
    sys.exit(0 if good else 1)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    parser.add_argument("--from", dest="source", default="host:0")
    parser.add_argument("--to", dest="target", default="host:0")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=7447)
    parser.add_argument("--out", type=pathlib.Path, default=None)
    options = parser.parse_args()
    options.programs = options.programs.resolve()
    options.file = pathlib.Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp") / f"pulls-{os.getpid()}"
    return options


def measure(options, place, services):
    started = time.monotonic()
    write(options.file, max(options.mib))
    one = side(options, place, services, "one", options.source, options.port, None)
    two = side(options, place, services, "two", options.target, options.port + 1, options.port)
    rows, good = [], True
    for mib in sorted(options.mib, reverse=True):
        os.truncate(options.file, mib * MIB)
        pulls = []
        for turn in range(options.rounds):
            name = f"object-{mib}-{turn}"
            run(one, "put", name, options.file, "--dir", one["dir"], "--backend", one["backend"])
            report = pull(options, place, two, name)
            if report.get("ok") is False:
                print(f"pulls: {name}: {report['kind']}: {report['error']}")
                good = False
                break
            wrong = compare(two, name, options.file)
            if wrong is not None:
                print(f"pulls: {name}: WRONG from byte {wrong} on")
                good = False
            for end in (two, one):
                run(end, "rm", name, "--dir", end["dir"])
            pulls.append(report)
            if report["seconds"] > SLOW_S:
                break
        rows.append({"mib": mib, "pulls": pulls})
    print(f"pulls: {time.monotonic() - started:.0f} s, {'every byte right' if good else 'FAILED'}", flush=True)
    status = json.loads(run(two, "gateway", "--status", "--json", "--broker", two["dir"]))
    for service in services:
        service.kill()
    raw = reads(options, place)
    print(f"pulls: {time.monotonic() - started:.0f} s with raw NIXL", flush=True)
    taken = {"pull": transports(place, "pull"), "raw": transports(place, "raw")}
    show(options, rows, raw, taken, status)
    return good and all(row["pulls"] for row in rows)


def side(options, place, services, host, device, port, peer):
    """Starts a broker and its gateway."""
    folder = place / host
    folder.mkdir(mode=0o700)
    backend, ordinal = device.split(":")
    # `put` and `get` take the first device that they see.
    shown = {"CUDA_VISIBLE_DEVICES": ordinal} if backend == "cuda" else {}
    end = {"host": host, "dir": str(folder), "device": device, "backend": backend, "shown": shown, "log": place / f"{host}.log"}
    end["programs"] = options.programs
    broker = [options.programs / "gpu-ipc", "broker", "--dir", folder, "--device", device]
    services.append(start(end, broker))
    until(end, services[-1], "the broker", (folder / "broker").is_socket)
    gateway = [options.programs / "gpu-ipc-gateway", "run", "--broker", folder, "--device", device, "--host", host]
    gateway += ["--listen", f"tcp/127.0.0.1:{port}", "--insecure", "--link-gbit", "400"]
    gateway += ["--peer", f"tcp/127.0.0.1:{peer}"] if peer else []
    services.append(start(end, gateway))
    until(end, services[-1], "the gateway", lambda: any(folder.glob("gateway-*")))
    return end


def start(end, command):
    return subprocess.Popen(command, stdout=open(end["log"], "ab"), stderr=subprocess.STDOUT)


def until(end, service, what, there):
    for _ in range(600):
        if there():
            return
        if service.poll() is not None:
            break
        time.sleep(0.1)
    sys.exit(f"pulls: {what} of {end['host']} did not start:\n{end['log'].read_text()}")


def run(end, *command):
    command = [str(end["programs"] / "gpu-ipc"), *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **end["shown"]})
    if done.returncode != 0:
        sys.exit(f"pulls: {' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def pull(options, place, end, name):
    """Pulls when it is announced; says what it says."""
    log = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(place / f"pull-{name}.log")}
    command = [options.programs / "gpu-ipc-gateway", "pull", name, "--broker", end["dir"], "--device", end["device"]]
    command += ["--host", end["host"], "--from", "one", "--attempts", "60", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **log})
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {"ok": False, "kind": f"status {done.returncode}", "error": done.stdout + done.stderr}


def write(path, mib):
    """Makes a file in which no MiB is as another."""
    noise = os.urandom(MIB + 4096)
    with open(path, "wb") as file:
        for at in range(mib):
            skip = at * 8 % 4096
            file.write(struct.pack("<Q", at) + noise[skip : skip + MIB - 8])


def compare(end, name, path):
    """Compares an object with the file; says where they differ."""
    command = [end["programs"] / "gpu-ipc", "get", name, "--dir", end["dir"], "--backend", end["backend"]]
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as right:
        got = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **end["shown"]})
        at = 0
        while chunk := got.stdout.read(8 * MIB):
            if chunk != right[at : at + len(chunk)]:
                got.kill()
                got.wait()
                return at
            at += len(chunk)
        return None if got.wait() == 0 and at == len(right) else at


def reads(options, place):
    log = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(place / "raw-%p.log")}
    command = [options.programs / "nixl_reads", "--json", "--from", options.source, "--to", options.target]
    done = subprocess.run(command + [str(mib) for mib in sorted(options.mib)], capture_output=True, text=True, env={**os.environ, **log})
    sys.stdout.write(done.stderr)
    if done.returncode != 0:
        sys.exit(f"pulls: nixl_reads ended with {done.returncode}")
    return json.loads(done.stdout)


def transports(place, kind):
    """Finds what UCX says that it reads by, from its tables of protocols."""
    found = set()
    for log in place.glob(f"{kind}-*.log"):
        for line in log.read_text(errors="replace").splitlines():
            found.update(re.findall(r"\b(cuda_ipc|cuda_copy|gdr_copy|rc_mlx5|rc_verbs|dc_mlx5|tcp|cma|sysv|posix|xpmem|self)/", line))
    return sorted(found)


def show(options, rows, raw, taken, status):
    tls = os.environ.get("UCX_TLS", "UCX's own choice")
    print(f"\nobjects from {options.source} to {options.target}; UCX_TLS: {tls}; UCX took {', '.join(taken['pull']) or '?'}")
    print(f"{'MiB':>6} {'pull GB/s':>10} {'raw NIXL':>10} {'memory':>8} {'ratio':>6} {'copy':>8}  each pull; raw NIXL by memory")
    for row in reversed(rows):
        of_size = [one for one in raw if one["mib"] == row["mib"]]
        carried = [(max(one["whole"], one["pieces"]), one["what"]) for one in of_size if one["what"] != "peer copy"]
        row["raw"], row["memory"] = max(carried, default=(0, "none"))
        row["copy"] = max((one["whole"] for one in of_size if one["what"] == "peer copy"), default=0)
        speeds = sorted(one["gb_s"] for one in row["pulls"])
        row["pull"] = speeds[len(speeds) // 2] if speeds else 0
        row["ratio"] = row["pull"] / row["raw"] if row["raw"] else 0
        each = " ".join(f"{one['gb_s']:.2f} {one.get('way') or 'direct'}" for one in row["pulls"])
        beside = ", ".join(f"{what} {speed:.2f}" for speed, what in carried)
        print(f"{row['mib']:>6} {row['pull']:>10.2f} {row['raw']:>10.2f} {row['memory']:>8} {row['ratio']:>6.2f} {row['copy']:>8.2f}  {each}; {beside}")
    for path in status[0].get("paths", []) if status else []:
        tried = [f"{one['way']} {one['gb_s'] or one['error']}" for one in path["ways"]]
        print(f"tried by the last pull, GB/s: {', '.join(tried)}")
    said = {"from": options.source, "to": options.target, "ucx_tls": tls, "ucx_took": taken, "rows": rows, "raw": raw, "status": status}
    print(json.dumps(said))
    if options.out:
        options.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
