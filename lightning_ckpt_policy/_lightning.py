"""Lightning's private names that have no public counterpart, each used here and nowhere else.

Lightning 2.5 to 2.6.6 have them all. A name that a later version takes away or changes is named by
``tests/test_lightning_internals.py``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose


def intercept_ckpt_path(select: Callable[..., tuple[bool, Any]]) -> None:
    """Let ``select(trainer, state_fn, ckpt_path)`` answer what ``ckpt_path`` means, before Lightning does.

    Lightning asks only ``ModelCheckpoint`` where ``"last"`` is, and offers no hook. The wrap is installed once per
    process; ``select`` returns whether it has an answer, and the answer.
    """
    original = _CheckpointConnector._parse_ckpt_path
    if getattr(original, "_ckpt_policy_wrap", False):
        return

    @functools.wraps(original)
    def parse(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        answered, path = select(self.trainer, state_fn, ckpt_path)
        return path if answered else original(self, state_fn, ckpt_path, *args, **kwargs)

    parse._ckpt_policy_wrap = True  # type: ignore[attr-defined]
    _CheckpointConnector._parse_ckpt_path = parse  # type: ignore[method-assign]


# Lightning 2.5 always unpickled everything; later versions leave it to torch.load
_TAKES_WEIGHTS_ONLY = "weights_only" in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters


def default_weights_only() -> bool | None:
    """What ``weights_only=None`` means to the installed Lightning."""
    return None if _TAKES_WEIGHTS_ONLY else False


def load_plain(path: str, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Load as stock Lightning does."""
    options = {"weights_only": weights_only} if _TAKES_WEIGHTS_ONLY else {}
    loaded: dict[str, Any] = TorchCheckpointIO().load_checkpoint(path, map_location, **options)
    return loaded


def callbacks(trainer: Any) -> list[Callback]:
    """The Trainer's callbacks (public, but set where a type checker doesn't see it, as the two below)."""
    return list(trainer.callbacks)


def fast_dev_run(trainer: Any) -> bool:
    """Whether this is a trial of a few batches, in which nothing is saved."""
    return bool(trainer.fast_dev_run)


def reloads_dataloaders(trainer: Any) -> bool:
    """Whether dataloaders are made anew every few epochs."""
    return bool(trainer.reload_dataloaders_every_n_epochs)


def gradients_pending(trainer: Trainer) -> bool:
    """Whether the current batch ends inside an accumulation window (automatic optimization)."""
    return bool(trainer.fit_loop._should_accumulate())


