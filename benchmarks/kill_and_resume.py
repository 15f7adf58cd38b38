"""Kill the training job at random moments, restart it with the same command, and compare it with an undisturbed run.

    python benchmarks/kill_and_resume.py --kills 3

Every option that isn't listed by ``--help`` is passed on to ``train.py fit``, e.g. ``--model.layers 1``. Each run has a
folder of its own as working directory. The final checkpoints must agree bit for bit: weights, optimizer, scheduler,
random state and the data loader's position. Exits with 1 if they differ, and with 2 if that could not be found out: the
job failed, or a kill came after its end, or all kills came before its first save.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from lightning_ckpt_policy import CheckpointStore

HERE = Path(__file__).resolve().parent
CHECKPOINTS = "runs/train"  # what train.yaml says
BEGAN = re.compile(r"(?:Starting afresh|Going on after step (\d+)): (\d+) steps in all")
BAR = re.compile(r"Epoch (\d+):.*\| (\d+)/(\d+) \[")
REFRESH = 5  # steps between two lines of the job's progress bar
LATEST_KILL = 0.7  # of all steps
PARTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "weights": lambda checkpoint: checkpoint["state_dict"],
    "optimizer": lambda checkpoint: checkpoint["optimizer_states"],
    "scheduler": lambda checkpoint: checkpoint["lr_schedulers"],
    "random state": lambda checkpoint: checkpoint["lightning_ckpt_policy"]["rng"],
    "loops and data loader": lambda checkpoint: checkpoint["loops"],
    "step and epoch": lambda checkpoint: (checkpoint["global_step"], checkpoint["epoch"]),
}


class Job:
    """One process of the training job, with its output in ``folder/job.log``."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.log = folder / "job.log"
        self.first = 0  # the step it began after
        self.reached = 0  # the step it has reached, as far as its output tells
        self.steps = 0  # the step it will end at; 0 until it trains
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "train.py"), "fit", "--config", str(HERE / "train.yaml"), *options],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its children too
            self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if found := BEGAN.search(line):
                    self.first = self.reached = int(found[1] or 0)
                    self.steps = int(found[2])
                elif found := BAR.search(line):
                    epoch, batches, length = map(int, found.groups())
                    self.reached = max(self.reached, epoch * length + batches)

    def run(self, progress: Progress, task: TaskID, until: float = math.inf) -> bool:
        """Wait until it has reached step ``until``; ``False`` if it has ended before, without an error."""
        while self.process.poll() is None:
            progress.update(task, total=self.steps or None, completed=self.reached)
            if self.steps and self.reached >= until:
                return True
            time.sleep(0.01)
        self._reader.join()
        if self.process.returncode != 0:
            lines = self.log.read_text(errors="replace").splitlines()[-30:]
            raise Inconclusive("\n".join([f"the job ended with status {self.process.returncode}:", *lines]))
        progress.update(task, total=1, completed=1)
        return False


