"""Run the public tool ckpt-chaos against a small training with this package.

    pip install ckpt-chaos
    python benchmarks/ckpt_chaos.py

The tool kills the training at each file that it opens, renames or removes, also with the file torn in half or with what
wasn't synced taken back; runs the same command again; and compares what came of it with an undisturbed run. Twice: with
everything kept, as its check for lost work wants it, and with retention that deletes. In both the training waits for
each save and delete, so that file events come in the same order in each run. Exits with 1 if a verdict isn't PASS.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

MODES = ("before", "torn", "unsynced")
RESUMED = "resumed from step"
# what is run, and whether the tool can check for lost work: it asks that nothing is deleted
RUNS = {"KeepAll()": True, "KeepLast(2) | KeepBest(1, monitor='val_loss')": False}


def train(out: Path, retention: str) -> None:
    """The training under test: it says which step it goes on from and writes its end to ``out/final.json``."""
    import crash_campaign as campaign
    import torch

    import lightning_ckpt_policy
    from lightning_ckpt_policy import CheckpointPolicy, EveryNTrainSteps

    class Told(campaign.Observer):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            print(f"{RESUMED} {trainer.global_step}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    names = {name: getattr(lightning_ckpt_policy, name) for name in lightning_ckpt_policy.__all__}
    policy = CheckpointPolicy(str(out / "ckpt"), EveryNTrainSteps(6), eval(retention, names))
    with tempfile.TemporaryDirectory() as notes:  # not in the folder that the tool watches
        job = campaign.Job(str(out / "ckpt"), Path(notes))
        observer = Told(campaign.Notes(job.notes), 0.0)
        trainer = campaign.train(job, observer, policy, resume=True)
    if not observer.final:  # killed after its end: there was nothing left to train
        print(f"{RESUMED} {trainer.global_step}", flush=True)
    weights = {name: tensor.tolist() for name, tensor in trainer.lightning_module.state_dict().items()}
    moments = [
        [value.tolist() if torch.is_tensor(value) else value for value in state.values()]
        for state in trainer.optimizers[0].state_dict()["state"].values()
    ]
    (out / "final.json").write_text(json.dumps([trainer.global_step, weights, moments]))


def kinds(log: Path) -> list[str]:
    """The kinds of file events in a log of the tool."""
    return [line.split("\t")[1] for line in log.read_text().splitlines()]


def verdicts(work: Path, retention: str, contract: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the tool once; its verdicts by file event and mode."""
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--step-regex", RESUMED + r" (\d+)"]
    command += ["--result-file", "{out}/final.json", "--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL"]
    command += ["--modes", ",".join(MODES), "--max-points", str(arguments.max_points), "--jobs", str(arguments.jobs)]
    if contract:
        # the record is what confirms a checkpoint; its size varies with the time it tells
        command += ["--checkpoint-glob", "{out}/ckpt/*.ckpt.json", "--ckpt-ignore-size"]
    job = [sys.executable, str(Path(__file__).resolve()), "--train", "{out}", "--retention", retention]
    began = time.monotonic()
    work.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [*command, "--work", str(work), "--", *job],
        cwd=work.parent,  # not here, where a module has the tool's name
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    results = [json.loads(path.read_text()) for path in sorted(work.glob("pt_*/result.json"))]
    if not results:
        raise SystemExit(f"ckpt-chaos didn't run:\n{done.stdout[-4000:]}")
    from ckpt_chaos.runner import rejudge

    rows = rejudge(work)
    modes: dict[str, Counter[str]] = {mode: Counter() for mode in MODES}
    for row in rows:
        for mode in MODES:
            if row.label.endswith(f"[{mode}]"):
                modes[mode][row.verdict] += 1
    planned = kinds(work / "reference" / "events.log.rank0")
    return {
        "retention": retention,
        "resume_contract": contract,
        "file_events": len(planned),
        "crash_points": sum(sum(counted.values()) for counted in modes.values()),
        "verdicts": dict(Counter(row.verdict for row in rows)),
        "verdicts_by_mode": {mode: dict(counted) for mode, counted in modes.items()},
        "did_not_crash": sum(not row.crashed for row in rows if not row.label.startswith("no crash")),
        # the tool compares names too, and says "plan drift" of temporaries, whose names are random: its own limit
        "events_of_another_name": sum(row.drift for row in rows),
        "events_of_another_kind": sum(
            kinds(path) != planned[: len(kinds(path))] for path in work.glob("pt_[0-9]*/events.log.rank0")
        ),
        "not_pass": [
            {
                "point": row.label,
                "verdict": row.verdict,
                "newest_complete_step": row.outcome.newest_complete_step,
                "resumed_from_step": row.outcome.resumed_from_step,
                "raised": row.outcome.raised,
            }
            for row in rows
            if row.verdict != "PASS"
        ],
        "exit_status": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-points", type=int, default=60, help="crash points of each run (default: 60)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--work", type=Path, help="a new folder to work in and to keep (default: a temporary one)")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--retention", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train, arguments.retention)
        return 0
    sys.path.append(sys.path.pop(0))  # the tool goes before this script, which has its name
    console = Console()
    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            for number, (retention, contract) in enumerate(RUNS.items()):
                progress.add_task(f"ckpt-chaos, {retention}")
                work = (arguments.work or Path(temporary)).resolve() / str(number)
                runs.append(verdicts(work, retention, contract, arguments))
    table = Table(title="Verdicts of ckpt-chaos")
    for name in ("retention", "mode", "verdicts"):
        table.add_column(name)
    for run in runs:
        for mode, counted in run["verdicts_by_mode"].items():
            table.add_row(run["retention"], mode, ", ".join(f"{n} {verdict}" for verdict, n in counted.items()))
    console.print(table)
    if arguments.out is not None:
        packages = ("ckpt-chaos", "lightning-ckpt-policy", "lightning", "torch", "torchdata", "fsspec")
        results = {
            "command": f"python benchmarks/ckpt_chaos.py --max-points {arguments.max_points} --jobs {arguments.jobs}",
            "versions": {
                "python": platform.python_version(),
                "system": platform.system(),
                **{package: metadata.version(package) for package in packages},
            },
            "runs": runs,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    bad = [point for run in runs for point in run["not_pass"]]
    for point in bad:
        console.print(point, style="red")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
