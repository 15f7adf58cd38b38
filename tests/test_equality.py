"""A checkpoint equals what a synchronous save at the same moment writes, however the state is changed meanwhile.

The background copy of each overlapped save is held up until the training waits for it, so that whatever changes the
state before that is surely in the copy: only the barrier, the copies made at once and the audit make the files right.
"""

from __future__ import annotations

import copy
import io
import re
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_ckpt_policy import AfterValidation, CheckpointPolicy, EveryNTrainSteps, KeepAll, snapshot
from lightning_ckpt_policy.callback import AUDIT_EVERY
from lightning_ckpt_policy.errors import SnapshotChangedError
from lightning_ckpt_policy.io import AsyncCheckpointIO, SaveRequest
from lightning_ckpt_policy.snapshot import Image, _Piece
from tests.models import Interrupted, fit, loader

pytestmark = pytest.mark.core
BIG = 256  # a weight of BIG x BIG numbers has 256 KiB: large enough to be left to the background

ADAM = partial(torch.optim.Adam, lr=0.01)


# the trainings


class Big(LightningModule):
    """BatchNorm, and one weight that is large."""

    def __init__(self, optimizer: Callable[..., Any] = ADAM) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, BIG), nn.BatchNorm1d(BIG))
        self.hidden: Any = nn.Linear(BIG, BIG)
        self.last = nn.Linear(BIG, 1)
        self.make_optimizer = optimizer

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.hidden(self.first(batch))))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return (self(batch + torch.rand((), device=self.device)) - 1).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Manual(Big):
    """The second optimizer steps in every ``every``-th batch only, so that its state comes late."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            if index == 0 or (batch_idx + 1) % self.every == 0:
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

    def configure_optimizers(self) -> Any:
        ours = [*self.first.parameters(), *self.last.parameters()]
        return [torch.optim.SGD(ours, lr=0.01), torch.optim.AdamW(self.hidden.parameters(), lr=0.01, fused=True)]


class Tied(Big):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(BIG, BIG)
        self.again.weight = self.hidden.weight
        self.first.append(self.again)


class FlatParameters(Big):
    """Two parameters that are all of one storage, as in a flattened model."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(BIG, BIG)
        flat = torch.randn(2, BIG, BIG) / BIG
        self.hidden.weight, self.again.weight = nn.Parameter(flat[0]), nn.Parameter(flat[1])
        self.first.append(self.again)