def is_last_batch(trainer: Trainer) -> bool:
    """Whether the current batch is its epoch's last."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def validation_is_due(trainer: Trainer) -> bool:
    """Whether a validation runs after the current batch."""
    loop: Any = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def may_stop(trainer: Trainer, epoch_ends: bool) -> bool:
    """Whether ``trainer.should_stop`` would end the fit at the end of the current batch, or of its epoch."""
    loop: Any = trainer.fit_loop
    epochs = loop.epoch_progress.current.processed + epoch_ends
    return bool(
        (not loop.min_epochs or epochs >= loop.min_epochs)
        and (not loop.min_steps or loop.epoch_loop.global_step >= loop.min_steps)
    )


def train_loaders(trainer: Trainer) -> list[Any]:
    """The train dataloaders as the loop uses them, flattened."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def start_samplers_at(trainer: Trainer, epoch: int) -> Callable[[], None]:
    """Let the samplers of dataloaders that are set up from now on begin at ``epoch``.

    Returns:
        A function that ends this.
    """
    strategy: Any = trainer.strategy
    process = strategy.process_dataloader

    def process_at_epoch(loader: Any) -> Any:
        loader = process(loader)
        for owner in (loader, getattr(loader, "batch_sampler", None)):
            set_epoch = getattr(getattr(owner, "sampler", None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        return loader

    def release() -> None:
        strategy.__dict__.pop("process_dataloader", None)

    strategy.process_dataloader = process_at_epoch
    return release


def after_train_start(trainer: Trainer, function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` once all ``on_train_start`` hooks have run, the module's own and the strategy's included.

    Returns:
        A function that calls this off.
    """
    strategy: Any = trainer.strategy
    original = strategy.on_train_start

    def on_train_start() -> None:
        release()
        original()
        function()

    def release() -> None:
        strategy.__dict__.pop("on_train_start", None)

    strategy.on_train_start = on_train_start
    return release


def without_sigterm_notifier(trainer: Any, handler: Any) -> list[Any]:
    """The handlers that make up a signal's handler, without Lightning's that ends the fit at the next batch.

    With several ranks that one also broadcasts, in the middle of whatever they are doing.
    """
    handlers = handler.signal_handlers if isinstance(handler, _HandlersCompose) else [handler]
    return [one for one in handlers if one != trainer._signal_connector._sigterm_notifier_fn]


def group_timeout(trainer: Any) -> float:
    """Seconds after which a collective of several ranks fails."""
    timeout = getattr(trainer.strategy, "_timeout", None)
    return 1800.0 if timeout is None else float(timeout.total_seconds())  # torch's own, for gloo


def stop_as_after_sigterm(trainer: Any) -> None:
    """Let the fit end with a ``SIGTERMException`` once the current batch is over."""
    trainer._signal_connector.received_sigterm = True


def validation_ends(trainer: Any) -> bool:
    """Whether the current batch of the validation is its last."""
    return bool(trainer.fit_loop.epoch_loop.val_loop.batch_progress.is_last_batch)


def is_between_batches(trainer: Any) -> bool:
    """Whether an epoch has been begun, isn't over, and no batch of it is on its way."""
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    return 0 < current.ready == current.completed and not is_last_batch(trainer)


def unstep_logger(checkpoint: dict[str, Any]) -> None:
    """Take the step back that loggers see, in a checkpoint dumped after the batch whose validation is done.

    A resume finds that validation done and counts the step once more.
    """
    checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def restart_validation(checkpoint: dict[str, Any]) -> None:
    """Let a resume from a checkpoint that was dumped inside a validation run all of that validation."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    before = progress["total"]["completed"] - progress["current"]["completed"]
    for counts, done in ((progress["total"], before), (progress["current"], 0)):
        # Lightning takes a batch that was begun and not finished for the sign of it
        counts.update(ready=done + 1, started=done + 1, processed=done, completed=done)
    progress["is_last_batch"] = False


def forget_interrupted_batch(trainer: Any) -> None:
    """Take back the batch that :func:`restart_validation` counts as begun, once a resume has seen it."""
    total = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
    total.ready = total.started = total.completed


def logged_step(trainer: Trainer) -> int:
    """The step that Lightning gives its loggers at this moment."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def before_validation(trainer: Trainer, function: Callable[[], None]) -> Callable[[], None]:
    """Call ``function`` before each validation of a fit, before that makes its iterators.

    Returns:
        A function that ends this.
    """
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    original = loop.run

    def run() -> Any:
        function()
        return original()

    def release() -> None:
        loop.__dict__.pop("run", None)

    loop.run = run
    return release


def metrics_for_callbacks(trainer: Any, epoch_ends: bool) -> dict[str, torch.Tensor]:
    """``trainer.callback_metrics``, and at an epoch's end the training metrics of that epoch.

    Callbacks such as ``EarlyStopping`` read them in ``on_train_epoch_end``, which a resume from an epoch's last batch
    runs again without the batches that logged them.
    """
    metrics = dict(trainer.callback_metrics)
    if epoch_ends:
        metrics.update(trainer.fit_loop.epoch_loop._results.metrics(on_step=False)["callback"])
    return {name: value.detach().clone() for name, value in metrics.items() if isinstance(value, torch.Tensor)}


def restore_metrics_for_callbacks(trainer: Any, metrics: dict[str, torch.Tensor]) -> None:
    """Let ``trainer.callback_metrics`` hold what it held when a checkpoint was taken."""
    trainer._logger_connector._callback_metrics.update(metrics)


def loaders_are_exhausted(trainer: Any) -> bool:
    """Whether the epoch that ends now has used up every train dataloader, so that their state is that of an end."""
    for loader in train_loaders(trainer):
        try:
            if len(loader) != trainer.num_training_batches:
                return False
        except TypeError:  # no length: it ended by itself unless it was cut off
            if trainer.limit_train_batches != 1.0:
                return False
    return True


def unfinish_loaders(checkpoint: dict[str, Any]) -> None:
    """Let torchdata's loaders that had reached their end be restored there, not at the start of another round.

    A resume from an epoch's end makes two iterators, of which the first is never used; it must not draw an order.
    """
    for state in checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", []):
        if isinstance(state, dict) and state.get("_iterator_finished"):
            state["_iterator_finished"] = False


def end_current_epoch(trainer: Any) -> None:
    """Let a resumed fit train no further batch in the epoch it was resumed in."""
    trainer.fit_loop._data_fetcher.done = True


def mark_batch_completed(checkpoint: dict[str, Any]) -> None:
    """Count the current batch as completed in a dumped checkpoint.

    Lightning counts it only after ``on_train_batch_end``. At an epoch's last batch a stateful loader is then restored
    at its end while the epoch counts as unfinished, and a whole epoch is skipped. With any other loader a resume
    trains a batch too many, unless :func:`end_current_epoch` is called.
    """
    loop = checkpoint["loops"]["fit_loop"]
    for counts in (loop["epoch_loop.batch_progress"]["total"], loop["epoch_loop.batch_progress"]["current"]):
        counts["completed"] = counts["processed"]
    # the step that loggers see; a resume adds the current batch to it only while that counts as uncompleted
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
