"""Training runs whose loop is written once: it drives an engine on every rank, and plain torch in one process.

The reference (`Reference`) is torch alone, on the concatenated batch of all ranks: nothing in it comes from
deepspeed_amsp. `on_ranks` runs the same loop on the pool and reports what every rank holds; `assert_matches`
compares the two, and the replicas with each other bit by bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from tests.support.pool import pool

NIGHTLY = os.environ.get("AMSP_NIGHTLY") == "1"
CLUSTER = ShardFactor(2, 2)
ONE, NODE, ALL = ShardFactor(1, 1), ShardFactor(2, 1), ShardFactor(2, 2)
DDP = Sharding(ONE, ONE, ONE, CLUSTER)
LOCAL_STATES = Sharding(ONE, ONE, NODE, CLUSTER)
UNEQUAL = Sharding(ONE, NODE, ALL, CLUSTER)
MICS = Sharding(NODE, NODE, NODE, CLUSTER)
MIXED = Sharding(NODE, NODE, ALL, CLUSTER)
ZERO3 = Sharding(ALL, ALL, ALL, CLUSTER)
TRIO = [UNEQUAL, MIXED, ZERO3]
"""A factor of 1, the whole world, unequal triples with s_p = 1 and s_p > 1: what the normal suite runs."""
SPREAD = [DDP, LOCAL_STATES, UNEQUAL, MICS, MIXED, ZERO3] if NIGHTLY else TRIO
SHORT_SPREAD = [LOCAL_STATES, UNEQUAL, MIXED, ZERO3] if NIGHTLY else TRIO
"""For cases with many variants."""
PAIR = [UNEQUAL, ZERO3]
WHOLE = [sharding for sharding in SPREAD if sharding.s_p == 1]
CUT = [sharding for sharding in SPREAD if sharding.s_p > 1]

WORLD = CLUSTER.size
FEATURES = 6
ROWS = 2
"""Rows of a micro-batch of one rank."""


def label(sharding: Sharding) -> str:
    factors = (sharding.parameters, sharding.gradients, sharding.optimizer_states)
    return "-".join(str(factor) for factor in factors)


def over(shardings: Sequence[Sharding]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sharding", shardings, ids=label)


spread = over(SPREAD)
short_spread = over(SHORT_SPREAD)
trio = over(TRIO)
pair = over(PAIR)
few = over(SPREAD if NIGHTLY else PAIR)
"""For cases with very many variants: whole and sharded parameters."""


# ---- one loop, two trainers --------------------------------------------------------------------------------


class Trainer(Protocol):
    """What a loop may do. ``module`` is the user's model; ``rows(step, micro)`` is this trainer's part of the data."""

    run: Run
    module: nn.Module
    losses: list[float]
    notes: list[Any]
    engine: Any

    def rows(self, step: int, micro: int) -> torch.Tensor: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None: ...

    def step(self) -> None:
        """The end of a micro-batch; the parameters move when it is the last one of its window."""

    def finish(self) -> None:
        """The step of a loop that steps once a window."""

    def train(self, mode: bool = True) -> None: ...

    def no_sync(self) -> AbstractContextManager[Any]: ...


Loop = Callable[[Any], None]


def loss_of(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Distance of ``output`` [rows, n] from a function of the data, in fp32."""
    target = torch.sin(3 * rows[:, : output.shape[1]].float())
    return (output.float() - target).square().mean()


def one_step(trainer: Trainer, step: int) -> None:
    """One accumulation window."""
    for micro in range(trainer.run.micro_batches):
        rows = trainer.rows(step, micro)
        loss = loss_of(trainer(rows), rows)
        trainer.losses.append(loss.item())
        trainer.backward(loss)
        trainer.step()


def plain_loop(trainer: Trainer) -> None:
    for step in range(trainer.run.steps):
        one_step(trainer, step)


@dataclass(frozen=True)
class Run:
    """One training run; every callable is a top-level one, since it travels to the ranks by name.

    prepare: called with the model before the engine gets it (to mark leaf modules, say); not in the reference.
    observe: called on every rank with the trainer at the end; what it returns is in ``Held.seen``.
    """

    sharding: Sharding
    model: Callable[[], nn.Module]
    loop: Loop = plain_loop
    steps: int = 3
    micro_batches: int = 1
    optimizer: str = "adamw"
    clip: float = 0.0
    dtype: torch.dtype = torch.float32
    reduce: str = "two_level"
    publish: str = "broadcast"
    bucket_bytes: int = 400
    adversarial: bool = False
    different_seeds: bool = False
    prepare: Callable[[nn.Module], Any] | None = None
    observe: Callable[[Any], Any] | None = None
    amsp: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Run:
        return replace(self, **changes)

    def ds_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.sharding.stage, **self.zero},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            "amsp": {
                "sharding": self.sharding.as_dict(),
                "reduce": self.reduce,
                "publish": self.publish,
                "bucket_bytes": self.bucket_bytes,
                "topology": {"gpus_per_node": CLUSTER.s0},
                **self.amsp,
            },
        }
        if self.dtype is torch.bfloat16:
            config["bf16"] = {"enabled": True}
        return {**config, **self.extra}