class SharedStorage(Big):
    """A parameter in one storage with what a forward pass changes: a buffer, or what is in no state dict."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        flat = torch.randn(2, BIG, BIG) / BIG
        self.hidden.weight = nn.Parameter(flat[0])
        if buffer:
            self.register_buffer("seen", flat[1])
        else:
            self.seen = flat[1]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1  # type: ignore[operator]
        return super().forward(batch)


class FrozenPart(SharedStorage):
    """The rest of the storage is a parameter that no optimizer has."""

    def __init__(self) -> None:
        super().__init__(buffer=False)
        seen = self.seen
        del self.seen
        self.seen = nn.Parameter(seen, requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.data += 1
        return Big.forward(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01, momentum=0.9)


class OddShapes(Big):
    """Parameters that aren't contiguous, have no or only one element, or another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden.weight = nn.Parameter((torch.randn(BIG, BIG) / BIG).t())
        self.conv = nn.Conv2d(96, 96, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.spectrum = nn.Parameter(torch.randn(BIG, BIG // 2, dtype=torch.complex64))
        self.long = nn.Parameter(torch.randn(BIG, BIG, dtype=torch.float64))
        self.short = nn.Parameter(torch.randn(BIG, 2 * BIG).bfloat16())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * self.scale + self.nothing.sum()
        others = self.conv(torch.rand(1, 96, 3, 3, device=self.device)), self.spectrum.abs(), self.long, self.short
        return loss + sum(other.float().pow(2).mean() for other in others)


class ManyBuffers(Big):
    """Large buffers of all kinds of dtypes, changed in each forward pass; NaNs with something to say among them."""

    DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64)

    def __init__(self) -> None:
        super().__init__()
        for dtype in self.DTYPES:
            self.register_buffer(f"of_{dtype}".replace(".", "_"), torch.zeros(BIG, BIG).to(dtype))
        payload = torch.tensor([0x7FC12345, 0x7F812345, -1], dtype=torch.int32)
        self.register_buffer("nan", payload.repeat(BIG, BIG).view(torch.float32))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for buffer in self.buffers():
            buffer.view(-1).view(torch.uint8)[torch.randint(0, buffer.nbytes, (9,))] = 1
        return super().forward(batch)


class Normalized(Big):
    """A forward pass changes the buffers of a spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.utils.parametrizations.spectral_norm(self.hidden)


class Target(Big):
    """A frozen copy of a weight follows it, through ``.data``, in each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.hidden).requires_grad_(False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        for target, parameter in zip(self.target.parameters(), self.hidden.parameters(), strict=True):
            target.data.lerp_(parameter.data, 0.5)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


class Holder:
    """What someone keeps beside the weights: tensors, arrays and containers in an object."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.alias = weight
        self.row = weight[3]
        self.array = weight.detach().numpy()
        self.own = torch.zeros(BIG, BIG)
        self.things: list[Any] = [{1, 2}, {"a": np.zeros(BIG)}, (None, float("nan"))]

    def change(self) -> None:
        self.own += 1
        self.things[0].add(len(self.things[0]) + 1)
        self.things[1]["a"] += 1
        self.things.append("more")


class Keeper(Callback):
    """Keeps a ``Holder`` in its state, and changes it before each forward pass."""

    def __init__(self) -> None:
        self.holder: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.holder = self.holder or Holder(pl_module.hidden.weight)
        self.holder.change()

    def state_dict(self) -> dict[str, Any]:
        return {"holder": self.holder}


class OddState(Big):
    """Tensors that aren't plain ones, in a checkpoint's own keys."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.eye(BIG)
        self.complex = torch.randn(BIG, BIG, dtype=torch.complex64)
        self.other = torch.randn(BIG, BIG, dtype=torch.complex64)
        self.raw = torch.zeros(BIG * BIG, dtype=torch.uint8)
        self.odd: dict[str, Any] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        for tensor in (self.dense, self.complex, self.other, self.raw):
            tensor += 1
        for sparse in ("coo", "csr"):
            if sparse in self.odd:
                self.odd[sparse].values().mul_(2)
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.odd = {
            "coo": self.dense.to_sparse().coalesce(),
            "csr": self.dense.to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(self.dense, 0.1, 2, torch.qint8),
            "conjugate": self.complex.conj(),
            "negative": self.other.conj().imag,
            "expanded": self.dense[0, :1].expand(BIG, BIG),
            "diagonal": self.dense.diagonal(),
            "meta": torch.empty(BIG, BIG, device="meta"),
            "parameter": self.hidden.weight,
            "momentum": [state.get("exp_avg") for state in self.trainer.optimizers[0].state.values()],
            "storage": self.raw.untyped_storage(),
            "weight": self.hidden.weight.detach().t(),
        }
        checkpoint["odd"] = self.odd


class InBackward(Big):
    """Optimizers that Lightning doesn't know step in the backward pass; their weights may be Lightning's as well."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.known = known
        self.again = nn.Linear(BIG, BIG)
        self.first.append(self.again)
        self.inner = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in self.again.parameters()}
        for parameter, optimizer in self.inner.items():
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())

    def configure_optimizers(self) -> Any:
        theirs = set() if self.known else set(self.again.parameters())
        return self.make_optimizer([parameter for parameter in self.parameters() if parameter not in theirs])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["inner"] = [optimizer.state_dict() for optimizer in self.inner.values()]


class StepsItself(Big):
    """Steps the torch optimizer, past all of Lightning's hooks."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.optimizer.step()


class Clips(Big):
    """Clips its weights behind each step, as a Wasserstein GAN does."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for parameter in self.parameters():
            parameter.data.clamp_(-0.05, 0.05)


class MovesFirst(torch.optim.SGD):
    """Moves the weights before it calls its closure, as sharpness-aware minimization does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.001)
        return super().step(closure)


class Wrapped(Big):
    """Its optimizer wraps another one and isn't set up as torch's are, so torch calls no hooks of it."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return self.inner.step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.inner.zero_grad(set_to_none)

        def state_dict(self) -> dict[str, Any]:
            return self.inner.state_dict()

    def configure_optimizers(self) -> Any:
        return self.Wrapper(torch.optim.Adam(self.parameters(), lr=0.01, fused=True))


class WrappedAndStepped(Wrapped, StepsItself):
    """Such an optimizer, past Lightning's hooks as well: all state has to be copied at once."""


class SparseGradients(Big):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(BIG, BIG, sparse=True)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.words(torch.randint(0, BIG, (8,), device=self.device)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.words.parameters(), lr=0.01)


class TensorRate(Big):
    """The learning rate is a tensor, which the scheduler changes in place."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=torch.tensor(0.01), foreach=False)  # type: ignore[arg-type]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Renormalized(Big):
    """An embedding whose forward pass shortens, in place, the words it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(BIG, BIG, max_norm=0.5)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        words = self.words(torch.randint(0, BIG, (8,), device=self.device))
        return super().training_step(batch, batch_idx) + words.pow(2).mean()


class NewMemory(Big):
    """Gives its weights other memory in each forward pass, and writes into the old."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.through_data = through_data

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        with torch.no_grad():
            new = self.hidden.weight * 0.9
            if self.through_data:
                self.hidden.weight.data = new
            else:
                self.hidden.weight.set_(new)
        return super().training_step(batch, batch_idx)


class LoadsWeights(Callback):
    """Loads other weights before a batch."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.load_state_dict({name: value * 0.9 for name, value in pl_module.state_dict().items()})


class ShrinksForSave(Callback):
    """Changes the weights at the save point itself, for the checkpoint as well."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        with torch.no_grad():
            pl_module.hidden.weight.mul_(0.9)


class SavesAlong(Callback):
    """A user's own save while a policy's copy isn't complete."""

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "own.ckpt")


