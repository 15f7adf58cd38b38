"""Let file operations of saves go wrong, one at a time at random, and flip bytes of checkpoints and records.

    python benchmarks/fault_campaign.py --faults 2000 --flips 5000

Each fault hits one operation of one save to a local folder: an error instead of the call or after it, a short write, a
silent truncation, a flipped bit. The save must then either be confirmed and verify, or fail and leave nothing that
reads as a checkpoint; silent damage must be caught, when it is written or when it is verified; the checkpoint before it
stays whole; and the sweep of the next attempt leaves no debris. Exits with 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import fsspec
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_ckpt_policy import CheckpointRecord, CheckpointStore, DamagedCheckpointError, RecordError
from lightning_ckpt_policy import backends as backends_module
from lightning_ckpt_policy.snapshot import Image, take_snapshot
from tests.faults import Fault, FaultFileSystem, FaultyOs, Schedule

ACTIONS = ("error", "error_after", "short", "truncate", "flip")
SILENT = ("truncate", "flip")
RUN = "run"


def save(store: CheckpointStore, step: int, image: Image) -> CheckpointRecord:
    pending = store.begin(step, RUN, 1)
    draft: dict[str, Any] = {"step": step, "epoch": 0, "created_at": float(step), "metrics": {"val_loss": 1.0 / step}}
    return store.commit(pending, image, draft)


@contextlib.contextmanager
def faulty(folder: Path, schedule: Schedule) -> Any:
    """A store on ``folder`` whose file operations ask ``schedule``."""
    system = backends_module.os
    backends_module.os = FaultyOs(schedule)  # type: ignore[attr-defined]
    try:
        yield CheckpointStore(f"faulty://{folder}", {"target_protocol": "file", "schedule": schedule})
    finally:
        backends_module.os = system  # type: ignore[attr-defined]


def operations(root: Path, image: Image) -> Counter[str]:
    """The operations of one save, and how often each is called."""
    folder = root / "clean"
    folder.mkdir()
    schedule = Schedule()
    with faulty(folder, schedule) as store:
        save(store, 1, image)
    return Counter(op for op, _ in schedule.log)


def one_fault(folder: Path, image: Image, fault: Fault) -> str:
    """Save with one fault; what became of it. Raises AssertionError if a promise is broken."""
    folder.mkdir()
    before = save(CheckpointStore(folder), 1, image)
    schedule = Schedule(fault)
    error: BaseException | None = None
    with faulty(folder, schedule) as store:
        try:
            save(store, 2, image)
        except Exception as caught:
            error = caught
    clean = CheckpointStore(folder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        records = clean.records()
    clean.verify(before)
    assert before in records, "the checkpoint before is gone"
    after = [record for record in records if record.step == 2]
    outcome = "no effect" if schedule.hits == 0 else "saved all the same"
    if error is not None:
        assert not after or fault.action in SILENT, f"it failed with {error!r} and reads as a checkpoint"
        outcome = "failed, nothing left"
    for record in after:
        try:
            clean.verify(record)
        except DamagedCheckpointError:
            assert fault.action in SILENT, "an error left a damaged checkpoint"
            outcome = "caught when verified"
    if error is None and not after:
        assert fault.action in SILENT, "it was confirmed and isn't there"
        assert said, "a damaged record was passed over without a word"
        outcome = "caught when listed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clean.sweep(RUN, 2)
    left = {path.name for path in folder.iterdir() if path.is_file()}
    named = {name for record in clean.records() for name in (record.path, record.path + ".json")}
    debris = left - named
    if fault.action in SILENT:  # a marker or record that can't be read is nobody's, and stays
        debris = {name for name in debris if name.endswith(".tmp")}
    assert not debris, f"left after the sweep: {sorted(debris)}"
    return outcome


def flip_payload(root: Path, flips: int, draw: random.Random) -> Counter[str]:
    """Flip single bits of a checkpoint at random places; how many ``verify`` caught, and ``torch.load`` noticed."""
    folder = root / "flips"
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    image = take_snapshot({"state_dict": model.state_dict(), "epoch": 1})
    store = CheckpointStore(folder)
    store.check()
    record = save(store, 1, image)
    path = Path(store.path_of(record))
    good = path.read_bytes()
    counts: Counter[str] = Counter()
    for _ in track(range(flips), "flipping bits of a checkpoint"):
        data = bytearray(good)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        counts["flipped"] += 1
        try:
            store.verify(record)
        except DamagedCheckpointError:
            counts["caught"] += 1
        try:
            torch.load(path)
        except Exception:
            counts["noticed by torch.load alone"] += 1
    return counts


def flip_record(root: Path) -> Counter[str]:
    """Flip each bit of a record; how many were caught, and how many make no difference."""
    store = CheckpointStore(root / "flips")
    record = store.records()[0]
    good = record.to_json()
    counts: Counter[str] = Counter()
    for place in range(len(good)):
        for bit in range(8):
            data = bytearray(good)
            data[place] ^= 1 << bit
            counts["flipped"] += 1
            try:
                same = CheckpointRecord.from_json(bytes(data)) == record
            except RecordError:
                counts["caught"] += 1
            else:
                counts["harmless" if same else "believed"] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    fsspec.register_implementation("faulty", FaultFileSystem, clobber=True)
    draw = random.Random(args.seed)
    console = Console()
    image = take_snapshot({"weight": torch.randn(40_000, generator=torch.Generator().manual_seed(1))})
    outcomes: dict[str, Counter[str]] = {action: Counter() for action in ACTIONS}
    broken: list[str] = []
    root = Path(tempfile.mkdtemp(prefix="fault-campaign-"))
    try:
        calls = operations(root, image)
        # writes can go wrong in more ways than others
        places = [
            (op, kth)
            for op, count in sorted(calls.items())
            for kth in range(1, count + 1)
            for _ in range(5 if op == "write" else 1)
        ]
        for number in track(range(args.faults), "faults"):
            op, kth = draw.choice(places)
            action = draw.choice(ACTIONS if op == "write" or op == "pipe_file" else ACTIONS[:2])
            try:
                outcomes[action][one_fault(root / str(number), image, Fault(action, op, kth))] += 1
            except Exception as error:
                broken.append(f"{action} at call {kth} of {op}: {type(error).__name__}: {error}")
            shutil.rmtree(root / str(number))
        payload = flip_payload(root, args.flips, draw)
        record = flip_record(root)
    finally:
        shutil.rmtree(root)
    missed = payload["flipped"] - payload["caught"] + record["believed"]
    table = Table("fault", "outcome", "times")
    for action, counter in outcomes.items():
        for outcome, times in sorted(counter.items()):
            table.add_row(action, outcome, str(times))
    console.print(table)
    console.print(
        f"{args.faults} faults, {len(broken)} broken promises. Bits flipped in checkpoints: {dict(payload)}; "
        f"in a record: {dict(record)}.",
        *broken,
        sep="\n",
        highlight=False,
    )
    if args.out is not None:
        figures = {
            "command": f"python benchmarks/fault_campaign.py --faults {args.faults} --flips {args.flips} "
            f"--seed {args.seed}",
            "versions": {
                "python": platform.python_version(),
                **{name: metadata.version(name) for name in ("lightning-ckpt-policy", "torch", "fsspec")},
            },
            "faults": {"injected": args.faults, "broken_promises": broken, "outcomes": outcomes},
            "payload_bits": payload,
            "record_bits": record,
        }
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if broken or missed else 0


if __name__ == "__main__":
    sys.exit(main())