def batch(step: int, micro: int, ranks: int) -> torch.Tensor:
    """Rows of one micro-batch of all ranks, rank after rank: FEATURES numbers, then a branch (0, 1 or 2, the same
    for all rows of a rank), then the step."""
    generator = torch.Generator().manual_seed(7919 * step + micro)
    values = torch.randn(ranks * ROWS, FEATURES, generator=generator)
    rank = torch.arange(ranks).repeat_interleave(ROWS)
    branch = (rank // 2 + step) % 3
    return torch.cat([values, branch[:, None], torch.full((len(rank), 1), step)], dim=1)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with different weight decay; frozen and non-float parameters are in them, as users pass them."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.05}]
    return [group for group in groups if group["params"]]


# eps is large where the update divides by the gradient's own size: the smallest gradients are rounding.
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=2e-2, eps=1e-3),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "plain_sgd": lambda groups: torch.optim.SGD([{**group, "weight_decay": 0.0} for group in groups], lr=0.1),
}


class Reference:
    """What an engine promises, done by plain torch on all ranks' rows at once."""

    engine = None

    def __init__(self, run: Run, ranks: int = WORLD, module: nn.Module | None = None) -> None:
        torch.manual_seed(7)
        self.run = run
        self.module = run.model() if module is None else module
        self.optimizer = OPTIMIZERS[run.optimizer](groups_of(self.module))
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.notes: list[Any] = []
        self._ranks = ranks
        self._micro_steps = 0

    def rows(self, step: int, micro: int) -> torch.Tensor:
        return batch(step, micro, self._ranks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        (loss / self.run.micro_batches).backward(**kwargs)

    def step(self) -> None:
        self._micro_steps += 1
        if self._micro_steps % self.run.micro_batches == 0:
            self.finish()

    def finish(self) -> None:
        most = self.run.clip if self.run.clip > 0 else float("inf")
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), most)))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()


class OnRank:
    """An engine on this rank, with this rank's rows."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.engine = make_engine(run)
        self.module = self.engine.module
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.notes: list[Any] = []

    def rows(self, step: int, micro: int) -> torch.Tensor:
        rank = dist.get_rank()
        return batch(step, micro, dist.get_world_size())[rank * ROWS : (rank + 1) * ROWS].to(self.run.dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.engine.backward(loss, **kwargs)

    def step(self) -> None:
        before = self.engine.global_steps
        self.engine.step()
        if self.engine.global_steps > before:
            self.norms.append(float(self.engine.get_global_grad_norm()))

    def finish(self) -> None:
        self.step()

    def train(self, mode: bool = True) -> None:
        self.engine.train(mode)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.engine.no_sync()


def make_engine(run: Run) -> Any:
    import deepspeed

    import deepspeed_amsp  # noqa: F401  (installs the engine)
    from deepspeed_amsp import mesh
    from tests.support import adversarial, jobs  # noqa: F401  (jobs puts the backend back after the job)

    mesh.GROUP_BACKEND = "adversarial" if run.adversarial else None
    if run.adversarial:
        adversarial.configure(seed=99, max_delay_ms=1.0, enabled=True)
    torch.manual_seed(7 + run.different_seeds * dist.get_rank())
    model = run.model()
    if run.prepare is not None:
        run.prepare(model)
    optimizer = OPTIMIZERS[run.optimizer](groups_of(model))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=run.ds_config())
    return engine


# ---- what is compared --------------------------------------------------------------------------------------


@dataclass
class Held:
    """What one trainer saw and holds. parameters: whole working copies; masters: (name, start, stop) -> flat."""

    losses: list[float]
    norms: list[float]
    notes: list[Any]
    parameters: dict[str, torch.Tensor]
    masters: dict[tuple[str, int, int], torch.Tensor]
    trainable: set[str]
    seen: Any = None


def whole_parameters(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter's working copy, whole. Collective when parameters are sharded."""
    engine.optimizer.wait_for_parameters()
    values = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    for unit, whole in engine.optimizer.gathered_units():
        for spec, value in zip(unit.layout.params, whole, strict=True):
            values[spec.name] = value.detach().clone()
    return values