# what each training is, and what is expected of its saves


def averaging() -> list[Callback]:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("EMAWeightAveraging came with Lightning 2.6")
    return [callbacks.EMAWeightAveraging(decay=0.5)]


def scaler() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))]}


@dataclass
class Case:
    model: Callable[[], LightningModule] = Big
    callbacks: Callable[[], list[Callback]] = list
    options: Callable[[], dict[str, Any]] = dict
    eager: bool = False  # nothing is left to the background
    discarded: str = ""  # pattern of the tensor whose change in the wrong moment makes a save be discarded


# a validation comes with a copy not complete only in a window whose gradients are gathered
WINDOWS: dict[str, Any] = {
    "train": partial(loader, batches=8),
    "accumulate_grad_batches": 3,
    "val_check_interval": 2,
}

CASES = {
    **{
        f"{name} {kind}": Case(partial(Big, partial(make, lr=0.01, foreach=kind == "foreach", fused=kind == "fused")))
        for name, make in {
            "SGD": partial(torch.optim.SGD, momentum=0.9),
            "Adam": partial(torch.optim.Adam, amsgrad=True),
            "AdamW": torch.optim.AdamW,
        }.items()
        for kind in ("for-loop", "foreach", "fused")
    },
    "LBFGS": Case(partial(Big, partial(torch.optim.LBFGS, lr=0.01, max_iter=3, history_size=3))),
    "weights moved before the closure": Case(partial(Big, partial(MovesFirst, lr=0.01)), discarded=".*weight"),
    "a wrapped optimizer": Case(Wrapped),
    "a wrapped optimizer and an own optimizer_step": Case(WrappedAndStepped, eager=True),
    "sparse gradients": Case(SparseGradients),
    "a tensor as learning rate": Case(TensorRate),
    "manual": Case(Manual),
    "manual, one now and then": Case(partial(Manual, every=2)),
    "accumulation": Case(options=lambda: {"accumulate_grad_batches": 3}),
    "gradient clipping": Case(options=lambda: {"gradient_clip_val": 0.1}),
    "EMA": Case(callbacks=averaging),
    "EMA, validation in an epoch": Case(callbacks=averaging, options=lambda: {"val_check_interval": 2}),
    "EMA, validation in a window": Case(callbacks=averaging, options=lambda: WINDOWS),
    "EMA, stopped early": Case(callbacks=lambda: [*averaging(), EarlyStopping("val_loss", min_delta=99, patience=1)]),
    "SWA": Case(callbacks=lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)]),
    "bf16-mixed": Case(options=lambda: {"precision": "bf16-mixed"}),
    "bf16-true": Case(options=lambda: {"precision": "bf16-true"}),
    "AMP with a scaler": Case(options=scaler),
    "tied weights": Case(Tied),
    "parameters of one storage": Case(FlatParameters),
    "a parameter and a buffer of one storage": Case(partial(SharedStorage, buffer=True)),
    "a parameter and something else of one storage": Case(partial(SharedStorage, buffer=False)),
    "a parameter and a frozen one of one storage": Case(FrozenPart),
    "odd shapes": Case(OddShapes),
    "many buffers": Case(ManyBuffers),
    "spectral norm": Case(Normalized),
    "a target that follows": Case(Target),
    "tensors in an object": Case(callbacks=lambda: [Keeper()]),
    "odd tensors in a checkpoint": Case(OddState),
    "optimizers in the backward pass": Case(partial(InBackward, known=False)),
    "other optimizers in the backward pass": Case(partial(InBackward, known=True)),
    "an own optimizer_step": Case(StepsItself),
    "weights clipped behind each step": Case(Clips),
    "weights with a greatest length": Case(Renormalized, discarded="words.weight"),
    "weights given new memory": Case(partial(NewMemory, through_data=True)),
    "weights set to new memory": Case(partial(NewMemory, through_data=False), discarded="hidden.weight"),
    "weights loaded before a batch": Case(callbacks=lambda: [LoadsWeights()], discarded=".*weight"),
    "weights changed by the save itself": Case(callbacks=lambda: [ShrinksForSave()]),
    "a user's own saves": Case(callbacks=lambda: [SavesAlong()]),
}


