"""A short kill campaign, and proof that it would tell: each build that is broken on purpose is found out."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.servers import Server

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "crash_campaign.py"
pytestmark = pytest.mark.timeout(240)

# of each file operation that a save, a delete, a start, an end and a sweep are made of
OPERATIONS = {
    "start/attempt/link",
    "save/marker/link",
    "save/marker/unlink",
    "save/payload/write",
    "save/payload/fsync",
    "save/payload/rename",
    "save/payload/folder fsync",
    "save/record/write",
    "save/record/fsync",
    "save/record/rename",
    "save/record/folder fsync",
    "delete/marker/rename",
    "delete/record/unlink",
    "delete/record/folder fsync after unlink",
    "delete/payload/unlink",
    "delete/marker/unlink",
    "sweep/temporary/unlink",
    "sweep/payload/unlink",
    "sweep/marker/unlink",
    "end/attempt/rename",
}


def campaign(folder: Path, *options: str) -> dict[str, Any]:
    """The results of a campaign in which no promise was broken."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--quiet", "--out", str(folder / "out.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    results: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert results["violations"] == []
    return results


def test_case_19_a_short_campaign_loses_nothing(tmp_path: Path) -> None:
    results = campaign(tmp_path, "--kills", "40", "--seed", "5")
    assert results["kills"] >= 40
    assert results["kills_at_a_random_moment"] >= 1
    assert results["overlaps"] >= 1
    assert results["deletes"] >= 20
    assert results["kills_by_moment"].keys() >= OPERATIONS


def test_a_short_campaign_on_two_ranks_loses_nothing(tmp_path: Path) -> None:
    results = campaign(tmp_path, "--devices", "2", "--kills", "8", "--seed", "1", "--parallel", "1")
    assert results["kills_of_ranks"].keys() == {"0", "1", "0 and 1"}
    assert results["kills_at_a_random_moment"] >= 1
    assert results["saves_confirmed"] >= 5


def test_a_short_campaign_against_a_server_that_is_killed_too(
    tmp_path: Path, server_of: Callable[[str], Server]
) -> None:
    name = "nanio"
    server_of(name)  # or it is skipped
    results = campaign(tmp_path, "--server", name, "--kills", "9")
    assert results["store"] == name
    assert results["kills_of_the_server"] >= 1
    assert results["kills_by_moment"].keys() >= {"save/payload/send", "save/payload/complete", "save/record/upload"}


def test_a_plan_follows_from_the_seed_and_reaches_every_moment() -> None:
    campaign = load()
    catalogue = sorted(OPERATIONS)
    plans = [campaign.make_plan(3, number, catalogue) for number in range(80)]
    assert plans == [campaign.make_plan(3, number, catalogue) for number in range(80)]
    assert plans != [campaign.make_plan(4, number, catalogue) for number in range(80)]
    ranks = [campaign.make_plan(3, number, catalogue, devices=3) for number in range(80)]
    assert {cut.ranks for plan in ranks for cut in plan.cuts} == {(0,), (1,), (2,), (0, 1, 2)}
    points = {(cut.where, cut.phase) for plan in plans if not plan.overlap for cut in plan.cuts}
    assert points >= {(where, phase) for where in catalogue for phase in ("before", "during", "after")}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """What the campaign says of each broken build: its exit status and what it names."""
    folder = tmp_path_factory.mktemp("mutants")
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.test_crash_campaign", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found = {}
    for name in MUTANTS:
        status = int((folder / f"{name}.status").read_text())
        path = folder / f"{name}.json"
        assert path.exists(), (folder / f"{name}.log").read_text()[-4000:]
        found[name] = status, " | ".join(each["what"] for each in json.loads(path.read_text())["violations"])
    return found


@pytest.mark.parametrize(
    ("mutant", "told"),
    [
        ("deletes_before_the_commit", "which the rule keeps"),
        ("writes_the_record_first", "has no whole payload"),
        ("writes_under_the_final_name", "isn't whole under its final name|neither record nor marker"),
        ("deletes_the_payload_first", "has no whole payload"),
        ("sweeps_nothing", "left behind"),
        ("sweeps_other_runs", "foreign file"),
        ("keeps_too_much", "the rule keeps"),
        ("confirms_too_early", "was confirmed and is gone|had been captured"),
        ("ignores_a_later_attempt", "a superseded attempt"),
        ("restores_no_random_state", "(final state|last checkpoint) differs"),
    ],
)
def test_a_broken_build_is_found_out(verdicts: dict[str, tuple[int, str]], mutant: str, told: str) -> None:
    status, violations = verdicts[mutant]
    assert status == 1
    assert re.search(told, violations)


# The broken builds. Run in processes of their own, so nothing is put back.


def deletes_before_the_commit(package: Any) -> None:
    commit = package.store.CheckpointStore.commit

    def broken(store: Any, pending: Any, *args: Any, **kwargs: Any) -> Any:
        for record in [record for record in store.records() if record.run_id == pending.run_id][-1:]:
            store.delete(record)
        return commit(store, pending, *args, **kwargs)

    package.store.CheckpointStore.commit = broken


def writes_the_record_first(package: Any) -> None:
    write, payload = package.backends.LocalBackend.write, package.backends.LocalBackend.write_payload

    def broken_payload(backend: Any, name: str, chunks: Any, size: int, *args: Any, **kwargs: Any) -> None:
        backend.held = name, [bytes(chunk) for chunk in chunks], size, args, kwargs

    def broken_write(backend: Any, name: str, *args: Any, **kwargs: Any) -> None:
        write(backend, name, *args, **kwargs)
        held = getattr(backend, "held", None)
        if held is not None and name == held[0] + ".json":
            backend.held = None
            payload(backend, held[0], held[1], held[2], *held[3], **held[4])

    package.backends.LocalBackend.write_payload = broken_payload
    package.backends.LocalBackend.write = broken_write


def writes_under_the_final_name(package: Any) -> None:
    def broken(backend: Any, name: str, chunks: Any, size: int, confirm: Any, tag: str) -> None:
        with backend.fs.open(backend.path(name), "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        confirm()

    package.backends.LocalBackend.write_payload = broken


def deletes_the_payload_first(package: Any) -> None:
    def broken(store: Any, record: Any) -> None:
        for suffix in ("", ".json"):
            store.backend.delete(record.path + suffix)

    package.store.CheckpointStore.delete = broken


def sweeps_nothing(package: Any) -> None:
    package.store.CheckpointStore.sweep = lambda *args: []


def sweeps_other_runs(package: Any) -> None:
    sweep = package.store.CheckpointStore.sweep

    def broken(store: Any, run_id: str, before_attempt: int) -> Any:
        runs = {attempt.run_id for attempt in store.attempts()} - {run_id}
        return [*(name for run in runs for name in sweep(store, run, 1 << 40)), *sweep(store, run_id, before_attempt)]

    package.store.CheckpointStore.sweep = broken


def keeps_too_much(package: Any) -> None:
    plan = package.ledger.retention_rules.plan

    def broken(*args: Any, **kwargs: Any) -> Any:
        return plan(*args, **kwargs)[:-1]

    package.ledger.retention_rules.plan = broken


def confirms_too_early(package: Any) -> None:
    """Says that all but every third save is confirmed without writing it."""
    commit, calls = package.store.CheckpointStore.commit, []

    def broken(store: Any, pending: Any, image: Any, draft: Any, **options: Any) -> Any:
        calls.append(pending)
        if len(calls) % 3 == 1:
            return commit(store, pending, image, draft, **options)
        store.backend.delete(pending.name + ".pending")
        checksum = package.store.Checksum()
        for chunk in image.chunks():
            checksum.update(chunk)
        fields = {**draft, "path": pending.name, "size": image.size, "checksum": str(checksum)}
        return package.record.CheckpointRecord(**fields, sequence=store._next_sequence())

    package.store.CheckpointStore.commit = broken


def ignores_a_later_attempt(package: Any) -> None:
    package.store.CheckpointStore.superseded = lambda *args: False


def restores_no_random_state(package: Any) -> None:
    package.callback.restore_rng_state = lambda state: None


MUTANTS: dict[str, Callable[[Any], None]] = {
    build.__name__: build
    for build in (
        deletes_before_the_commit,
        writes_the_record_first,
        writes_under_the_final_name,
        deletes_the_payload_first,
        sweeps_nothing,
        sweeps_other_runs,
        keeps_too_much,
        confirms_too_early,
        ignores_a_later_attempt,
        restores_no_random_state,
    )
}


# with which each is found out after few kills; else 1
SEEDS = {
    "writes_under_the_final_name": "6",
    "deletes_the_payload_first": "3",
    "ignores_a_later_attempt": "3",
    "restores_no_random_state": "2",
}


def load() -> ModuleType:
    """The campaign's script as a module."""
    spec = importlib.util.spec_from_file_location("crash_campaign", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(folder: Path) -> None:
    """Run the campaign against each broken build, in forks of this process, two at a time."""
    campaign = load()
    import lightning_ckpt_policy.callback as callback
    import lightning_ckpt_policy.ledger as ledger

    package = dataclasses.make_dataclass("Package", ["store", "backends", "ledger", "callback", "record"])(
        sys.modules["lightning_ckpt_policy.store"],
        sys.modules["lightning_ckpt_policy.backends"],
        ledger,
        callback,
        sys.modules["lightning_ckpt_policy.record"],
    )
    # of the build that isn't broken
    known = campaign.scout(str(folder / "scout" / "store"), folder / "scout" / "work", {})
    campaign.scout = lambda *args: known
    running: dict[int, str] = {}
    waiting = list(MUTANTS)
    while waiting or running:
        while waiting and len(running) < 2:
            name = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                status = 9
                try:
                    MUTANTS[name](package)
                    options = ["--kills", "120", "--seed", SEEDS.get(name, "1"), "--parallel", "1", "--quiet"]
                    status = campaign.main([*options, "--out", str(folder / f"{name}.json")])
                finally:
                    os._exit(status)
            running[pid] = name
        pid, ended = os.wait()
        (folder / f"{running.pop(pid)}.status").write_text(str(os.waitstatus_to_exitcode(ended)))


if __name__ == "__main__":
    judge(Path(sys.argv[1]))
