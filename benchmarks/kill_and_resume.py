"""Kill the training job at random moments, restart it with the same command, and compare it with an undisturbed run.

    python benchmarks/kill_and_resume.py --kills 3

Every option that isn't listed by ``--help`` is passed on to ``train.py fit``, e.g. ``--model.layers 1``. Each run has a
folder of its own as working directory. The final checkpoints must agree bit for bit: weights, optimizer, scheduler,
random state and the data loader's position. Exits with 1 if they differ, and with 2 if that could not be found out: the
job failed, or a kill came after its end, or all kills came before its first save.
"""

from __future__ import annotations

import argparse
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
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightning_ckpt_policy import CheckpointStore

HERE = Path(__file__).resolve().parent
CHECKPOINTS = "runs/train"  # what train.yaml says
BEGAN = re.compile(r"(?:Starting afresh|Going on after step (\d+)): (\d+) steps in all")
LATEST_KILL = 0.85  # of all steps: a kill is timed by the undisturbed run's speed, and must not come after the end
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
        self.step = 0  # where it began to train
        self.steps = 0  # where it will end
        self.began = threading.Event()  # it trains, or has ended
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

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("a") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if found := BEGAN.search(line):
                    self.step, self.steps = int(found[1] or 0), int(found[2])
                    self.began.set()
        self.began.set()

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit status, or ``None`` after ``timeout`` seconds."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join()
        return status

    def kill(self) -> None:
        """SIGKILL to the process and its children."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()


class Inconclusive(Exception):
    """The job failed, or wasn't disturbed as it should be."""


def run_to_end(job: Job) -> None:
    if job.wait() != 0:
        raise Inconclusive(f"the job ended with status {job.process.returncode}; its output ends with\n{tail(job.log)}")


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


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


def disturb(folder: Path, options: list[str], kills: list[float], seconds_per_step: float, progress: Progress) -> Table:
    """Run the job to its end with a kill at each share of its steps; what happened at each start."""
    table = Table(title="Killed and restarted")
    for name in ("start", "began after step", "killed after"):
        table.add_column(name, justify="right")
    task = progress.add_task("killed and restarted", total=len(kills) + 1)
    for number, share in enumerate(kills, 1):
        job = Job(folder, options)
        try:
            job.began.wait()
            if job.steps == 0:
                run_to_end(job)
            seconds = max(0.0, (share * job.steps - job.step) * seconds_per_step)
            progress.update(task, description=f"start {number}: SIGKILL in {seconds:.1f} s")
            if job.wait(seconds) is not None:
                run_to_end(job)
                raise Inconclusive(f"the job ended before kill {number} of {len(kills)}: give it more --steps")
        finally:
            if job.process.poll() is None:
                job.kill()
        table.add_row(str(number), str(job.step), f"{seconds:.1f} s")
        progress.advance(task)
    progress.update(task, description=f"start {len(kills) + 1}: to the end")
    job = Job(folder, options)
    try:
        run_to_end(job)
    finally:
        if job.process.poll() is None:
            job.kill()
    if job.step == 0:
        raise Inconclusive("all kills came before the first save, so nothing was resumed: give more --kills or --steps")
    table.add_row(str(len(kills) + 1), str(job.step), "not killed")
    progress.update(task, advance=1, description="killed and restarted")
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
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory() as temporary:
        folders = [(arguments.folder or Path(temporary)).absolute() / name for name in ("undisturbed", "killed")]
        for folder in folders:
            folder.mkdir(parents=True)
        try:
            with Progress(*columns, console=console) as progress:
                task = progress.add_task("undisturbed", total=None)
                job = Job(folders[0], options)
                try:
                    job.began.wait()
                    began = time.monotonic()
                    run_to_end(job)
                    seconds = time.monotonic() - began
                finally:
                    if job.process.poll() is None:
                        job.kill()
                progress.update(task, total=1, completed=1)
                if job.steps == 0:
                    raise Inconclusive(f"the job didn't train; its output ends with\n{tail(job.log)}")
                starts = disturb(folders[1], options, kills, seconds / job.steps, progress)
            console.print(starts)
            table, same = compare(*map(final_checkpoint, folders))
        except Inconclusive as error:
            console.print(f"kill_and_resume: {error}", style="red", markup=False, highlight=False)
            return 2
        console.print(table)
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
