"""Beside tensor and sequence parallelism: the engine is the data-parallel part, and the whole equals one process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from deepspeed_amsp.checkpoint.offline import open_archive
from deepspeed_amsp.cli.app import app
from deepspeed_amsp.data_parallel import DataParallel
from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from deepspeed_amsp.topology import Topology, TopologyError
from tests.config.trial import fp16_on_the_cpu
from tests.support import hybrid
from tests.support.models import SAMPLES, Outcome, batch, make_optimizer
from tests.support.pool import pool

ONE, TWO, PAIR = ShardFactor(1, 1), ShardFactor(2, 1), ShardFactor(1, 2)


@dataclass(frozen=True)
class Run:
    """A few steps on ``parts``-way tensor parallelism; ``per_node`` counts all ranks of a node."""

    sharding: Sharding
    parts: int = 2
    per_node: int = 4
    micro_batches: int = 2
    clip: float = 0.4
    steps: int = 3
    adversarial: bool = False
    block: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.sharding.s_dp * self.parts

    def ds_config(self) -> dict[str, Any]:
        return {
            "train_batch_size": SAMPLES * self.micro_batches * self.sharding.s_dp,
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_clipping": self.clip,
            "zero_optimization": {"stage": self.sharding.stage},
            "steps_per_print": 10**9,
            "amsp": {
                "sharding": self.sharding.as_dict(),
                "topology": {"gpus_per_node": self.per_node},
                "bucket_bytes": 1200,
                **self.block,
            },
            **self.extra,
        }


@dataclass
class Seen:
    """What a rank saw, and its part of the model: masters, and working copies, whole."""

    losses: list[float]
    norms: list[float]
    masters: dict[str, torch.Tensor]
    working: dict[str, torch.Tensor]
    groups: dict[str, tuple[int, ...]]
    notes: list[Any] = field(default_factory=list)


def engine_for(run: Run, model: nn.Module, **kwargs: Any) -> Any:
    import deepspeed

    import deepspeed_amsp  # noqa: F401
    from deepspeed_amsp import mesh

    mesh.GROUP_BACKEND = "adversarial" if run.adversarial else None
    if run.adversarial:
        from tests.support import adversarial

        adversarial.configure(seed=1234, max_delay_ms=1.0, enabled=True)
    optimizer = make_optimizer("adamw", model)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=run.ds_config(), **kwargs)[0]


def part_of_block(run: Run) -> tuple[Any, Any]:
    """(engine, mpu). Only the first data-parallel rank has the right values to begin with."""
    mpu = hybrid.Mpu(run.parts)
    model = hybrid.PartOfBlock(hybrid.seeded(hybrid.Block), mpu)
    if mpu.get_data_parallel_rank() > 0:
        for param in model.parameters():
            param.data.normal_()
    return engine_for(run, model, mpu=mpu), mpu


def my_rows(run: Run, mpu: Any, step: int, micro: int) -> torch.Tensor:
    first = mpu.get_data_parallel_rank() * SAMPLES
    return batch(step, micro, run.sharding.s_dp)[first : first + SAMPLES]


def train_step(engine: Any, run: Run, mpu: Any, step: int) -> float:
    total = torch.zeros(())
    for micro in range(run.micro_batches):
        loss = hybrid.block_loss(engine, my_rows(run, mpu, step, micro))
        engine.backward(loss)
        engine.step()
        total += loss.detach() / run.micro_batches
    dist.all_reduce(total, group=mpu.get_data_parallel_group())
    return float(total) / run.sharding.s_dp


def seen_by(engine: Any, losses: list[float], norms: list[float]) -> Seen:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    named = list(engine.module.named_parameters())
    masters = {name: safe_get_full_fp32_param(param).clone() for name, param in named}
    with deepspeed.zero.GatheredParameters([param for _, param in named]):
        working = {name: param.detach().clone() for name, param in named}
    mesh = engine.amsp.mesh
    groups = {name: getattr(mesh, name).ranks for name in ("world", "data_parallel", "model", "gather", "scalars")}
    return Seen(losses, norms, masters, working, groups)


def _train_parts(run: Run) -> Seen:
    engine, mpu = part_of_block(run)
    losses, norms = [], []
    for step in range(run.steps):
        losses.append(train_step(engine, run, mpu, step))
        norms.append(float(engine.get_global_grad_norm()))
    seen = seen_by(engine, losses, norms)
    seen.notes = [engine.train_batch_size(), engine.amsp.describe()]
    engine.destroy()
    if run.adversarial:
        from tests.support import adversarial

        adversarial.assert_all_waited()
    return seen


def assert_equals(seen: list[Seen], want: Outcome, parts: int) -> None:
    """Losses, norms and every parameter, put together from its parts; replicas are bit-equal."""
    for rank, mine in enumerate(seen):
        assert mine.norms == seen[0].norms, "all ranks have one norm"
        torch.testing.assert_close(mine.norms, want.norms, rtol=1e-5, atol=0)
        torch.testing.assert_close(mine.losses, want.losses, rtol=1e-5, atol=0)
        for kind in ("masters", "working"):
            first = getattr(seen[rank % parts], kind)
            for name, value in getattr(mine, kind).items():
                assert torch.equal(value, first[name]), f"rank {rank}: {name} differs from its replica"
                if name in want.parameters and name not in hybrid.CUT:
                    torch.testing.assert_close(value, want.parameters[name], rtol=1e-5, atol=1e-6)
    for name, axis in hybrid.CUT.items() if parts > 1 else ():
        for kind in ("masters", "working"):
            whole = torch.cat([getattr(mine, kind)[name] for mine in seen[:parts]], axis)
            torch.testing.assert_close(whole, want.parameters[name], rtol=1e-5, atol=1e-6)


# ---- tensor parallelism ------------------------------------------------------------------------------------

TWO_NODES = ShardFactor(2, 2)
RUNS = {
    # On two ranks of data parallelism, in one node and in two.
    "zero1": Run(Sharding(ONE, ONE, TWO, TWO)),
    "zero3 over nodes": Run(Sharding(PAIR, PAIR, PAIR, PAIR), per_node=2, adversarial=True),
    "ddp": Run(Sharding(ONE, ONE, ONE, TWO), clip=0.0, micro_batches=1),
    # On four, two of each node.
    "s_p 2, s_os 4": Run(Sharding(TWO, TWO, TWO_NODES, TWO_NODES), adversarial=True),
    "s_g 2, two stages": Run(
        Sharding(ONE, TWO, TWO_NODES, TWO_NODES), block={"hierarchical": True, "reduce": "all_reduce"}, clip=0.0
    ),
    "search": Run(Sharding(ONE, ONE, TWO, TWO), micro_batches=1, block={"sharding": "search"}),
    "four parts": Run(Sharding(TWO, TWO, TWO, TWO), parts=4, per_node=8),
}


@pytest.mark.parametrize("name", RUNS)
def test_tensor_parallel_equals_one_process(name: str) -> None:
    run = RUNS[name]
    seen = pool(run.world).run(_train_parts, run)
    whole = hybrid.seeded(hybrid.Block)
    want = hybrid.alone(whole, hybrid.block_loss, run.sharding.s_dp, run.micro_batches, run.steps, run.clip)
    assert_equals(seen, want, run.parts)
    data = [tuple(range(part, run.world, run.parts)) for part in range(run.parts)]
    for rank, mine in enumerate(seen):
        assert mine.groups["data_parallel"] == data[rank % run.parts]
        assert mine.groups["model"] == tuple(range(rank - rank % run.parts, rank - rank % run.parts + run.parts))
        assert len(mine.groups["gather"]) == run.sharding.s_p and set(mine.groups["gather"]) <= {
            *data[rank % run.parts]
        }
        assert sorted(mine.groups["world"]) == list(range(run.world))
        total, lines = mine.notes
        assert total == SAMPLES * run.micro_batches * run.sharding.s_dp
        assert any(f"{run.parts} data-parallel groups of {run.sharding.s_dp} ranks" in line for line in lines)


def _overflow_on_one_part(run: Run) -> list[tuple[float, int, float]]:
    """Infinite gradients on the last rank only, of a cut parameter and then of one that all parts have.

    Returns (loss scale, skipped steps, sum of this part's masters) after every step.
    """
    with fp16_on_the_cpu():
        engine, mpu = part_of_block(run)
        named = dict(engine.module.named_parameters())
        notes = []
        for step, name in enumerate((None, "up.weight", "norm.weight", None)):
            hook = None
            if name is not None and dist.get_rank() == run.world - 1:
                hook = named[name].register_hook(lambda gradient: gradient * float("inf"))
            train_step(engine, run, mpu, step)
            if hook is not None:
                hook.remove()
            masters = seen_by(engine, [], []).masters
            total = sum(float(value.double().abs().sum()) for value in masters.values())
            notes.append((engine.optimizer.loss_scale, engine.skipped_steps, total))
        engine.destroy()
    return notes


def test_an_overflow_on_one_part_skips_the_step_on_all() -> None:
    half = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    run = Run(Sharding(ONE, ONE, TWO, TWO), micro_batches=1, extra=half)
    for rank, notes in enumerate(pool(4).run(_overflow_on_one_part, run)):
        assert [(scale, skipped) for scale, skipped, _ in notes] == [(256, 0), (128, 1), (64, 2), (64, 2)], rank
        totals = [total for *_, total in notes]
        assert totals[0] == totals[1] == totals[2] != totals[3]


def _access(run: Run) -> dict[str, Any]:
    """Reading and writing whole values, and a replica that drifts, where names mean another tensor on each part."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    from deepspeed_amsp.verify import ReplicaMismatch, verify_replicas

    engine, mpu = part_of_block(run)
    loss = hybrid.block_loss(engine, my_rows(run, mpu, 0, 0))
    engine.backward(loss)
    named = dict(engine.module.named_parameters())
    gradients = {name: safe_get_full_grad(param).clone() for name, param in named.items()}
    engine.step()
    part, first = mpu.get_model_parallel_rank(), mpu.get_data_parallel_rank() == 0
    before = safe_get_full_fp32_param(named["up.weight"]).clone()
    with torch.no_grad(), deepspeed.zero.GatheredParameters([named["up.weight"]], modifier_rank=0):
        if first:
            named["up.weight"].add_(1.0 + part)
    change = safe_get_full_fp32_param(named["up.weight"]) - before
    mismatch = ""
    runtime = engine.amsp
    verify_replicas(runtime.units, runtime.comm, runtime.mesh, engine.device)
    if dist.get_rank() == run.world - 1:
        runtime.units[-1].piece_view(piece_of(engine)).add_(1.0)
    try:
        verify_replicas(runtime.units, runtime.comm, runtime.mesh, engine.device)
    except ReplicaMismatch as error:
        mismatch = str(error)
    engine.destroy()
    return {"gradients": gradients, "change": change, "mismatch": mismatch}


def piece_of(engine: Any) -> Any:
    """This rank's first piece of the last unit."""
    from deepspeed_amsp.plan.layout import shard_pieces

    unit = engine.amsp.units[-1]
    return next(iter(shard_pieces(unit.layout, unit.index, engine.amsp.mesh.coordinates.param)))


def test_whole_values_are_those_of_the_part() -> None:
    run = Run(Sharding(TWO, TWO, TWO_NODES, TWO_NODES), micro_batches=1, clip=0.0)
    seen = pool(8).run(_access, run)
    whole = hybrid.seeded(hybrid.Block)
    hybrid.block_loss(whole, batch(0, 0, 4)).backward()
    for name, param in whole.named_parameters():
        parts = [mine["gradients"].get(name) for mine in seen[:2]]
        want = param.grad
        got = torch.cat(parts, hybrid.CUT[name]) if name in hybrid.CUT else parts[0]  # type: ignore[arg-type]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    for rank, mine in enumerate(seen):
        torch.testing.assert_close(mine["change"], torch.full_like(mine["change"], 1.0 + rank % 2))
        # Of the shard that the last rank has, rank 3 has the copy, and rank 2 a shard of the other part.
        assert "head" in mine["mismatch"] and "7: " in mine["mismatch"] and "3: " in mine["mismatch"]
        assert "2: " not in mine["mismatch"]


def _disagree() -> None:
    from deepspeed_amsp.comm import Communicator
    from deepspeed_amsp.mesh import Mesh
    from deepspeed_amsp.schedule.agreement import Agreement

    mesh = Mesh(Sharding(TWO, TWO, TWO, TWO), orders=[(0, 2), (1, 3)], models=[(0, 1), (2, 3)])
    agreement = Agreement(["only here"], Communicator(), mesh.world_scalars, mesh.param_groups, torch.device("cpu"))
    agreement.issued("gather there" if dist.get_rank() == 3 else "gather here")
    vector, ticket = agreement.ask(late=("only here",) if dist.get_rank() == 1 else ())
    assert ticket is not None
    ticket.wait()
    assert agreement.late(vector.tolist()) == {"only here"}, "what one part decides, all decide"
    agreement.check(vector.tolist())


def test_ranks_of_one_part_that_diverge_stop_all_parts() -> None:
    errors = pool(4).run(_disagree, return_exceptions=True)
    assert {type(error).__name__ for error in errors} == {"DivergenceError"}
    assert all("gather here on rank 1; gather there on rank 3" in str(error) for error in errors)


# ---- checkpoints -------------------------------------------------------------------------------------------


def _saved_and_resumed(run: Run, other: Run, folder: str) -> tuple[Seen, list[str]]:
    """Two steps, a checkpoint, and the third step from it under another plan; and what is refused."""
    engine, mpu = part_of_block(run)
    losses, norms = [], []
    for step in range(2):
        losses.append(train_step(engine, run, mpu, step))
        norms.append(float(engine.get_global_grad_norm()))
    engine.save_checkpoint(folder, tag="two", client_state={"seen": 2})
    refused = [_refused(engine.save_16bit_model, folder)]
    engine.destroy()

    engine = engine_for(other, hybrid.PartOfBlock(hybrid.Block(), mpu), mpu=mpu)
    _, client = engine.load_checkpoint(folder)
    assert client == {"seen": 2} and engine.global_steps == 2
    losses.append(train_step(engine, other, mpu, 2))
    norms.append(float(engine.get_global_grad_norm()))
    seen = seen_by(engine, losses, norms)
    engine.destroy()

    from deepspeed.utils import groups

    groups.mpu = None  # the process has forgotten the parts
    plain = replace(run, sharding=Sharding(ONE, ONE, ONE, ShardFactor(4, 1)))
    engine = engine_for(plain, hybrid.Block())
    refused.append(_refused(engine.load_checkpoint, folder))
    engine.destroy()
    return seen, refused


def _refused(call: Any, folder: str) -> str:
    try:
        call(folder)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_checkpoint_holds_every_part(tmp_path: Path) -> None:
    run, other = RUNS["zero1"], Run(Sharding(TWO, TWO, TWO, TWO))
    found = pool(4).run(_saved_and_resumed, run, other, str(tmp_path))
    want = hybrid.alone(hybrid.seeded(hybrid.Block), hybrid.block_loss, 2, 2, 3, run.clip)
    assert_equals([seen for seen, _ in found], want, parts=2)
    for _, (whole, mismatch) in found:
        assert "mp_rank_00." in whole and "2 model-parallel parts, and here are 1" in mismatch
    shown = CliRunner().invoke(app, ["checkpoint", "show", str(tmp_path)]).output
    assert "written by 2 ranks [2, 1] of each of 2 model-parallel parts" in shown, shown
    manifest = open_archive(tmp_path).manifest
    assert {"mp_rank_00.up.weight", "mp_rank_01.up.weight", "mp_rank_01.norm.bias"} < manifest.names()
    assert "mp_rank_01.down.bias" not in manifest.names(), "the first part's alone"


# ---- sequence parallelism ----------------------------------------------------------------------------------


def _train_sequences(run: Run, over: int, how: str, folder: str) -> Seen:
    """Sequences over ``over`` neighbouring ranks; a checkpoint in the middle, which a new engine goes on from."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups

    kwargs: dict[str, Any] = {}
    if how == "mpu":
        for name in ("_SEQUENCE_PARALLEL_GROUP", "_SEQUENCE_DATA_PARALLEL_GROUP"):
            setattr(parallel_state_sp, name, None)  # those of an earlier job are gone
        parallel_state_sp.initialize_sequence_parallel(over)
        kwargs["mpu"] = parallel_state_sp
    else:
        kwargs["mesh_param"] = (run.sharding.s_dp // over, over)
    rank = dist.get_rank()
    part, replica = rank % over, rank // over
    rows, mine = slice(replica * SAMPLES, (replica + 1) * SAMPLES), hybrid.LENGTH // over
    columns = slice(part * mine, (part + 1) * mine)
    labels = slice(part * mine + 1, (part + 1) * mine + 1)
    losses, norms = [], []

    def engine_now() -> Any:
        model = hybrid.seeded(hybrid.Causal)
        engine = engine_for(run, model, **kwargs)
        model.attend = DistributedAttention(
            hybrid.Attend(), groups._get_sequence_parallel_group(), scatter_idx=2, gather_idx=1
        )
        return engine

    engine = engine_now()
    for step in range(run.steps):
        if step == 2:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = engine_now()
            engine.load_checkpoint(folder)
        total = torch.zeros(())
        for micro in range(run.micro_batches):
            tokens = batch(step, micro, run.sharding.s_dp // over)[rows]
            loss = hybrid.sequence_loss(engine(tokens[:, columns]), tokens[:, labels])
            engine.backward(loss)
            engine.step()
            total += loss.detach() / run.micro_batches
        dist.all_reduce(total)
        losses.append(float(total) / (run.sharding.s_dp // over))
        norms.append(float(engine.get_global_grad_norm()))
    seen = seen_by(engine, losses, norms)
    seen.notes = [engine.amsp.describe(), engine.train_batch_size()]
    engine.destroy()
    return seen


@pytest.mark.parametrize(
    ("how", "sharding"),
    [
        ("mpu", Sharding(TWO, TWO, ShardFactor(4, 1), ShardFactor(4, 1))),
        ("mesh", Sharding(ONE, TWO_NODES, TWO_NODES, TWO_NODES)),
    ],
)
def test_sequence_parallel_equals_one_process(how: str, sharding: Sharding, tmp_path: Path) -> None:
    """Parameters are whole on all ranks, so they are sharded over all of them; batch sizes count half as many."""
    batch_size = {"train_batch_size": SAMPLES * 2 * 2}
    run = Run(sharding, parts=1, per_node=sharding.data_parallel.s0, extra=batch_size)
    seen = pool(4).run(_train_sequences, run, 2, how, str(tmp_path))
    want = hybrid.alone(hybrid.seeded(hybrid.Causal), hybrid.causal_loss, 2, 2, 3, run.clip)
    assert_equals(seen, want, parts=1)
    for mine in seen:
        lines, total = mine.notes
        assert total == SAMPLES * 2 * 2
        assert any("added up over 4 ranks and divided by 2" in line for line in lines)


# ---- what cannot be ----------------------------------------------------------------------------------------


class Lacking(hybrid.Mpu):
    """Without two of its methods."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("get_data_parallel_rank", "get_model_parallel_group"):
            raise AttributeError(name)
        return super().__getattribute__(name)


class Piped(hybrid.Mpu):
    """On rank 2 alone."""

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 2 if self._rank == 2 else 1


class Raising(hybrid.Mpu):
    """As Megatron's, where rank 1 has not made its groups."""

    def get_model_parallel_group(self) -> Any:
        assert self._rank != 1, "model parallel group is not initialized"
        return super().get_model_parallel_group()


class Reversed(hybrid.Mpu):
    """Parts are counted from the last rank of a group on."""

    def get_model_parallel_rank(self) -> int:
        return self._parts - 1 - super().get_model_parallel_rank()


class UnderZeroInit(hybrid.Mpu):
    """Beside a model that zero.Init cuts over all ranks."""


class OnOneRank(hybrid.Mpu):
    """Rank 1 is told of another data-parallel group than it is in."""

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD if self._rank == 1 else super().get_data_parallel_group()


class Uneven(hybrid.Mpu):
    """Data-parallel groups of three ranks and of one."""

    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        three, one = dist.new_group([0, 1, 2]), dist.new_group([3])
        self._data = one if self._rank == 3 else three

    def get_data_parallel_world_size(self) -> int:
        return 1 if self._rank == 3 else 3


def _with_mpu(run: Run, kind: str) -> None:
    import deepspeed

    kinds = (hybrid.Mpu, Lacking, Piped, Raising, Reversed, UnderZeroInit, OnOneRank, Uneven)
    mpu = {one.__name__: one for one in kinds}[kind](run.parts)
    cut = kind == "UnderZeroInit"
    with deepspeed.zero.Init(config_dict_or_path=run.ds_config(), mpu=mpu) if cut else nullcontext():
        model = hybrid.Block()
    engine_for(run, model, mpu=mpu)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("Lacking", {}, ["mpu", "has no get_model_parallel_group, get_data_parallel_rank"]),
        ("Piped", {}, ["mpu", "on rank 2", "2 pipeline stages"]),
        ("Raising", {}, ["mpu", "on rank 1", "AssertionError", "model parallel group is not initialized"]),
        ("Reversed", {}, ["mpu", "model-parallel rank 1 of 2", "it is 0 of 2"]),
        ("UnderZeroInit", {}, ["mpu", "has cut gate", "data_parallel_group=mpu.get_data_parallel_group()"]),
        ("OnOneRank", {}, ["mpu", "on rank 1", "size is 2", "4 ranks"]),
        ("Uneven", {"extra": {"train_batch_size": None}}, ["[0 1 2] [3]", "differ in size"]),
        ("Mpu", {"per_node": 1, "parts": 4}, ["parameters", "W = 1"]),
        ("Mpu", {"extra": {"train_batch_size": 18}}, ["train_batch_size", "2 GPUs"]),
        ("Mpu", {"extra": {"tensor_parallel": {"autotp_size": 2}}}, ["tensor_parallel.autotp_size", "mpu"]),
        ("Mpu", {"extra": {"sequence_parallel_size": 2}}, ["sequence_parallel_size", "is 2", "over 1 ranks"]),
    ],
)
def test_one_error_on_every_rank(kind: str, changes: dict[str, Any], words: list[str]) -> None:
    run = replace(Run(Sharding(TWO, TWO, TWO, TWO)), **changes)
    errors = pool(4).run(_with_mpu, run, kind, return_exceptions=True)
    texts = {str(error) for error in errors}
    assert all(isinstance(error, ValueError) for error in errors) and len(texts) == 1, errors
    for word in words:
        assert word in next(iter(texts)), f"{word!r} is missing in: {texts}"


