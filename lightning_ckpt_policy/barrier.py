"""Reached once, on the main thread, before anything in a fit can change parameters or optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_ckpt_policy import _lightning

# a module that does more in these than Lightning's own may change weights before the barrier, or after a save point
_EARLY_HOOKS = (
    "on_train_batch_end",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_validation_end",
    "on_validation_model_eval",
    "on_validation_model_train",
)
_VALIDATION_HOOKS = ("on_validation_epoch_start", "on_validation_start", "on_validation_batch_start")


def may_change_weights_early(module: LightningModule) -> str | None:
    """The name of a hook in which the module may change weights before a barrier is reached, None if it has none."""
    return next((hook for hook in _EARLY_HOOKS if is_overridden(hook, module, LightningModule)), None)


def may_validate_other_weights(trainer: Trainer, module: LightningModule) -> bool:
    """Whether other weights than the trained ones may be in place in a validation, as weight averaging puts them."""
    if any(is_overridden(hook, module, LightningModule) for hook in _VALIDATION_HOOKS):
        return True
    for callback in _lightning.callbacks(trainer):
        known = type(callback).__module__.startswith(("lightning.pytorch.callbacks.progress", __package__))
        # of Lightning's own only weight averaging does anything at the start of a validation's epoch
        hooks = _VALIDATION_HOOKS[:1] if type(callback).__module__.startswith("lightning.") else _VALIDATION_HOOKS
        if not known and any(is_overridden(hook, callback, Callback) for hook in hooks):
            return True
    return False


def can_be_put_up(trainer: Trainer, module: LightningModule) -> bool:
    """Whether the optimizers have the hooks that a barrier needs."""
    if not _needs_step_hooks(module):
        return True
    try:
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:  # a wrapper that isn't quite an optimizer
        return False
    return True


def _needs_step_hooks(module: LightningModule) -> bool:
    # Lightning's hook comes after the forward and backward passes, torch's before them; where the module calls the
    # optimizer itself only torch's is sure to come
    return not module.automatic_optimization or is_overridden("optimizer_step", module, LightningModule)


class Barrier(Callback):
    """Calls a function once: before the next optimizer step, validation, end of an epoch or end of the fit.

    It puts itself before the Trainer's other callbacks, since those may change weights at an epoch's end or for a
    validation, and takes itself away when it is reached, so that it costs nothing afterwards.

    Args:
        trainer: The Trainer, in a fit.
        module: What it trains.
        function: Called with whether the fit goes on, which it doesn't after an exception.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, function: Callable[[bool], None]) -> None:
        self._trainer = trainer
        self._function = function
        self._hooks: list[Any] = []
        self._reached = False
        trainer.callbacks = [self, *_lightning.callbacks(trainer)]  # type: ignore[attr-defined]
        if _needs_step_hooks(module):
            for optimizer in trainer.optimizers:
                self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.reach()))

    def __reduce__(self) -> tuple[type[Callback], tuple[()]]:
        return Callback, ()  # a copy of the Trainer's callbacks has nothing to wait for

    def reach(self, going_on: bool = True) -> None:
        """Call the function, unless that was done."""
        if self._reached:
            return
        self._reached = True
        trainer: Any = self._trainer
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]
        for hook in self._hooks:
            hook.remove()
        self._function(going_on)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.reach()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reach()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reach()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.reach(going_on=False)
