#!/usr/bin/env python3
"""Pulls objects between two brokers and gateways of one machine, beside raw NIXL and a plain copy.

    pulls.py --programs FOLDER [--from cuda:0] [--to cuda:1] [--mib 64 1024 8192] [--compare 1024] [--out FILE.json]

FOLDER holds gpu-ipc, gpu-ipc-gateway and nixl_reads, and GPU_IPC_NIXL names NIXL's library. What UCX may take is said by
UCX_TLS. Objects of the sizes of --compare are also pulled with other settings (SETTINGS). Every pulled byte is compared
with what was put. What fails is said, and the rest goes on. Ends with 1 if a byte is wrong, or a pull fails, as shipped.
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
# Name, arguments of the origin's gateway, arguments of the pull. The first is what ships.
SHIPPED = ("as shipped", [], [])
SETTINGS = [
    ("NIXL's thread", [], ["--progress-thread"]),
    ("lands in slots", [], ["--land", "slots"]),
    ("64 slots of 16 MiB", ["--slots", "64", "--slot-mib", "16"], []),
    ("32 slots of 16 MiB", ["--slots", "32", "--slot-mib", "16"], []),
]


class Failed(Exception):
    pass


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
    parser.add_argument("--compare", type=int, nargs="*", default=[])
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
    for setting in [SHIPPED, *SETTINGS]:
        shipped = setting is SHIPPED
        sizes = options.mib if shipped else [mib for mib in options.compare if mib in options.mib]
        if setting[1] and sizes:
            serve(services, one, setting[1])
        for mib in sorted(sizes, reverse=True):
            row = {"mib": mib, "setting": setting[0], "pulls": [], "error": None}
            rows.append(row)
            try:
                pulls(options, place, one, two, setting, row)
            except Failed as error:
                row["error"] = str(error)
                print(f"pulls: {setting[0]}, {mib} MiB: {error}", flush=True)
            good &= row["error"] is None or (not shipped and "WRONG" not in row["error"])
    print(f"pulls: {time.monotonic() - started:.0f} s, {'every byte right' if good else 'FAILED'}", flush=True)
    status = []
    for end in (two, one):
        try:
            status += json.loads(run(end, "gateway", "--status", "--json", "--broker", end["dir"]))
        except Failed as error:
            status.append({"error": str(error)})
    for service in services:
        service.kill()
    raw = reads(options, place)
    print(f"pulls: {time.monotonic() - started:.0f} s with raw NIXL", flush=True)
    taken = {"pull": transports(place, "pull"), "raw": transports(place, "raw")}
    show(options, rows, raw, taken, status)
    return good


def pulls(options, place, one, two, setting, row):
    """Pulls objects of one size with one setting."""
    os.truncate(options.file, row["mib"] * MIB)
    for turn in range(options.rounds if setting is SHIPPED else 2):
        name = f"object-{row['mib']}-{turn}-{setting[0].replace(' ', '-').replace(chr(39), '')}"
        run(one, "put", name, options.file, "--dir", one["dir"], "--backend", one["backend"])
        report = pull(options, place, two, name, setting[2])
        if report.get("ok") is False:
            raise Failed(f"{name}: {report['kind']}: {report['error']}")
        row["pulls"].append(report)
        wrong = compare(two, name, options.file)
        if wrong is not None:
            raise Failed(f"{name}: WRONG from byte {wrong} on")
        for end in (two, one):
            run(end, "rm", name, "--dir", end["dir"])
        if report["seconds"] > SLOW_S:
            break


def side(options, place, services, host, device, port, peer):
    """Starts a broker and its gateway."""
    folder = place / host
    folder.mkdir(mode=0o700)
    backend, ordinal = device.split(":")
    # `put` and `get` take the first device that they see.
    shown = {"CUDA_VISIBLE_DEVICES": ordinal} if backend == "cuda" else {}
    end = {"host": host, "dir": str(folder), "device": device, "backend": backend, "shown": shown, "log": place / f"{host}.log"}
    end |= {"programs": options.programs, "port": port, "peer": peer, "gateway": None}
    broker = [options.programs / "gpu-ipc", "broker", "--dir", folder, "--device", device]
    services.append(start(end, broker))
    until(end, services[-1], "the broker", (folder / "broker").is_socket)
    serve(services, end, [])
    return end


def serve(services, end, arguments):
    """Starts the gateway of a side, in the place of its former one."""
    if end["gateway"]:
        end["gateway"].kill()
        end["gateway"].wait()
    for left in pathlib.Path(end["dir"]).glob("gateway-*"):
        left.unlink()
    command = [end["programs"] / "gpu-ipc-gateway", "run", "--broker", end["dir"], "--device", end["device"], "--host", end["host"]]
    command += ["--listen", f"tcp/127.0.0.1:{end['port']}", "--insecure", "--link-gbit", "400", *arguments]
    command += ["--peer", f"tcp/127.0.0.1:{end['peer']}"] if end["peer"] else []
    end["gateway"] = start(end, command)
    services.append(end["gateway"])
    until(end, end["gateway"], "the gateway", lambda: any(pathlib.Path(end["dir"]).glob("gateway-*")))


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
        raise Failed(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def pull(options, place, end, name, arguments):
    """Pulls when it is announced; says what it says."""
    log = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(place / f"pull-{name}.log")}
    command = [options.programs / "gpu-ipc-gateway", "pull", name, "--broker", end["dir"], "--device", end["device"]]
    command += ["--host", end["host"], "--from", "one", "--attempts", "60", "--json", *arguments]
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
    command += ["--cuts"] if options.compare else []
    done = subprocess.run(command + [str(mib) for mib in sorted(options.mib)], capture_output=True, text=True, env={**os.environ, **log})
    sys.stdout.write(done.stderr)
    try:
        return json.loads(done.stdout)
    except ValueError:
        print(f"pulls: nixl_reads ended with {done.returncode}: {done.stdout}")
        return {"rows": [], "cuts": []}


def transports(place, kind):
    """Finds what UCX says that it reads by, from its tables of protocols."""
    found = set()
    for log in place.glob(f"{kind}-*.log"):
        for line in log.read_text(errors="replace").splitlines():
            found.update(re.findall(r"\b(cuda_ipc|cuda_copy|gdr_copy|rc_mlx5|rc_verbs|dc_mlx5|tcp|cma|sysv|posix|xpmem|self)/", line))
    return sorted(found)


def middle(pulls):
    """Finds the pull of median speed; of two the slower one."""
    return sorted(pulls, key=lambda one: one["gb_s"])[(len(pulls) - 1) // 2]


def show(options, rows, raw, taken, status):
    tls = os.environ.get("UCX_TLS", "UCX's own choice")
    print(f"\nobjects from {options.source} to {options.target}; UCX_TLS: {tls}; UCX took {', '.join(taken['pull']) or '?'}")
    print(f"{'MiB':>6} {'pull GB/s':>10} {'raw NIXL':>10} {'ratio':>6} {'copy':>8}  setting: each pull; best of raw NIXL by memory and agent")
    for row in sorted(rows, key=lambda row: (row["setting"] != SHIPPED[0], row["setting"], row["mib"])):
        of_size = [one for one in raw["rows"] if one["mib"] == row["mib"]]
        carried = [(max(one["whole"], one["pieces"]), f"{one['what']} {one['agent']}") for one in of_size if one["what"] != "peer copy"]
        carried += [(one["gb_s"], f"cut {one['piece_mib']}x{one['under_way']} {one['agent']}") for one in raw["cuts"] if one["mib"] == row["mib"]]
        row["raw"], row["memory"] = max(carried, default=(0, "none"))
        row["copy"] = max((one["whole"] for one in of_size if one["what"] == "peer copy"), default=0)
        row["pull"] = middle(row["pulls"])["gb_s"] if row["pulls"] else 0
        row["ratio"] = row["pull"] / row["raw"] if row["raw"] else 0
        each = " ".join(f"{one['gb_s']:.2f} {one.get('way') or 'direct'}" for one in row["pulls"])
        print(f"{row['mib']:>6} {row['pull']:>10.2f} {row['raw']:>10.2f} {row['ratio']:>6.2f} {row['copy']:>8.2f}  {row['setting']}: {each}; {row['memory']}")
    print("\nmilliseconds of each step, the median of the pulls; `ring` is the part of `read` while no slot was read")
    names = ["lease", "create", "stage", "trials", "read", "ring_filling", "ring_copying", "flush", "confirm", "commit"]
    print(f"{'MiB':>6} " + " ".join(f"{name.replace('ring_', 'ring '):>12}" for name in names) + f" {'in all':>10}  setting; questions to fill slots, a question")
    for row in rows:
        if row["pulls"]:
            shown = middle(row["pulls"])
            steps = " ".join(f"{shown['steps'][name] * 1e3:>12.3f}" for name in names)
            print(f"{row['mib']:>6} {steps} {shown['seconds'] * 1e3:>10.1f}  {row['setting']}; {shown['steps']['fills']}, {shown['steps']['fill'] * 1e3:.3f}")
    if raw["cuts"]:
        print("\nraw NIXL of plain memory, GB/s")
        for agent, mib in sorted({(one["agent"], one["mib"]) for one in raw["cuts"]}):
            of = [one for one in raw["cuts"] if (one["agent"], one["mib"]) == (agent, mib)]
            said = ", ".join(f"{one['piece_mib']} MiB x {one['under_way']}: {one['gb_s']:.1f}" for one in of)
            print(f"{agent} {mib} MiB: {said}")
        for one in raw["rows"]:
            print(f"{one['what']} {one['agent']} {one['mib']} MiB: whole {one['whole']:.1f}, as cut by default {one['pieces']:.1f}")
    for path in status[0].get("paths", []) if status else []:
        tried = [f"{one['way']} {one['gb_s'] or one['error']}" for one in path["ways"]]
        print(f"tried by the last pull, GB/s: {', '.join(tried)}")
    said = {"from": options.source, "to": options.target, "ucx_tls": tls, "ucx_took": taken, "rows": rows, "raw": raw, "status": status}
    print(json.dumps(said))
    if options.out:
        options.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