def test_groups_that_lie_unevenly_on_the_nodes() -> None:
    """Said without ranks: who is where is arithmetic."""
    share = DataParallel(((0, 1, 2, 4), (3, 5, 6, 7)), ((0, 3), (1, 5), (2, 6), (4, 7)), rank=0)
    with pytest.raises(TopologyError, match=r"ranks \[0, 1, 2, 4\].*unevenly.*node 0: 3, node 1: 1"):
        share.topology(Topology(8, 4))
    assert share.topology(Topology(8, 8)) == Topology(4, 4)
    crossed = DataParallel(((0, 1, 4, 5), (2, 3, 6, 7)), ((0, 2), (1, 3), (4, 6), (5, 7)), rank=6)
    assert crossed.topology(Topology(8, 4)) == Topology(4, 2) and crossed.part == 1
    zero1 = Sharding(ONE, ONE, TWO_NODES, TWO_NODES)
    assert crossed.orders(Topology(8, 4), zero1) == crossed.groups
    apart = DataParallel(((0, 1), (2, 3)), ((0, 2), (1, 3)), rank=0)
    with pytest.raises(TopologyError, match=r"\[0 1 2 3\] \[0 2\], do not hold each of ranks 0 to 3 once"):
        replace(apart, groups=((0, 1, 2, 3), (0, 2)), models=((0, 1), (2,), (3,)))  # rank 0 alone was given an mpu
    with pytest.raises(TopologyError, match="must have one rank of each data-parallel group"):
        replace(apart, models=((0, 1), (2, 3)))
    with pytest.raises(TopologyError, match="differ in how many"):
        DataParallel(((0, 1), (2, 4), (3, 5)), ((0, 2, 3), (1, 4, 5)), rank=0).topology(Topology(6, 3))
