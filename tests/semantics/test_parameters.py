"""What models do with parameters: ties, frozen, unused, branches, odd shapes and types, reuse, structure."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_amsp.plan.factors import Sharding
from tests.semantics import modules as m
from tests.semantics.harness import (
    CUT,
    LOCAL_STATES,
    MIXED,
    UNEQUAL,
    ZERO3,
    OnRank,
    Run,
    Trainer,
    assert_matches,
    assert_parity,
    assert_replicas_equal,
    loss_of,
    on_ranks,
    over,
    pair,
    reference,
    same,
    short_spread,
    spread,
    trio,
)

# ---- ties --------------------------------------------------------------------------------------------------


def _identities(trainer: OnRank) -> tuple[bool, bool, int, int]:
    module = trainer.module
    count = sum(param.numel() for param in module.parameters())
    moments = [p for p in trainer.engine.optimizer.state if p.numel()]
    return (
        module.head.weight is module.embed.weight,
        module.again.weight is module.first.weight,
        count,
        sum(p.numel() for p in moments),
    )


@spread
def test_tied_weights(sharding: Sharding) -> None:
    """The gradient is the sum of the uses, the parameter counts once in norm and states, `is` still holds."""
    held = assert_parity(Run(sharding, m.Tied, micro_batches=2, clip=0.05, observe=_identities), norm_rtol=1e-6)
    numel = sum(param.numel() for param in m.Tied().parameters())
    for mine in held:
        assert mine.seen[0] and mine.seen[1]
    assert sum(mine.seen[3] for mine in held) == numel * sharding.replicate


# ---- unused ------------------------------------------------------------------------------------------------


def _states_of_unused(trainer: OnRank) -> list[str]:
    masters = trainer.engine.optimizer.states.all_masters()
    state = trainer.engine.optimizer.state
    with_state = {master.slot.piece.param.name for master in masters if state.get(master.value)}
    return sorted(with_state & set(m.UNUSED))


@short_spread
@pytest.mark.parametrize(
    ("micro_batches", "optimizer", "reduce"), [(1, "adamw", "two_level"), (3, "sgd", "all_reduce")]
)
def test_a_parameter_that_nobody_uses_is_left_alone(
    sharding: Sharding, micro_batches: int, optimizer: str, reduce: str
) -> None:
    """No weight decay, no momentum, no state: as torch does with a gradient of None."""
    run = Run(
        sharding, m.Unused, micro_batches=micro_batches, optimizer=optimizer, reduce=reduce, clip=0.3,
        observe=_states_of_unused,
    )  # fmt: skip
    held = assert_parity(run)
    torch.manual_seed(7)
    start = dict(m.Unused().named_parameters())
    for mine in held:
        for name in m.UNUSED:
            assert same(mine.parameters[name], start[name].detach()), f"{name} moved"
        assert mine.seen == [], "no state for what was never updated"


def _zero_filled(trainer: Any) -> None:
    """The same loop, with a zero gradient for what has none (in the reference only: the engine must do it)."""
    run = trainer.run
    for step in range(run.steps):
        for micro in range(run.micro_batches):
            rows = trainer.rows(step, micro)
            loss = loss_of(trainer(rows), rows)
            trainer.losses.append(loss.item())
            trainer.backward(loss)
            if trainer.engine is None:
                for param in trainer.module.parameters():
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            trainer.step()


@trio
@pytest.mark.parametrize("model", [m.Unused, m.Sometimes])
def test_zero_fill_is_deepspeeds_rule(sharding: Sharding, model: type[nn.Module]) -> None:
    run = Run(sharding, model, loop=_zero_filled, micro_batches=2, amsp={"unused_parameters": "zero_fill"})
    want = assert_parity(run)[0].parameters
    torch.manual_seed(7)
    unused = "spare.weight" if model is m.Unused else "early.weight"
    assert not same(want[unused], dict(model().named_parameters())[unused].detach()), "weight decay applies"


@short_spread
def test_a_parameter_that_is_used_now_and_then(sharding: Sharding) -> None:
    """Its moments and its own step count only move in the steps that use it."""
    assert_parity(Run(sharding, m.Sometimes, steps=5, micro_batches=2))


class OncePerWindow(m.Base):
    """``extra`` is called for some rows only: those of some micro-batches, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(m.WIDTH, m.WIDTH)
        self.calls = 0

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden + torch.tanh(self.extra(hidden)) if self.calls % 5 == 1 else hidden