# the same save by torch.save


@dataclass
class Saves:
    """What a fit saved."""

    policies: list[CheckpointPolicy]
    synchronous: dict[float, bytes]  # what a synchronous save writes at that moment, by its time
    deferred: list[int]  # bytes of each save that weren't copied at once

    def check(self, discarded: str = "") -> None:
        """All is confirmed and right, but for one save at most that was discarded for a change of such a tensor."""
        policy = self.policies[0]
        errors = [outcome.error for outcome in policy.history if outcome.error is not None]
        assert [type(error) for error in errors] == [SnapshotChangedError] * bool(discarded)
        assert all(re.match(f"'{discarded}' was changed", str(error)) for error in errors)
        records = [(policy, record) for policy in self.policies for record in policy.store.records()]
        assert len(records) == len(self.synchronous) == len(self.deferred) - len(errors) > 2
        for policy, record in records:
            path = Path(policy.store.path_of(record))
            assert_same_file(path, self.synchronous[record.created_at])
        if discarded:
            first = next(index for index, size in enumerate(self.deferred) if size)
            assert not any(self.deferred[first + 1 :])


def assert_same_file(path: Path, synchronous: bytes) -> None:
    """Bit for bit, but for the CRC-32s and what they go into; also as it is loaded, mapped into memory or not."""
    assert path.stat().st_size == len(synchronous)
    saved, expected = zip_records(path.read_bytes()), zip_records(synchronous)
    assert list(saved) == list(expected)
    assert [name for name in saved if saved[name] != expected[name] and not name.endswith("serialization_id")] == []
    direct = saved_again(torch.load(io.BytesIO(synchronous), weights_only=False))
    for mapped in (False, True):
        assert saved_again(torch.load(path, weights_only=False, mmap=mapped)) == direct


def zip_records(data: bytes) -> dict[str, tuple[int, bytes]]:
    """Place and content of each record of a file of ``torch.save``, whatever its CRC-32 is."""
    found = {}
    for info in zipfile.ZipFile(io.BytesIO(data)).infolist():
        name, extra = struct.unpack("<HH", data[info.header_offset + 26 : info.header_offset + 30])
        start = info.header_offset + 30 + name + extra
        found[info.filename] = (start, data[start : start + info.file_size])
    return found


def saved_again(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


class Ready(Callback):
    """Waits for the save before each save point, so that none is put off."""

    def __init__(self, policies: list[CheckpointPolicy]) -> None:
        self.policies = policies
        self.step = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            assert all(policy._writer.drain(30) for policy in self.policies)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        assert all(policy._writer.drain(30) for policy in self.policies)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Saves]:
    """Run a fit that saves at each step and validation, beside it what a synchronous save writes."""
    saves = Saves([], {}, [])
    original, submit, copy_piece = AsyncCheckpointIO.save_checkpoint, CheckpointPolicy._submit, _Piece.copy
    references: dict[Image, bytes] = {}

    def save(self: Any, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if isinstance(storage_options, SaveRequest):
            reference = saved_again(checkpoint)
        original(self, checkpoint, path, storage_options)
        if isinstance(storage_options, SaveRequest):
            assert storage_options.image is not None
            saves.deferred.append(storage_options.image.deferred)
            references[storage_options.image] = reference

    def submit_known(self: CheckpointPolicy, image: Image, draft: dict[str, Any], *rest: bool) -> None:
        saves.synchronous[draft["created_at"]] = references[image]
        submit(self, image, draft, *rest)

    monkeypatch.setattr(CheckpointPolicy, "_submit", submit_known)

    monkeypatch.setattr(AsyncCheckpointIO, "save_checkpoint", save)
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 1 << 17)  # so that a weight is in several chunks

    def run(case: Case, *policies: dict[str, Any], late: bool = True, audit: bool = False, **options: Any) -> Saves:
        if late:  # nothing is copied before the training waits for it
            monkeypatch.setattr(Image, "start", lambda image: None)
        else:  # the training always comes while something is being copied
            monkeypatch.setattr(
                _Piece, "copy", lambda piece, slow, *rest: (time.sleep(0.01 * slow), copy_piece(piece, slow, *rest))
            )
        if not audit:  # and right nevertheless
            monkeypatch.setattr(Image, "differs", lambda *_: None)
        when = EveryNTrainSteps(1) | AfterValidation()
        saves.policies += [
            CheckpointPolicy(tmp_path / str(index), retention=KeepAll(), **{"trigger": when, **kwargs})
            for index, kwargs in enumerate(policies)
        ]
        callbacks = [Ready(saves.policies), *case.callbacks()]
        fit(tmp_path, saves.policies, model=case.model, callbacks=callbacks, **{**FIT, **case.options(), **options})
        return saves

    return run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More of torch's threads only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FIT: dict[str, Any] = {"train": partial(loader, batches=4), "validate": True, "max_epochs": 2}


