"""save_checkpoint and load_checkpoint of one plan; tests/checkpoint goes from plan to plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_amsp.plan.factors import Sharding
from tests.engine.test_training import SPREAD, make_case, spread
from tests.support import models
from tests.support.jobs import Case, make_engine, report_of, train_step
from tests.support.pool import RankError, pool

SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 6},
}


def _straight(case: Case) -> Any:
    engine = make_engine(case)
    losses = [train_step(engine, case, step) for step in range(6)]
    report = report_of(engine, losses, [engine.get_lr()[0], engine.global_steps])
    engine.destroy()
    return report


def _resumed(case: Case, folder: str, load_with: Case) -> Any:
    engine = make_engine(case)
    losses = [train_step(engine, case, step) for step in range(3)]
    engine.save_checkpoint(folder, client_state={"position": 3})
    after = train_step(engine, case, 3)  # saving must not disturb the run that saves
    engine.destroy()

    engine = make_engine(load_with)
    # Other weights and states than the saved ones, so that a load that does nothing is seen.
    train_step(engine, load_with, 50)
    path, client_state = engine.load_checkpoint(folder)
    assert path is not None and client_state["position"] == 3
    losses += [train_step(engine, load_with, step) for step in range(3, 6)]
    assert losses[3] == pytest.approx(after, rel=1e-6)
    report = report_of(engine, losses, [engine.get_lr()[0], engine.global_steps])
    engine.destroy()
    return report


@pytest.mark.parametrize(("sharding", "bf16"), [(s, bool(n % 2)) for n, s in enumerate(SPREAD)], ids=str)
def test_resuming_equals_going_on(sharding: Sharding, bf16: bool, tmp_path: Path) -> None:
    case = make_case(sharding, bf16=bf16, extra={"scheduler": SCHEDULER})
    straight = pool(4).run(_straight, case)
    resumed = pool(4).run(_resumed, case, str(tmp_path), case)
    for one, other in zip(straight, resumed, strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        assert all(torch.equal(value, other.masters[piece]) for piece, value in one.masters.items())
        for name, value in (one.parameters | one.shards).items():
            assert torch.equal(value, (other.parameters | other.shards)[name]), name


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model.pt").touch()
    (tmp_path / "latest").write_text("theirs")
    ours = Case(amsp={"sharding": "zero1", "topology": {"gpus_per_node": 2}}, stage=1)
    with pytest.raises(RankError, match="no checkpoint that this version of an amsp engine wrote"):
        pool(2).run(_load, ours, str(tmp_path))


def test_a_folder_without_checkpoints_loads_nothing_as_in_deepspeed(tmp_path: Path) -> None:
    ours = Case(amsp={"sharding": "zero1", "topology": {"gpus_per_node": 2}}, stage=1)
    assert pool(2).run(_load, ours, str(tmp_path)) == [(None, None)] * 2


def _save(case: Case, folder: str) -> None:
    engine = make_engine(case)
    train_step(engine, case, 0)
    engine.save_checkpoint(folder, tag="here")
    engine.destroy()


def _load(case: Case, folder: str) -> tuple[Any, Any]:
    engine = make_engine(case)
    try:
        path, state = engine.load_checkpoint(folder)
        return path, state
    finally:
        engine.destroy()


def test_every_byte_is_written_once_and_the_plan_is_readable(tmp_path: Path) -> None:
    """(2,1) for all three on 2x2: two replicas of two ranks, which share the writing."""
    from deepspeed_amsp.plan.factors import ShardFactor

    node = ShardFactor(2, 1)
    pool(4).run(_save, make_case(Sharding(node, node, node, ShardFactor(2, 2))), str(tmp_path))
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    data = [f"__{rank}_0.distcp" for rank in range(4)]
    assert names == [".metadata", *data, "amsp_checkpoint.json", "amsp_state.pt"]
    about = json.loads((tmp_path / "here" / "amsp_checkpoint.json").read_text())
    assert about["plan"]["world_size"] == 4 and about["plan"]["sharding"]["optimizer_states"] == [2, 1]
    numel = {name: p.numel() for name, p in models.make_model("mlp").named_parameters()}
    kinds = ("master", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    stored = {key: torch.Size(shape).numel() for key, (shape, _) in about["tensors"].items()}
    assert stored == {f"{kind}/{name}": count for kind in kinds for name, count in numel.items()}
    blocks = torch.distributed.checkpoint.FileSystemReader(str(tmp_path / "here")).read_metadata().state_dict_metadata
    for key, count in stored.items():
        assert sum(chunk.sizes[0] for chunk in blocks[key].chunks) == count


def _load_weights_only(case: Case, folder: str) -> Any:
    engine = make_engine(case)
    train_step(engine, case, 0)
    engine.save_checkpoint(folder)
    saved = report_of(engine, [], [])
    train_step(engine, case, 1)
    engine.load_checkpoint(folder, load_module_only=True)
    loaded = report_of(engine, [], [])
    steps = engine.global_steps
    engine.destroy()
    return saved, loaded, steps


@spread
def test_loading_only_the_module_refreshes_the_masters(sharding: Sharding, tmp_path: Path) -> None:
    for saved, loaded, steps in pool(4).run(_load_weights_only, make_case(sharding), str(tmp_path)):
        assert all(
            torch.equal(v, (loaded.parameters | loaded.shards)[n]) for n, v in (saved.parameters | saved.shards).items()
        )
        assert all(torch.equal(v, loaded.masters[p]) for p, v in saved.masters.items())
        assert steps == 2, "counters are not loaded with load_module_only"


def _sixteen_bit(case: Case, folder: str) -> Any:
    engine = make_engine(case)
    train_step(engine, case, 0)
    engine.save_16bit_model(folder)
    report = report_of(engine, [], [])
    engine.destroy()
    return report


@spread
def test_save_16bit_model_writes_whole_weights(sharding: Sharding, tmp_path: Path) -> None:
    from tests.parity.merge import working_copies

    case = make_case(sharding, bf16=True, zero={"stage3_gather_16bit_weights_on_model_save": True})
    reports = pool(4).run(_sixteen_bit, case, str(tmp_path))
    written = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    model = models.make_model(case.model)
    assert written.keys() == model.state_dict().keys()
    for name, value in working_copies(reports, model).items():
        assert torch.equal(written[name], value), name