class Inconclusive(Exception):
    """The job failed, or wasn't disturbed as it should be."""


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Where two trees of tensors and plain values differ, bit for bit; NaN equals NaN of the same bits."""
    if type(a) is not type(b):
        yield f"{where}: {type(a).__name__} and {type(b).__name__}"
    elif isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            yield f"{where}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        elif not torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b))):
            yield f"{where}: other values"
    elif isinstance(a, dict):
        if a.keys() != b.keys():
            yield f"{where}: other keys, {sorted(map(str, a.keys() ^ b.keys()))}"
        for key in (key for key in a if key in b):
            yield from differences(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield f"{where}: {len(a)} and {len(b)} items"
        for index, pair in enumerate(zip(a, b, strict=False)):
            yield from differences(*pair, f"{where}[{index}]")
    elif repr(a) != repr(b):
        yield f"{where}: {a!r} and {b!r}"


def leaves(tree: Any) -> int:
    """How many values a tree holds; each element of a tensor counts."""
    if isinstance(tree, torch.Tensor):
        return tree.numel()
    if isinstance(tree, dict):
        return sum(map(leaves, tree.values()))
    return sum(map(leaves, tree)) if isinstance(tree, (list, tuple)) else 1


def final_checkpoint(folder: Path) -> dict[str, Any]:
    store = CheckpointStore(str(folder / CHECKPOINTS))
    record = store.latest()
    if record is None:
        raise Inconclusive(f"no checkpoint in {store.url}: the job must save in its working directory's {CHECKPOINTS}")
    store.verify(record)
    return torch.load(store.path_of(record), map_location="cpu", weights_only=True)


def disturb(folder: Path, options: list[str], shares: list[float], pause: float, progress: Progress) -> Table:
    """Run the job to its end, killed once it has reached each share of its steps; what happened at each start.

    Args:
        folder: The job's working directory.
        options: The job's options.
        shares: When to kill, as shares of all steps.
        pause: Seconds to wait at most before a kill, so that it falls anywhere between two steps.
        progress: Where to show it.
    """
    table = Table(title="Killed and restarted")
    for name in ("start", "began after step", "killed after step"):
        table.add_column(name, justify="right")
    task = progress.add_task("killed and restarted")
    for start, share in enumerate([*shares, None], 1):
        too_late = f"the job ended before kill {start} of {len(shares)}: give it more --steps"
        with Job(folder, options) as job:
            if share is None:
                progress.update(task, description=f"start {start}, to the end")
                job.run(progress, task)
            else:
                progress.update(task, description=f"start {start}, to be killed")
                # its number of steps is known once it trains
                if not job.run(progress, task, until=0) or not job.run(progress, task, until=share * job.steps):
                    raise Inconclusive(too_late)
                time.sleep(pause * (share * job.steps % 1))
        if share is not None and job.process.returncode != -signal.SIGKILL:
            raise Inconclusive(too_late)
        table.add_row(str(start), str(job.first), "not killed" if share is None else str(job.reached))
    progress.update(task, description="killed and restarted")
    if job.first == 0:
        raise Inconclusive("all kills came before the first save, so nothing was resumed: give more --kills or --steps")
    return table


def compare(a: dict[str, Any], b: dict[str, Any]) -> tuple[Table, bool]:
    """A row for each part, and whether all of them agree."""
    table = Table(title="Final checkpoints, undisturbed and killed")
    table.add_column("part")
    table.add_column("values", justify="right")
    table.add_column("bit for bit")
    same = True
    for name, part in PARTS.items():
        found = list(differences(part(a), part(b)))
        same = same and not found
        verdict = "[green]equal" if not found else f"[red]{len(found)} differ[/], first: {found[0]}"
        table.add_row(name, f"{leaves(part(a)):,}", verdict)
    return table, same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="how often the job is killed (default: 3)")
    parser.add_argument("--seed", type=int, help="seed of the moments (default: a new one, which is printed)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: train.yaml's)")
    parser.add_argument("--folder", type=Path, help="a new folder to work in and to keep (default: a temporary one)")
    arguments, options = parser.parse_known_args()
    if arguments.kills < 1:
        parser.error(f"--kills {arguments.kills}: give at least 1")
    if arguments.steps is not None:
        options += ["--trainer.max_steps", str(arguments.steps)]
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    chance = random.Random(seed)
    # one in each of as many equal parts of the run
    kills = [LATEST_KILL * (part + chance.random()) / arguments.kills for part in range(arguments.kills)]
    console = Console()
    console.print(f"--kills {arguments.kills} --seed {seed}", highlight=False)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with tempfile.TemporaryDirectory() as temporary:
        folders = [(arguments.folder or Path(temporary)).absolute() / name for name in ("undisturbed", "killed")]
        for folder in folders:
            folder.mkdir(parents=True)
        try:
            with Progress(*columns, console=console) as progress:
                task = progress.add_task("undisturbed")
                with Job(folders[0], options) as job:
                    job.run(progress, task, until=0)
                    began = time.monotonic()
                    job.run(progress, task)
                if job.steps == 0:
                    raise Inconclusive("the job had nothing to train")
                pause = REFRESH * (time.monotonic() - began) / job.steps
                starts = disturb(folders[1], options, kills, pause, progress)
            console.print(starts)
            table, same = compare(*map(final_checkpoint, folders))
        except Inconclusive as error:
            console.print(f"kill_and_resume: {error}", style="red", markup=False, highlight=False)
            return 2
        console.print(table)
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