@trio
@pytest.mark.parametrize("reduce", ["two_level", "all_reduce"])
def test_a_parameter_used_in_one_micro_batch_of_a_window(sharding: Sharding, reduce: str) -> None:
    """Used in the first of step 0, the last but one of step 1, none of step 3: used means used in the window."""
    assert_parity(Run(sharding, OncePerWindow, steps=5, micro_batches=3, reduce=reduce))


@over([LOCAL_STATES, UNEQUAL])
@pytest.mark.parametrize("reduce", ["two_level", "all_reduce"])
def test_ranks_take_different_branches(sharding: Sharding, reduce: str) -> None:
    """An expert has a gradient on two ranks and none on the others; the third expert has none anywhere."""
    assert_parity(Run(sharding, m.Routed, steps=4, micro_batches=2, reduce=reduce, adversarial=reduce == "two_level"))


def _mark_leaf(model: nn.Module) -> None:
    deepspeed.utils.set_z3_leaf_modules(model, [m.Experts])


@over(CUT)
def test_ranks_take_different_branches_inside_a_leaf_module(sharding: Sharding) -> None:
    """The whole leaf module is one unit, so every rank gathers and reduces all experts."""
    assert_parity(Run(sharding, m.Routed, steps=4, micro_batches=2, prepare=_mark_leaf))


@over([MIXED])
@pytest.mark.parametrize(
    "leaf",
    [
        {"classes": ["tests.semantics.modules.Experts"]},
        {"classes": ["Experts"]},
        {"names": ["mixture"]},
        {"name_suffixes": ["ixture"]},
    ],
    ids=lambda leaf: next(iter(leaf)),
)
def test_leaf_modules_named_in_the_config(sharding: Sharding, leaf: dict[str, list[str]]) -> None:
    assert_parity(Run(sharding, m.Routed, zero={"leaf_module": leaf}))


# ---- shapes and types --------------------------------------------------------------------------------------


def _poisoned(trainer: Any) -> None:
    """What torch.empty returns is NaN: padding that leaks into a norm, a state or a parameter shows at once."""
    from tests.semantics.harness import plain_loop

    if trainer.engine is not None:
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain_loop(trainer)
    finally:
        torch.use_deterministic_algorithms(False)


@short_spread
@pytest.mark.parametrize(("reduce", "publish"), [("two_level", "broadcast"), ("all_reduce", "all_gather")])
def test_odd_shapes(sharding: Sharding, reduce: str, publish: str) -> None:
    run = Run(
        sharding, m.Shapes, loop=_poisoned, micro_batches=2, clip=0.1, reduce=reduce, publish=publish, bucket_bytes=100
    )
    held = assert_parity(run, norm_rtol=1e-6)
    shapes = {name: value.shape for name, value in held[0].parameters.items()}
    assert shapes["scale"] == shapes["gain.value"] == () and shapes["nothing"] == (0, 4)
    assert shapes["empty.weight"] == (m.WIDTH, 0) and shapes["thirteen"] == (13, 1, 1)


@pair
def test_odd_shapes_in_bf16(sharding: Sharding) -> None:
    run = Run(sharding, m.Shapes, dtype=torch.bfloat16, optimizer="plain_sgd")
    assert_matches(on_ranks(run), reference(run), rtol=3e-2, atol=3e-2)


