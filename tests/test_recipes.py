"""The recipes: each YAML file gives the policy that it describes, and comes back the same."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_ckpt_policy import (
    AdaptiveInterval,
    AfterValidation,
    CheckpointPolicy,
    CheckpointStore,
    EveryInterval,
    EveryNTrainSteps,
    KeepBest,
    KeepEveryInterval,
    KeepEveryNSteps,
    KeepLast,
    KeepSteps,
    KeepUnder,
    KeepWithin,
    OnImprovement,
    OnSignal,
    PhaseSchedule,
)
from tests.models import Net
from tests.test_cli import Data

ROOT = Path(__file__).parents[1]
BEST = KeepBest(3, "val_loss")
PREEMPTED, NOW = OnSignal("SIGTERM", stop=True), OnSignal("SIGUSR1")
RECIPES: dict[str, tuple[Any, Any]] = {
    "laptop": (
        EveryInterval(minutes=10) | OnImprovement("val_loss"),
        KeepUnder("20GB", of=KeepLast(2) | BEST),
    ),
    "gpu_node_nfs": (
        EveryInterval(minutes=30) | AfterValidation() | PREEMPTED | NOW,
        KeepUnder("500GB", of=KeepLast(3) | BEST | KeepEveryInterval(hours=24, last=14)),
    ),
    "spot_gcs": (
        AdaptiveInterval(min="1m", max="30m") | AfterValidation() | PREEMPTED,
        KeepLast(2) | KeepBest(2, "val_loss") | KeepWithin(hours=2),
    ),
    "month_512_gpus": (
        PhaseSchedule([(2000, EveryNTrainSteps(100)), (None, AdaptiveInterval(min="5m", max="2h"))])
        | EveryNTrainSteps(1000)
        | PREEMPTED
        | NOW,
        KeepUnder(
            "20TB",
            of=KeepLast(2)
            | KeepEveryNSteps(1_000, last=5)
            | KeepEveryNSteps(10_000, last=10)
            | BEST
            | KeepSteps([50_000, 100_000, 200_000]),
        ),
    ),
}


def file_of(name: str) -> Path:
    return ROOT / "benchmarks" / "recipes" / f"{name}.yaml"


def policy_of(config: Path) -> CheckpointPolicy:
    args = ["--config", str(config), "--seed_everything=1", "--trainer.logger=false", "--trainer.accelerator=cpu"]
    cli = LightningCLI(Net, Data, args=args, run=False, save_config_callback=None)
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, CheckpointPolicy))


def printed(config: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        LightningCLI(Net, Data, args=["--config", str(config), "--print_config"], run=False)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_every_recipe_is_tested() -> None:
    assert sorted(RECIPES) == sorted(path.stem for path in file_of("").parent.glob("*.yaml"))


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trigger, retention = RECIPES[name]
    policy = policy_of(file_of(name))
    assert policy.trigger == trigger
    assert policy.retention == retention
    # the printed configuration shows the rules, and is the same policy and the same text when it is read again
    shown = printed(file_of(name), capsys)
    given = yaml.safe_load(file_of(name).read_text())["trainer"]["callbacks"][0]["init_args"]
    there = yaml.safe_load(shown)["trainer"]["callbacks"][0]["init_args"]
    assert contains(there, given)
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    policy = policy_of(again)
    assert (policy.trigger, policy.retention) == (trigger, retention)
    assert printed(again, capsys) == shown


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_in_a_fit_that_is_resumed(name: str, tmp_path: Path) -> None:
    configuration = yaml.safe_load(file_of(name).read_text())
    configuration["trainer"]["callbacks"][0]["init_args"]["dirpath"] = str(tmp_path / "ckpt")
    options = {"accelerator": "cpu", "logger": False, "default_root_dir": str(tmp_path), "enable_progress_bar": False}
    configuration["trainer"].update(options)
    before = signal.getsignal(signal.SIGTERM)
    for epochs in (1, 2):
        configuration["trainer"]["max_epochs"] = epochs
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(configuration))
        args = ["fit", "--config", str(config), "--seed_everything=1", "--ckpt_path=last"]
        LightningCLI(Net, Data, args=args, save_config_callback=None)
        newest = CheckpointStore(str(tmp_path / "ckpt")).latest()
        assert newest is not None
        assert newest.step == 10 * epochs
    assert len({record.run_id for record in CheckpointStore(str(tmp_path / "ckpt")).records()}) == 1
    assert signal.getsignal(signal.SIGTERM) == before


def contains(whole: Any, part: Any) -> bool:
    """Whether every value of ``part`` is in ``whole``, which may have defaults beside it."""
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(contains, whole, part))
    return bool(whole == part)


def test_the_readme_shows_the_recipes_as_they_are() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in RECIPES:
        shown = readme.split(f"<!-- recipe: {name} -->\n```yaml\n")[1].split("```")[0]
        assert shown == "".join(line for line in file_of(name).open() if not line.startswith("#"))


def test_the_readme_s_simulation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    code = readme.split("### Plan it")[1].split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert "Price(wasted=" in capsys.readouterr().out