def masters_of(engine: Any) -> dict[tuple[str, int, int], torch.Tensor]:
    masters = engine.optimizer.states.all_masters()
    pieces = ((master.slot.piece, master.value) for master in masters)
    return {(piece.param.name, piece.start, piece.stop): value.detach().flatten().clone() for piece, value in pieces}


def held_by(trainer: Any) -> Held:
    names = {name for name, param in trainer.module.named_parameters() if param.requires_grad}
    if trainer.engine is None:
        whole = {name: param.detach().clone() for name, param in trainer.module.named_parameters()}
        return Held(trainer.losses, trainer.norms, trainer.notes, whole, {}, names)
    masters = masters_of(trainer.engine)
    return Held(trainer.losses, trainer.norms, trainer.notes, whole_parameters(trainer.engine), masters, names)


def job(run: Run) -> Held:
    from tests.support import adversarial

    trainer = OnRank(run)
    run.loop(trainer)
    held = held_by(trainer)
    if run.observe is not None:
        held.seen = run.observe(trainer)
    trainer.engine.destroy()
    if run.adversarial:
        adversarial.assert_all_waited()
    return held


def on_ranks(run: Run, **kwargs: Any) -> list[Held]:
    return pool(WORLD).run(job, run, **kwargs)


def reference(run: Run, module: nn.Module | None = None) -> Held:
    trainer = Reference(run, module=module)
    run.loop(trainer)
    return held_by(trainer)


def assert_replicas_equal(held: Sequence[Held]) -> None:
    """Working copies, and masters of the same piece, are bit-equal on all ranks."""
    masters: dict[tuple[str, int, int], torch.Tensor] = {}
    for rank, mine in enumerate(held):
        for name, value in mine.parameters.items():
            assert same(value, held[0].parameters[name]), f"rank {rank}: {name} differs from rank 0's"
        for piece, value in mine.masters.items():
            assert same(value, masters.setdefault(piece, value)), f"rank {rank}: master of {piece} differs"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def whole_masters(held: Sequence[Held], shapes: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The masters of every parameter that has any, put together; each of its elements must be owned somewhere."""
    names = {name for mine in held for name, _, _ in mine.masters}
    merged = {name: torch.full((shapes[name].numel(),), float("nan")) for name in names}
    for mine in held:
        for (name, start, stop), value in mine.masters.items():
            merged[name][start:stop] = value
    for name, value in merged.items():
        assert not value.isnan().any(), f"{name}: some elements have no owner, or are not numbers"
    return {name: value.view(shapes[name].shape) for name, value in merged.items()}


def assert_matches(
    held: Sequence[Held], want: Held, rtol: float = 1e-5, atol: float = 1e-6, norm_rtol: float | None = None
) -> None:
    """Parameters, masters, norms and mean losses are those of the reference; replicas are bit-equal."""
    assert_replicas_equal(held)
    assert held[0].parameters.keys() == want.parameters.keys()
    masters = whole_masters(held, want.parameters)
    owned = {name for name in want.trainable if want.parameters[name].numel()}
    assert masters.keys() - {n for n in want.trainable if n not in owned} == owned, "trainable parameters have masters"
    for name, value in want.parameters.items():
        for kind, copies in (("working copy", held[0].parameters), ("master", masters)):
            if name in copies:
                _assert_close(copies[name], value, f"{kind} of {name}", rtol, atol)
    losses = torch.tensor([mine.losses for mine in held], dtype=torch.float64).mean(dim=0)
    _assert_close(losses, torch.tensor(want.losses, dtype=torch.float64), "losses", max(rtol, 1e-5), atol)
    for mine in held:
        assert mine.norms == held[0].norms, "ranks disagree about the gradient norm"
    _assert_close(
        torch.tensor(held[0].norms), torch.tensor(want.norms), "norms", norm_rtol or max(rtol, 1e-5), 1e-7
    )  # fmt: skip


def _assert_close(found: torch.Tensor, want: torch.Tensor, what: str, rtol: float, atol: float) -> None:
    found = found.to(want.dtype) if want.is_floating_point() else found
    torch.testing.assert_close(found, want, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def assert_parity(run: Run, **tolerances: float) -> list[Held]:
    """Run on the ranks and in one process, compare, and hand back what the ranks hold."""
    held = on_ranks(run)
    assert_matches(held, reference(run), **tolerances)
    return held
