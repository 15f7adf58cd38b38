"""Try a policy before it is used: what it saves, wastes, keeps and costs, and which interval wastes least.

    python benchmarks/plan.py                                   # the recipes, the plot, the adaptive interval's test
    python benchmarks/plan.py --config my.yaml --step 0.8 --checkpoint 12GB --held 1.5 --confirm 40 --mtbf 12h

The first simulates each recipe on a job of its kind, draws how much of the time each interval wastes, and compares
AdaptiveInterval with the best fixed interval over many failures; it writes benchmarks/results/plan.json and plan.png.
The second simulates the CheckpointPolicy of a LightningCLI configuration on a job of yours.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonargparse
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_ckpt_policy._units import byte_size, bytes_in, duration, seconds_in
from lightning_ckpt_policy.interval import Measured
from lightning_ckpt_policy.retention import KeepLast, Retention, as_retention
from lightning_ckpt_policy.simulate import DAY, Job, Outcome, price, simulate, wasted_shares
from lightning_ckpt_policy.triggers import AdaptiveInterval, Trigger, as_trigger

HERE = Path(__file__).parent
HOUR = 3600.0
GB = 10**9


@dataclasses.dataclass(frozen=True)
class Case:
    """A job, for how long it trains, and the price of an hour of its machines."""

    job: Job
    duration: float
    per_compute_hour: float


CASES = {
    "laptop": Case(
        Job(
            step_seconds=0.3,
            checkpoint_bytes=GB // 2,
            held_seconds=0.3,
            confirm_seconds=2.0,
            mtbf_seconds=3 * DAY,
            restart_seconds=300.0,
            validation_steps=2000,
        ),
        3 * DAY,
        0.05,
    ),
    "gpu_node_nfs": Case(
        Job(
            step_seconds=0.5,
            checkpoint_bytes=8 * GB,
            held_seconds=2.0,
            slowdown_seconds=1.0,
            confirm_seconds=40.0,
            mtbf_seconds=20 * DAY,
            restart_seconds=900.0,
            validation_steps=7200,
        ),
        14 * DAY,
        20.0,
    ),
    "spot_gcs": Case(
        Job(
            step_seconds=0.5,
            checkpoint_bytes=4 * GB,
            held_seconds=1.0,
            slowdown_seconds=1.0,
            confirm_seconds=30.0,
            mtbf_seconds=4 * HOUR,
            restart_seconds=300.0,
            validation_steps=7200,
        ),
        7 * DAY,
        3.0,
    ),
    "month_512_gpus": Case(
        Job(
            step_seconds=8.0,
            checkpoint_bytes=1000 * GB,
            held_seconds=5.0,
            slowdown_seconds=5.0,
            confirm_seconds=240.0,
            mtbf_seconds=8 * HOUR,
            restart_seconds=900.0,
            validation_steps=500,
        ),
        30 * DAY,
        512 * 2.5,
    ),
}
PER_GB_MONTH = 0.02
RATIOS = (10, 30, 100, 300, 1_000, 3_000, 10_000)


DEFAULTS = {  # of CheckpointPolicy
    "trigger": {"class_path": "lightning_ckpt_policy.EveryNEpochs"},
    "retention": {"class_path": "lightning_ckpt_policy.KeepLast", "init_args": {"n": 2}},
}


class Rules:
    def __init__(self, trigger: Trigger | list[Trigger], retention: Retention | list[Retention]) -> None:
        self.trigger = as_trigger(trigger)
        self.retention = as_retention(retention)


def rules_of(config: Path) -> Rules:
    """The trigger and the retention of the first CheckpointPolicy in a LightningCLI configuration."""
    read = yaml.safe_load(config.read_text()) or {}
    callbacks = (read.get("trainer") or {}).get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    specs = [{"class_path": callback} if isinstance(callback, str) else callback for callback in callbacks]
    found = [spec for spec in specs if str(spec.get("class_path", "")).rpartition(".")[2] == "CheckpointPolicy"]
    if not found:
        raise ValueError(f"--config {config}: no CheckpointPolicy is among trainer.callbacks; name a file that has one")
    given = found[0].get("init_args") or {}
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Rules, "rules")
    parsed = parser.parse_object({"rules": {name: given.get(name) or default for name, default in DEFAULTS.items()}})
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before 4.49
    rules: Rules = instantiate(parsed).rules
    return rules


def loss(step: int) -> dict[str, float]:
    """A metric that falls, unevenly: it only decides which checkpoints are the best."""
    return {"val_loss": 2.0 + 8.0 * (step + 1) ** -0.3 + 0.05 * math.sin(step * 12.9898)}


def show(console: Console, title: str, outcomes: dict[str, tuple[Outcome, float]]) -> None:
    table = Table(title=title)
    for column in ("", "saves a day", "held", "lost a failure", "failures", "wasted", "store, mean", "peak", "cost"):
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    for name, (outcome, per_hour) in outcomes.items():
        cost = price(outcome, per_compute_hour=per_hour, per_gb_month=PER_GB_MONTH)
        table.add_row(
            name,
            f"{outcome.saves_per_day:.1f}",
            f"{outcome.held_seconds / outcome.wall_seconds:.2%}",
            f"{outcome.lost_per_failure / 60:.1f} min",
            str(outcome.failures),
            f"{outcome.wasted_share:.2%}",
            f"{outcome.mean_bytes / GB:,.1f} GB",
            f"{outcome.peak_bytes / GB:,.1f} GB",
            f"{cost.wasted:,.0f} + {cost.storage:,.2f}",
        )
    console.print(table)
    console.print("Cost: compute that was wasted + storage, over the whole training.", style="dim")


def figures(outcome: Outcome, per_hour: float) -> dict[str, Any]:
    cost = price(outcome, per_compute_hour=per_hour, per_gb_month=PER_GB_MONTH)
    values = {k: v for k, v in dataclasses.asdict(outcome).items() if k != "records"}
    return {
        **{name: round(value, 1) for name, value in values.items()},
        "saves_per_day": round(outcome.saves_per_day, 2),
        "lost_per_failure_seconds": round(outcome.lost_per_failure, 1),
        "wasted_share": round(outcome.wasted_share, 5),
        "kept_steps": [record.step for record in outcome.records],
        "price_of_wasted_compute": round(cost.wasted, 2),
        "price_of_storage": round(cost.storage, 2),
    }


def adaptive_against_fixed(console: Console, failures: int) -> list[dict[str, Any]]:
    """Over many failures: what the adaptive interval wastes beside the best fixed one, found by search."""
    table = Table(title=f"Wasted time over {failures:,} failures")
    for column in ("MTBF / cost", "best fixed", "its interval", "adaptive, MTBF given", "learned", "saves"):
        table.add_column(column, justify="right", overflow="fold")
    rows = []
    cost = 10.0
    for ratio in RATIOS:
        job = Job(
            step_seconds=cost / 50,
            checkpoint_bytes=1,
            held_seconds=cost * 0.8,
            slowdown_seconds=cost * 0.2,
            confirm_seconds=cost,
            mtbf_seconds=cost * ratio,
        )
        uptimes = list(itertools.islice(job.uptimes(seed=ratio), failures))
        settings = {"max_overhead": 1.0, "min": 0.1, "max": 1e9}
        given = AdaptiveInterval(mtbf=job.mtbf_seconds, **settings)  # type: ignore[arg-type]
        learned = AdaptiveInterval(**settings)  # type: ignore[arg-type]
        around = given.interval(Measured(cost=job.cost))
        intervals = [float(interval) for interval in np.geomspace(around / 30, around * 30, 2001)]
        shares = wasted_shares(job, intervals, uptimes)
        best = min(shares)
        runs = [simulate(job, trigger, KeepLast(1), uptimes=uptimes) for trigger in (given, learned)]
        row = {
            "mtbf_over_cost": ratio,
            "failures": runs[0].failures,
            "saves": runs[0].saves,
            "best_fixed_share": round(best, 6),
            "best_fixed_interval_over_cost": round(intervals[shares.index(best)] / cost, 2),
            "adaptive_interval_over_cost": round(around / cost, 2),
            "adaptive_given_share": round(runs[0].wasted_share, 6),
            "adaptive_learned_share": round(runs[1].wasted_share, 6),
            "given_over_best": round(runs[0].wasted_share / best, 4),
            "learned_over_best": round(runs[1].wasted_share / best, 4),
        }
        rows.append(row)
        table.add_row(
            f"{ratio:,}",
            f"{best:.3%}",
            f"{row['best_fixed_interval_over_cost']:g} costs",
            f"{runs[0].wasted_share:.3%} ({row['given_over_best'] - 1:+.1%})",
            f"{runs[1].wasted_share:.3%} ({row['learned_over_best'] - 1:+.1%})",
            f"{runs[0].saves:,}",
        )
    console.print(table)
    return rows


def plot(path: Path, job: Job, title: str) -> dict[str, float]:
    """Draw the wasted time against the interval, with the optimum and the adaptive choice marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    uptimes = list(itertools.islice(job.uptimes(seed=1), 50_000))
    intervals = [float(interval) for interval in np.geomspace(max(60.0, job.cost.confirm), 4 * HOUR, 400)]
    shares = wasted_shares(job, intervals, uptimes)
    best = intervals[int(np.argmin(shares))]
    adaptive = AdaptiveInterval(mtbf=job.mtbf_seconds, max_overhead=1.0).interval(Measured(cost=job.cost))
    saving = [job.cost.overhead / interval for interval in intervals]
    restarting = job.restart_seconds / job.mtbf_seconds

    share = wasted_shares(job, [adaptive], uptimes)[0]
    figure, axes = plt.subplots(figsize=(7.2, 4.0), dpi=110, layout="constrained")
    axes.plot(intervals, shares, color="#1b4f8f", linewidth=2.2, label="wasted, all of it")
    axes.plot(intervals, saving, color="#8a8a8a", linewidth=1.4, linestyle="--", label="of that: saves")
    axes.axhline(restarting, color="#8a8a8a", linewidth=1.4, linestyle=":", label="of that: restarts")
    at_best = f"optimum: {best / 60:.1f} min, {min(shares):.2%}"
    axes.plot([best], [min(shares)], "o", color="#c0392b", markersize=11, label=at_best)
    at_adaptive = f"AdaptiveInterval: {adaptive / 60:.1f} min, {share:.2%}"
    axes.plot([adaptive], [share], "D", color="#f1c40f", markersize=5, label=at_adaptive)
    axes.legend(loc="upper center", frameon=False)
    axes.set(title=title, xlabel="time from one save to the next", ylabel="wasted time", xscale="log", ylim=(0, 0.25))
    axes.set_xticks([60 * minutes for minutes in (5, 10, 20, 40, 60, 120, 240)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{s / 60:.0f} min" if s < HOUR else f"{s / HOUR:.0f} h"))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return {
        "optimum_seconds": round(best, 1),
        "optimum_share": round(min(shares), 5),
        "adaptive_seconds": round(adaptive, 1),
        "adaptive_share": round(share, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a LightningCLI configuration with a CheckpointPolicy")
    parser.add_argument("--step", default="1s", help="time of an optimizer step")
    parser.add_argument("--checkpoint", default="10GB", help="size of a checkpoint")
    parser.add_argument("--held", default="1s", help="how long a save holds the loop")
    parser.add_argument("--slowdown", help="how much a save slows the loop down besides")
    parser.add_argument("--confirm", help="from the capture to the confirmation")
    parser.add_argument("--mtbf", default="1d", help="mean time between failures of the whole job")
    parser.add_argument("--restart", default="10m", help="from a failure until training goes on")
    parser.add_argument("--epoch-steps", type=int, help="optimizer steps per epoch")
    parser.add_argument("--validation-steps", type=int, help="optimizer steps from one validation to the next")
    parser.add_argument("--duration", default="30d", help="how long to train")
    parser.add_argument("--compute-price", type=float, default=0.0, help="of an hour of all machines")
    parser.add_argument("--failures", type=int, default=10_000, help="for the test of the adaptive interval")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of plan.json and plan.png")
    args = parser.parse_args()
    console = Console()

    def seconds(field: str) -> float:
        value = getattr(args, field)
        if value in (None, "0") and field in ("held", "slowdown", "confirm", "restart"):
            return 0.0
        return seconds_in(duration(f"--{field}", value, f"--{field} 30s"))

    if args.config is not None:
        job = Job(
            step_seconds=seconds("step"),
            checkpoint_bytes=bytes_in(byte_size("--checkpoint", args.checkpoint, "--checkpoint 10GB")),
            held_seconds=seconds("held"),
            slowdown_seconds=seconds("slowdown"),
            confirm_seconds=seconds("confirm"),
            mtbf_seconds=seconds("mtbf"),
            restart_seconds=seconds("restart"),
            epoch_steps=args.epoch_steps,
            validation_steps=args.validation_steps,
        )
        rules = rules_of(args.config)
        outcome = simulate(job, rules.trigger, rules.retention, duration=seconds("duration"), metrics=loss)
        show(console, str(args.config), {args.config.stem: (outcome, args.compute_price)})
        if not outcome.saves:
            hint = "give --epoch-steps or --validation-steps if it counts those"
            console.print(
                f"Nothing was saved: {rules.trigger!r} was never due; {hint}.", highlight=False, soft_wrap=True
            )
        return

    started = time.perf_counter()
    outcomes = {}
    for name, case in CASES.items():
        rules = rules_of(HERE / "recipes" / f"{name}.yaml")
        outcome = simulate(case.job, rules.trigger, rules.retention, duration=case.duration, metrics=loss)
        outcomes[name] = (outcome, case.per_compute_hour)
    show(console, "The recipes, each on a job of its kind", outcomes)
    big = CASES["month_512_gpus"].job
    title = "512 GPUs, a save costs 10 s, a failure every 8 h, a restart takes 15 min"
    plotted = plot(args.out / "plan.png", big, title)
    rows = adaptive_against_fixed(console, args.failures)
    results = {
        "command": f"python benchmarks/plan.py --failures {args.failures}",
        "versions": {"python": platform.python_version(), "numpy": metadata.version("numpy")},
        "recipes": {
            name: {
                "job": dataclasses.asdict(CASES[name].job),
                "duration_seconds": CASES[name].duration,
                **figures(*outcomes[name]),
            }
            for name in CASES
        },
        "plot": plotted,
        "adaptive": rows,
    }
    (args.out / "plan.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"Written to {args.out} after {time.perf_counter() - started:.0f} s.")
    worst = max(max(row["given_over_best"], row["learned_over_best"]) for row in rows)
    if worst > 1.05:
        sys.exit(f"the adaptive interval wastes {worst - 1:.1%} more than the best fixed one; at most 5 % are allowed")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, jsonargparse.ArgumentError) as error:
        sys.exit(str(error))