# these put something on the CPU themselves
ON_THE_CPU = {"AMP with a scaler", "a tensor as learning rate", "a parameter and something else of one storage"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["overlapped", "eager"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in ON_THE_CPU])
def test_a_checkpoint_of_a_gpu_equals_a_synchronous_save(train: Callable[..., Saves], name: str, mode: str) -> None:
    case = CASES[name]
    saves = train(case, {"snapshot": mode}, accelerator="gpu")
    saves.check(case.discarded if mode == "overlapped" else "")
    assert any(saves.deferred) == (mode == "overlapped" and not case.eager)


@pytest.mark.parametrize("mode", ["overlapped", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_equals_a_synchronous_save(train: Callable[..., Saves], name: str, mode: str) -> None:
    overlapped = mode == "overlapped"
    saves = train(CASES[name], {"snapshot": mode})
    saves.check(CASES[name].discarded if overlapped else "")
    assert any(saves.deferred) == (overlapped and not CASES[name].eager)


MEANWHILE = ["AdamW fused", "LBFGS", "manual, one now and then", "accumulation", "an own optimizer_step", "odd shapes"]


@pytest.mark.parametrize("name", MEANWHILE)
def test_with_a_copy_that_goes_on_meanwhile(train: Callable[..., Saves], name: str) -> None:
    train(CASES[name], {}, late=False, audit=True).check()


def test_every_kind_of_save_point(train: Callable[..., Saves]) -> None:
    saves = train(Case(), {}, max_epochs=3, val_check_interval=2, check_val_every_n_epoch=2)
    saves.check()
    assert {record.point for record in saves.policies[0].store.records()} == {
        "batch_end",
        "validation_end",
        "epoch_end",
    }


def test_two_policies(train: Callable[..., Saves]) -> None:
    saves = train(Case(), {}, {"save_weights_only": True})
    saves.check()
    assert all(saves.deferred[:2])


# a change in any of Lightning's hooks


def meddle(module: Any) -> None:
    """Change a weight so that autograd doesn't see it."""
    if module.trainer.training or module.trainer.validating:
        module.hidden.weight.data.mul_(0.9)


def meddling(hook: str, of: type) -> type:
    """A callback or module that changes a weight in one of its hooks."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        meddle(self if of is Big else args[1])
        return getattr(super(cls, self), hook)(*args, **kwargs)

    cls: type = type(f"In_{hook}", (of,), {hook: method})
    return cls


# reached, by whatever comes first, before the change: right even without an audit
BARRIERS = {
    Callback: [
        "on_before_optimizer_step",
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "on_validation_epoch_end",
        "on_validation_end",
        "on_train_epoch_end",
        "on_train_epoch_start",
        "on_train_end",
    ],
    Big: [
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "on_validation_start",
        "on_validation_epoch_start",
        "validation_step",
        "on_validation_epoch_end",
        "on_train_epoch_end",
        "on_train_epoch_start",
        "on_train_end",
    ],
}
# the module may change weights there: everything is copied at once
EAGER = [
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_validation_end",
    "on_validation_model_eval",
    "on_validation_model_train",
]
# nobody changes weights there, but if so the audit finds it
AUDITED = {
    Callback: [
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_train_batch_end",  # of a batch whose gradients are gathered
    ],
    Big: [
        "on_before_batch_transfer",
        "training_step",
        "forward",
        "optimizer_zero_grad",
        "on_before_backward",
        "backward",
        "on_after_backward",
        "optimizer_step",
    ],
}


def in_hook(hook: str, of: type) -> Case:
    cls = meddling(hook, of)
    return Case(cls) if of is Big else Case(callbacks=lambda: [cls()])


def hooks(where: dict[type, list[str]]) -> list[Any]:
    return [pytest.param(hook, of, id=f"{of.__name__}.{hook}") for of, names in where.items() for hook in names]


@pytest.mark.parametrize(("hook", "of"), [*hooks(BARRIERS), *hooks({Big: EAGER})])
def test_a_change_behind_a_barrier_does_not_reach_the_copy(train: Callable[..., Saves], hook: str, of: type) -> None:
    saves = train(in_hook(hook, of), {}, **WINDOWS)
    saves.check()
    assert any(saves.deferred) == (of is Callback or hook not in EAGER)


@pytest.mark.parametrize(("hook", "of"), hooks(AUDITED))
def test_a_change_before_the_barrier_is_found(train: Callable[..., Saves], hook: str, of: type) -> None:
    train(in_hook(hook, of), {}, audit=True, accumulate_grad_batches=2).check("hidden.weight")


def test_a_discarded_save_stays_due(train: Callable[..., Saves]) -> None:
    saves = train(in_hook("training_step", Big), {"trigger": EveryNTrainSteps(3)}, audit=True, validate=False)
    saves.check("hidden.weight")
    assert [record.step for record in saves.policies[0].store.records()] == [4, 6, 8]


def test_a_crash_before_the_barrier(train: Callable[..., Saves]) -> None:
    class Crashes(Big):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if self.global_step == 6:
                raise Interrupted
            return super().training_step(batch, batch_idx)

    class Meddles(Callback):
        def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
            meddle(pl_module)

    saves = train(Case(Crashes, lambda: [Meddles()]), {}, crash_at=99)
    saves.check()
    assert saves.deferred[-1]
    assert saves.policies[0].store.records()[-1].step == 6


def test_the_time_of_a_save_begins_once_its_copy_is_complete(train: Callable[..., Saves]) -> None:
    class Waits(Big):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if self.global_step == 1:
                time.sleep(1.0)
                policy: Any = self.trainer.checkpoint_callback
                assert not policy._writer.saving
                policy.save_timeout = 60
            return super().training_step(batch, batch_idx)

    saves = train(Case(Waits), {"save_timeout": 0.5}, audit=True)
    saves.check()


# audits


def test_the_first_overlapped_copy_and_one_in_twenty_are_audited(
    train: Callable[..., Saves], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert AUDIT_EVERY == 20
    monkeypatch.setattr("lightning_ckpt_policy.callback.AUDIT_EVERY", 3)
    for _ in range(2):
        saves = train(Case(), {}, audit=True, validate=False)
        audits = [outcome.audit_seconds > 0 for outcome in saves.policies[0].history if outcome.record is not None]
        assert audits == [index % 3 == 0 and size > 0 for index, size in enumerate(saves.deferred)]
        saves.policies.clear(), saves.synchronous.clear(), saves.deferred.clear()


def test_a_later_audit_finds_what_the_first_did_not(
    train: Callable[..., Saves], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_ckpt_policy.callback.AUDIT_EVERY", 3)

    class Late(Big):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if self.global_step == 7:
                meddle(self)
            return super().training_step(batch, batch_idx)

    saves = train(Case(Late), {}, audit=True, validate=False)
    assert [outcome.step for outcome in saves.policies[0].history if outcome.record is None] == [7]
    assert [record.step for record in saves.policies[0].store.records()] == [1, 2, 3, 4, 5, 6, 8]


# saving changes nothing


@pytest.mark.parametrize("name", [*MEANWHILE, "EMA, validation in an epoch", "SWA", "AMP with a scaler"])
def test_a_run_with_saves_ends_like_one_without(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    ends = []
    for mode in (None, "overlapped", "eager"):
        policy: Any = mode and CheckpointPolicy(tmp_path / mode, EveryNTrainSteps(1), snapshot=mode)  # type: ignore[arg-type]
        observer = fit(tmp_path, policy, model=case.model, callbacks=case.callbacks(), **{**FIT, **case.options()})
        ends.append(saved_again(observer.final))
        assert policy is None or policy.store.records()
    assert ends[0] == ends[1] == ends[2]
