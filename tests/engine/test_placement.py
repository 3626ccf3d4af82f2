"""An engine whose rank grid takes the nodes in the order of leaf switches: groups, parity, checkpoints, refusals.

Four ranks play four hosts a, b, c, d with one GPU each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_amsp.plan.factors import ShardFactor, Sharding
from tests.engine.test_bad_input import _initialize, refused
from tests.engine.test_checkpoint import _resumed, _straight
from tests.engine.test_seam import config
from tests.engine.test_training import assert_parity, make_case, reference
from tests.support import models
from tests.support.jobs import Case, make_engine, train, train_step
from tests.support.pool import pool

HOSTS = ("a", "b", "c", "d")
ALTERNATING = [["a", "c"], ["b", "d"]]
CROSSED = [["a", "d"], ["b", "c"]]
ORDERS = {"alternating": (0, 2, 1, 3), "crossed": (0, 3, 1, 2)}
TABLES = {"alternating": ALTERNATING, "crossed": CROSSED}
BACKWARDS = (2, 3, 1, 0)
"""No table leads to it; rank 0 is last, and groups are in no ascending order."""

NODES = ShardFactor(1, 4)
ONE, TWO = ShardFactor(1, 1), ShardFactor(1, 2)
PLANS = [
    Sharding(ONE, TWO, NODES, NODES),
    Sharding(TWO, TWO, TWO, NODES),
    Sharding(TWO, NODES, NODES, NODES),
    Sharding(ONE, ONE, TWO, NODES),
]
plans = pytest.mark.parametrize("sharding", PLANS, ids=str)
tables = pytest.mark.parametrize("table", list(TABLES))


def case(sharding: Sharding, table: Any = None, **overrides: Any) -> Case:
    made = make_case(sharding, **overrides)
    made.amsp["topology"] = {"gpus_per_node": 1, "leaf_switches": table}  # type: ignore[index]
    return made


def on_hosts(job: Callable[..., Any], *args: Any, hosts: Sequence[str] = HOSTS) -> Any:
    """The job, on ranks that seem to run on ``hosts``."""
    with mock.patch("deepspeed_amsp.engine.host_names", return_value=list(hosts)):
        return job(*args)


def backwards(job: Callable[..., Any], *args: Any) -> Any:
    """The job, with the nodes placed as in BACKWARDS."""
    with mock.patch("deepspeed_amsp.data_parallel.place_nodes", return_value=BACKWARDS):
        return job(*args)


# ---- groups ------------------------------------------------------------------------------------------------


def _groups(given: Case) -> dict[str, tuple[int, ...]]:
    engine = make_engine(given)
    mesh = engine.amsp.mesh
    names = ("gather", "inner", "publish", "replicate", "data", "scalars", "world")
    found = {}
    for name in names:
        group = getattr(mesh, name)
        group = getattr(group, "flat", group)
        found[name] = group.ranks
        assert group.ranks[group.index] == dist.get_rank()
        if group.handle is not None:
            assert tuple(dist.get_process_group_ranks(group.handle)) == group.ranks
            assert dist.get_rank(group.handle) == group.index
    engine.destroy()
    return found


def test_groups_are_under_one_switch_where_they_can() -> None:
    """P over two nodes, G and OS over all: pairs under one switch, and rings that go round in grid order."""
    found = pool(4).run(on_hosts, _groups, case(PLANS[2], CROSSED))
    pairs = {0: (0, 3), 3: (0, 3), 1: (1, 2), 2: (1, 2)}
    assert {rank: groups["gather"] for rank, groups in enumerate(found)} == pairs
    # One of each pair, those that hold the same shard; the second group is not in ascending order.
    across = {0: (0, 1), 1: (0, 1), 3: (3, 2), 2: (3, 2)}
    for axis in ("inner", "publish", "data"):
        assert {rank: groups[axis] for rank, groups in enumerate(found)} == across
    assert {groups["world"] for groups in found} == {(0, 3, 1, 2)} == {groups["scalars"] for groups in found}


def test_replicas_of_optimizer_states_are_under_one_switch() -> None:
    found = pool(4).run(on_hosts, _groups, case(PLANS[3], ALTERNATING))
    assert [groups["publish"] for groups in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [groups["replicate"] for groups in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert {groups["data"] for groups in found} == {(0, 2, 1, 3)}


def test_whole_nodes_move_together() -> None:
    given = make_case(Sharding(ShardFactor(2), ShardFactor(2), ShardFactor(2, 2), ShardFactor(2, 4)))
    given.amsp["topology"] = {"gpus_per_node": 2, "leaf_switches": ALTERNATING}  # type: ignore[index]
    hosts = [host for host in HOSTS for _ in range(2)]
    found = pool(8).run(_groups_on, given, hosts)
    assert {groups["gather"] for groups in found} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {groups["publish"] for groups in found} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert {groups["scalars"] for groups in found} == {(0, 1, 4, 5), (2, 3, 6, 7)}


def _groups_on(given: Case, hosts: Sequence[str]) -> Any:
    return on_hosts(_groups, given, hosts=hosts)


# ---- training ----------------------------------------------------------------------------------------------


def _check(reports: list[Any], given: Case) -> None:
    assert_parity(reports, given)
    want = reference(given)
    for report in reports:
        torch.testing.assert_close(report.losses, want.losses, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(report.norms, want.norms, rtol=1e-6, atol=0.0)


@plans
@tables
@pytest.mark.parametrize("modes", [("two_level", "broadcast"), ("all_reduce", "all_gather")], ids="-".join)
def test_parity(sharding: Sharding, table: str, modes: tuple[str, str]) -> None:
    given = case(
        sharding, TABLES[table], reduce=modes[0], publish=modes[1], micro_batches=3, adversarial=table == "crossed"
    )
    given.amsp["verify_every"] = 1  # type: ignore[index]
    reports = pool(4).run(on_hosts, train, given)
    _check(reports, given)
    at = [report.coordinates for report in reports]
    assert sorted(at, key=lambda place: ORDERS[table].index(at.index(place))) == sorted(at)


def _other_seeds(given: Case) -> Any:
    make = models.make_model

    def seeded(name: str, seed: int = 7) -> Any:
        return make(name, seed + dist.get_rank())

    with mock.patch.object(models, "make_model", seeded):
        return train(given)


@plans
def test_initial_values_are_those_of_rank_0_wherever_it_stands(sharding: Sharding) -> None:
    given = case(sharding, micro_batches=1)
    reports = pool(4).run(backwards, _other_seeds, given)
    assert reports[0].coordinates == max(report.coordinates for report in reports), "rank 0 is last"
    _check(reports, given)


def _read_everything(given: Case) -> dict[str, torch.Tensor]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    engine = make_engine(given)
    train_step(engine, given, 0)
    seen = {}
    for name, param in engine.module.named_parameters():
        seen[name] = safe_get_full_fp32_param(param).clone()
        safe_set_full_fp32_param(param, seen[name] + 1)
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.equal(param.data, seen[name] + 1)
    engine.destroy()
    return seen


@plans
def test_whole_values_can_be_read_and_written(sharding: Sharding) -> None:
    given = case(sharding, steps=1)
    plain = pool(4).run(_read_everything, given)
    placed = pool(4).run(backwards, _read_everything, given)
    for one, other in zip(plain, placed, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def _diverge(rank: int) -> None:
    from deepspeed_amsp.comm import Communicator
    from deepspeed_amsp.mesh import Mesh
    from deepspeed_amsp.schedule.agreement import Agreement

    mesh = Mesh(Sharding(TWO, TWO, TWO, NODES), orders=[BACKWARDS])
    agreement = Agreement([], Communicator(), mesh.world_scalars, mesh.param_groups, torch.device("cpu"))
    agreement.issued("gather there" if dist.get_rank() == rank else "gather here")
    vector, ticket = agreement.ask(late=())
    assert ticket is not None
    ticket.wait()
    agreement.check(vector.tolist())


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0), (2, 3), (3, 2)])
def test_a_rank_that_runs_other_modules_is_named(rank: int, other: int) -> None:
    for error in pool(4).run(_diverge, rank, return_exceptions=True):
        assert f"gather there on rank {rank}" in str(error) and f"gather here on rank {other}" in str(error)


# ---- checkpoints -------------------------------------------------------------------------------------------


@plans
def test_resuming_with_the_same_table_equals_going_on(sharding: Sharding, tmp_path: Path) -> None:
    given = case(sharding, CROSSED)
    straight = pool(4).run(on_hosts, _straight, given)
    resumed = pool(4).run(on_hosts, _resumed, given, str(tmp_path), given)
    for one, other in zip(straight, resumed, strict=True):
        assert one.losses[:6] == other.losses[:6]
        assert all(torch.equal(value, other.masters[piece]) for piece, value in one.masters.items())
        for name, value in (one.parameters | one.shards).items():
            assert torch.equal(value, (other.parameters | other.shards)[name]), name


@pytest.mark.parametrize("table", [None, ALTERNATING])
def test_resuming_with_another_table(table: Any, tmp_path: Path) -> None:
    """Pieces go to other ranks, which makes no difference but in the order of sums."""
    written, read = case(PLANS[1], CROSSED), case(PLANS[1], table)
    straight = pool(4).run(on_hosts, _straight, written)
    resumed = pool(4).run(on_hosts, _resumed, written, str(tmp_path), read)
    masters = {piece: value for report in straight for piece, value in report.masters.items()}
    for one, other in zip(straight, resumed, strict=True):
        torch.testing.assert_close(other.losses, one.losses, rtol=1e-6, atol=0.0)
        for piece, value in other.masters.items():
            torch.testing.assert_close(value, masters[piece], rtol=1e-6, atol=1e-6)


# ---- bad input ---------------------------------------------------------------------------------------------


def _given(table: Any) -> dict[str, Any]:
    return config(amsp={"sharding": "zero1", "topology": {"gpus_per_node": 1, "leaf_switches": table}})


def _on_hosts(ds_config: dict[str, Any]) -> Any:
    return on_hosts(_initialize, ds_config)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([["a", "c"], ["b"]], ["misses d"]),
        ([["a", "c"], ["b", "d", "e"]], ["names e, which no rank runs on"]),
        ([["a", "c"], ["b", "d", "a"]], ["names a more than once"]),
        ([["a", "c"], [], ["b", "d"]], ["leaf switch without a host"]),
        ("/no/such/switches", ["/no/such/switches", "No such file"]),
    ],
)
def test_a_wrong_table(table: Any, words: list[str]) -> None:
    refused(_given(table), "amsp.topology.leaf_switches", *words, job=_on_hosts)


def test_a_table_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "switches"
    path.write_text("a d  # left\nb c\n")
    assert pool(4).run(_on_hosts, _given(str(path))) == ["AMSPEngine"] * 4
    found = pool(4).run(on_hosts, _groups, case(PLANS[1], str(path)))
    assert [groups["gather"] for groups in found] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    path.write_text("a d\nb c x\n")
    refused(_given(str(path)), f"amsp.topology.leaf_switches ({path}) names x", job=_on_hosts)
    path.write_text("a d\nb c c\n")
    refused(_given(str(path)), str(path), "line 2", "c was named in line 2 already", job=_on_hosts)


def _different(tables: Sequence[Any]) -> Any:
    return on_hosts(_initialize, _given(tables[dist.get_rank()]))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([CROSSED, CROSSED, ALTERNATING, CROSSED], ["on ranks 0, 1, 3", "[['a', 'c'], ['b', 'd']] on rank 2"]),
        ([CROSSED, None, CROSSED, CROSSED], ["on ranks 0, 2, 3", "none on rank 1"]),
        ([CROSSED, CROSSED, CROSSED, "/no/such/switches"], ["On rank 3", "/no/such/switches", "No such file"]),
    ],
)
def test_a_table_that_is_not_the_same_on_every_rank(tables: Any, words: list[str]) -> None:
    refused(tables, "amsp.topology.leaf_switches", *words, job=_different)


def _old_torch(ds_config: dict[str, Any]) -> Any:
    make = dist.new_group

    def sorting(ranks: Any = None, timeout: Any = None, backend: Any = None) -> Any:
        return make(ranks, timeout, backend)

    with mock.patch.object(dist, "new_group", sorting):
        return _on_hosts(ds_config)


def test_a_torch_that_sorts_ranks() -> None:
    refused(_given(ALTERNATING), "sort_ranks", "newer torch", "amsp.topology.leaf_switches", job=_old_torch)
    assert pool(4).run(_old_torch, _given([["a", "b"], ["c", "d"]])) == ["AMSPEngine"] * 4
