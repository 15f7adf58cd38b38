"""LightningCLI YAML gives the same policy as Python (case 32), and ``--ckpt_path last`` resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI

from lightning_ckpt_policy import (
    AfterValidation,
    AtSteps,
    CheckpointPolicy,
    EveryInterval,
    EveryNTrainSteps,
    KeepBest,
    KeepLast,
    KeepSteps,
)
from tests.models import Net, loader

pytestmark = pytest.mark.core


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader("plain")


def rule(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_ckpt_policy.{name}", "init_args": arguments}


def config(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "max_steps": 12,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
            "callbacks": [rule("CheckpointPolicy", dirpath=str(tmp_path / "ckpt"), **options)],
        },
    }


def cli(tmp_path: Path, configuration: dict[str, Any], *args: str, run: bool = True) -> LightningCLI:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(configuration))
    argv = [*(["fit"] if run else []), "--config", str(file), *args]
    return LightningCLI(Net, Data, args=argv, run=run, save_config_callback=None)


def policy_of(cli: LightningCLI) -> CheckpointPolicy:
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, CheckpointPolicy))


def test_case_32_nested_rules_times_and_metric_names(tmp_path: Path) -> None:
    options = {
        "trigger": [
            rule("EveryNTrainSteps", n=1000),
            rule("EveryInterval", minutes=30),
            rule("triggers.AllOf", triggers=[rule("AtSteps", steps=[5, 6]), rule("AfterValidation")]),
        ],
        "retention": [
            rule("KeepLast", n=3),
            rule("KeepBest", n=2, monitor="val/loss", mode="min"),
            rule("KeepSteps", steps=[10, 50]),
        ],
        "storage_options": {"auto_mkdir": False},
    }
    built = policy_of(cli(tmp_path, config(tmp_path, **options), run=False))
    assert built.trigger == EveryNTrainSteps(1000) | EveryInterval(minutes=30) | (AtSteps([5, 6]) & AfterValidation())
    assert built.retention == KeepLast(3) | KeepBest(2, "val/loss") | KeepSteps([10, 50])
    assert built.dirpath == str(tmp_path / "ckpt")


def test_case_32_a_metric_with_a_slash_makes_no_folder(tmp_path: Path) -> None:
    options = {
        "trigger": rule("AfterValidation"),
        "retention": rule("KeepBest", n=1, monitor="val/step", mode="max"),
    }
    cli(tmp_path, config(tmp_path, **options), "--trainer.max_epochs=2", "--trainer.max_steps=-1")
    assert sorted(p.name for p in (tmp_path / "ckpt").glob("*.ckpt")) == ["step-0000000020.ckpt"]
    assert not (tmp_path / "ckpt" / "val").exists()


def test_ckpt_path_last_starts_and_restarts(tmp_path: Path) -> None:
    options = {"trigger": rule("EveryNTrainSteps", n=4), "retention": rule("KeepLast", n=1)}
    for max_steps in ("8", "16"):
        done = cli(tmp_path, config(tmp_path, **options), f"--trainer.max_steps={max_steps}", "--ckpt_path=last")
        assert policy_of(done).last_model_path.endswith(f"{int(max_steps):010d}.ckpt")
    assert [record.attempt for record in policy_of(done).store.records()] == [2]


def test_print_config_shows_the_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"trigger": [rule("EveryNTrainSteps", n=7)], "retention": rule("KeepLast", n=3)}
    with pytest.raises(SystemExit) as ended:
        cli(tmp_path, config(tmp_path, **options), "--print_config")
    assert ended.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    init = shown["trainer"]["callbacks"][0]["init_args"]
    assert init["trigger"][0] == rule("EveryNTrainSteps", n=7)
    assert init["retention"] == rule("KeepLast", n=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trigger": rule("EveryNTrainSteps", n=0)}, "n=0"),
        ({"trigger": rule("EveryInterval")}, "EveryInterval"),
        ({"retention": rule("KeepBest", n=1, monitor="a", mode="up")}, "'up'"),
    ],
)
def test_bad_values_are_named(
    tmp_path: Path, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)) as error:
        cli(tmp_path, config(tmp_path, **options), run=False)
    assert message in capsys.readouterr().err + str(error.value)
