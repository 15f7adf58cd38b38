"""Start, wait for and kill the training of ``tests.integration.job``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parents[2]


def start(
    root: Path, *options: str, module: str = "tests.integration.job", **environment: str
) -> subprocess.Popen[str]:
    """The job in a process group of its own."""
    root.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", module, "--root", str(root), *options],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the whole process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(30)


def finish(process: subprocess.Popen[str], timeout: float = 100) -> tuple[int, str]:
    """Exit status and output; a process that hangs is killed and fails the test."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise AssertionError(f"the job hung:\n{output[-4000:]}") from None
    return process.returncode, output


def run(root: Path, *options: str, expect: int | None = 0, timeout: float = 100, **environment: str) -> str:
    """Run the job to its end."""
    status, output = finish(start(root, *options, **environment), timeout)
    assert expect is None or status == expect, f"exit status {status}:\n{output[-6000:]}"
    return output


def final(root: Path, rank: int = 0) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(root / f"final-{rank}.pt", weights_only=False)
    return state
