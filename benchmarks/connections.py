"""How much sooner a checkpoint is saved and loaded over several connections, where the link limits each of them.

    python benchmarks/connections.py --out benchmarks/results/connections.json

Starts servers that speak the protocols of S3, GCS and Azure on 127.0.0.1 (see tests/servers.py), each behind a proxy
that lets a connection pass so many bytes per second and holds each request back for some milliseconds. Prints the table
as Markdown. The servers and the proxy share this machine's cores with the clients, which bounds what can be reached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_ckpt_policy import CheckpointStore
from lightning_ckpt_policy.snapshot import Staging, take_snapshot
from tests.fault_proxy import FaultProxy
from tests.servers import SERVERS, Server

MIB = 1 << 20
PACKAGES = ("lightning-ckpt-policy", "fsspec", "s3fs", "gcsfs", "adlfs", "moto", "nanio")


def measure(server: Server, proxy: FaultProxy, data: Any, connections: int, part_bytes: int) -> dict[str, float]:
    """Seconds that one save and one verified load take."""
    url = f"{server.bucket}/{uuid.uuid4().hex}/run"
    options = server.options(proxy.port)
    store = CheckpointStore(url, options, connections=connections, part_bytes=part_bytes)
    store.check()
    image = take_snapshot({"data": data}, Staging())
    pending = store.begin(1, "run", 1)
    began = time.perf_counter()
    record = store.commit(pending, image, {"step": 1, "epoch": 0, "created_at": time.time()})
    saved = time.perf_counter()
    store.open_verified(record).close()
    loaded = time.perf_counter()
    image.release()
    return {"save": saved - began, "load": loaded - saved}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--servers", nargs="+", choices=list(SERVERS), default=list(SERVERS), help="default: all")
    add("--size", type=int, default=64, help="MiB of the checkpoint (default 64)")
    add("--part", type=int, default=5, help="MiB of a part (default 5)")
    add("--connections", type=int, default=8, help="compared with one (default 8)")
    add("--rate", type=float, default=8.0, help="MiB per second and connection (default 8)")
    add("--latency", type=float, default=50.0, help="milliseconds of each request (default 50)")
    add("--rounds", type=int, default=3, help="how often each is measured, in turns (default 3)")
    add("--out", type=Path, help="write the results there, as JSON")
    args = parser.parse_args()

    import torch

    data = torch.frombuffer(bytearray(os.urandom(args.size * MIB)), dtype=torch.uint8)
    runs: list[dict[str, Any]] = []
    print(
        f"| Server | save, 1 connection, s | {args.connections} connections, s | ÷ | load, 1 | {args.connections} | ÷ |"
    )
    print("| --- |" + " --- |" * 6)
    for name in args.servers:
        with (
            SERVERS[name]() as server,
            FaultProxy(server.port, latency=args.latency / 1e3, bytes_per_second=args.rate * MIB) as proxy,
        ):
            for number in range(args.rounds):
                for connections in (1, args.connections):
                    seconds = measure(server, proxy, data, connections, args.part * MIB)
                    runs.append({"server": name, "round": number, "connections": connections, "seconds": seconds})
        cells = []
        for what in ("save", "load"):
            one, several = (
                [run["seconds"][what] for run in runs if run["server"] == name and run["connections"] == connections]
                for connections in (1, args.connections)
            )
            ratios = [slow / fast for slow, fast in zip(one, several, strict=True)]
            cells += [f"{statistics.median(one):.1f}", f"{statistics.median(several):.1f}"]
            cells.append(f"{statistics.median(ratios):.1f} ({min(ratios):.1f}–{max(ratios):.1f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if args.out:
        settings = {key: value for key, value in vars(args).items() if key != "out"}
        versions = {package: version(package) for package in PACKAGES}
        args.out.write_text(
            json.dumps({"settings": settings, "cores": os.cpu_count(), "versions": versions, "runs": runs}, indent=1)
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