@trio
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_non_float_parameters_are_left_alone(sharding: Sharding, dtype: torch.dtype) -> None:
    """Ranks draw different codes; all train with rank 0's. The optimizer was given them, as users do."""
    run = Run(sharding, m.Quantised, dtype=dtype, different_seeds=True, optimizer="plain_sgd")
    held, want = on_ranks(run), reference(run)
    rough = 1e-5 if dtype is torch.float32 else 3e-2
    assert_matches(held, want, rtol=rough, atol=max(rough, 1e-6))
    for name in ("codes", "mask", "table"):
        assert same(held[0].parameters[name], want.parameters[name])


def _buffers(trainer: Any) -> dict[str, torch.Tensor]:
    saved = trainer.engine.module_state_dict()
    assert "scratch" not in saved and torch.equal(saved["frequency"], trainer.module.frequency)
    return {name: value.clone() for name, value in trainer.module.named_buffers()}


def _plain_deepspeed(run: Run) -> dict[str, torch.Tensor]:
    """The buffers of the same model after the same training under DeepSpeed's own engine."""
    config = {key: value for key, value in run.ds_config().items() if key != "amsp"}
    torch.manual_seed(7)
    model = run.model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank, world = dist.get_rank(), dist.get_world_size()
    from tests.semantics.harness import ROWS, batch

    for step in range(run.steps):
        rows = batch(step, 0, world)[rank * ROWS : (rank + 1) * ROWS].to(run.dtype)
        engine.backward(loss_of(engine(rows), rows))
    buffers = {name: value.clone() for name, value in engine.module.named_buffers()}
    engine.destroy()
    return buffers


@pair
@pytest.mark.parametrize(
    ("dtype", "policy"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "bf16")], ids=str
)
def test_buffers(sharding: Sharding, dtype: torch.dtype, policy: str | None) -> None:
    """Dtypes are those of DeepSpeed's own engine; integers are untouched; fp32 stays exact unless asked for."""
    from tests.support.pool import pool

    extra: dict[str, Any] = {"data_types": {"buffer_dtype": policy}} if policy else {}
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    theirs = pool(4).run(_plain_deepspeed, Run(UNEQUAL, m.Buffers, dtype=dtype, zero={"stage": 1}, extra=extra | sgd))
    held = on_ranks(Run(sharding, m.Buffers, dtype=dtype, extra=extra, observe=_buffers))
    assert_replicas_equal(held)
    for mine, other in zip(held, theirs, strict=True):
        assert {n: v.dtype for n, v in mine.seen.items()} == {n: v.dtype for n, v in other.items()}
        assert int(mine.seen["count"]) == 2**40 + 1 and int(mine.seen["norm.num_batches_tracked"]) == 3
        if policy is None:
            assert same(mine.seen["frequency"], torch.tensor([257.0, 1.0001]))


# ---- structure ---------------------------------------------------------------------------------------------


def _structured(trainer: Trainer) -> None:
    """The loss uses several parts of a nested output."""
    for step in range(trainer.run.steps):
        rows = trainer.rows(step, 0)
        output = trainer(rows)
        (inner,) = output.more["all"]
        loss = loss_of(output.hidden, rows) + 0.1 * inner.more["deep"][1][0].float().square().mean()
        trainer.losses.append(loss.item())
        trainer.backward(loss)
        trainer.step()


STRUCTURES = [m.Reused, m.Conditional, m.Borrowed, m.Lists, m.Custom]


@over([LOCAL_STATES, MIXED, ZERO3])
@pytest.mark.parametrize("model", STRUCTURES)
def test_structures(sharding: Sharding, model: type[nn.Module]) -> None:
    assert_parity(Run(sharding, model, steps=4, micro_batches=2, adversarial=model is m.Borrowed))


@trio
def test_nested_outputs(sharding: Sharding) -> None:
    assert_parity(Run(sharding, m.Nested, loop=_structured))


# ---- starting values ---------------------------------------------------------------------------------------


class Everything(m.Adapted):
    """Frozen and trained parts, a non-float parameter and a buffer, all drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-99, 99, (5,)), requires_grad=False)
        self.register_buffer("noise", torch.randn(3))


def _noise(trainer: OnRank) -> torch.Tensor:
    return trainer.module.noise.clone()


@short_spread
def test_ranks_with_different_seeds_start_from_rank_0(sharding: Sharding) -> None:
    held = assert_parity(Run(sharding, Everything, different_seeds=True, observe=_noise))
    torch.manual_seed(7)
    noise = Everything().noise
    for mine in held:
        assert same(mine.seen, noise)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return m.Plain()


def _start(trainer: OnRank) -> None:
    from tests.semantics.harness import plain_loop, whole_parameters

    trainer.notes.append(whole_parameters(trainer.engine))
    plain_loop(trainer)


@short_spread
def test_a_model_on_the_meta_device(sharding: Sharding) -> None:
    """Modules initialise themselves (reset_parameters); every replica has rank 0's values, and trains from them."""
    run = Run(sharding, on_meta, loop=_start, different_seeds=True)
    held = on_ranks(run)
    start = held[0].notes[0]
    for mine in held:
        assert all(same(value, mine.notes[0][name]) for name, value in start.items())
    for name in ("first.weight", "inner.weight", "last.bias"):
        bound = start[name.replace("bias", "weight")].shape[1] ** -0.5
        assert 0.3 * bound < start[name].abs().max() <= bound, "torch's own initialisation of a Linear"
    assert torch.equal(start["norm.weight"], torch.ones(m.WIDTH))
    model = m.Plain()
    model.load_state_dict(start)
    want = reference(run.but(loop=Run(sharding, m.Plain).loop), module=model)
    assert_matches(held, want)


class Bare(m.Plain):
    """A module that has a parameter of its own but cannot say what it starts as."""

    def __init__(self) -> None:
        super().__init__()
        self.secret = nn.Parameter(torch.ones(3))


def _bare_on_meta() -> nn.Module:
    with torch.device("meta"):
        return Bare()


@pair
def test_a_meta_parameter_that_nobody_can_initialise_is_refused(sharding: Sharding) -> None:
    errors = _errors(Run(sharding, _bare_on_meta))
    for error in errors:
        assert "Bare" in str(error) and "reset_parameters" in str(error), error


def _errors(run: Run) -> list[Exception]:
    """The run must fail on every rank, and soon."""
    errors = on_ranks(run, return_exceptions=True, timeout=30)
    assert all(isinstance(error, Exception) for error in errors), errors
    return errors


def _grow(model: nn.Module) -> None:
    model.inner = nn.Linear(m.WIDTH, m.WIDTH)


@pair
def test_surgery_before_initialize(sharding: Sharding) -> None:
    run = Run(sharding, m.Plain, prepare=_grow)
    torch.manual_seed(7)
    model = m.Plain()
    _grow(model)
    assert_matches(on_ranks(run), reference(run, module=model))


class MixedTypes(m.Base):
    """fp32 and fp64 side by side, also within one module."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(m.WIDTH, m.WIDTH).double()
        self.norm = nn.LayerNorm(m.WIDTH).double()
        self.inner = nn.Linear(m.WIDTH, m.WIDTH)
        self.inner.bias.data = self.inner.bias.data.double()

    def middle(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.wide(hidden.double()))).float()
        return hidden @ self.inner.weight + self.inner.bias.float()


class OneParameter(nn.Module):
    """Fewer tensors than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.1, 0.1, m.FEATURES))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return m.features(rows) * self.weight


@trio
@pytest.mark.parametrize("model", [MixedTypes, OneParameter])
def test_dtypes_side_by_side_and_more_ranks_than_tensors(sharding: Sharding, model: type[nn.Module]) -> None:
    assert_parity(Run(sharding, model, micro_batches=2, clip=0.3))
