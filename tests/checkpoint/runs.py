"""Training runs that are saved by one plan and loaded by another, and what the ranks report of them.

The batch of a step is the same for every number of ranks, so that a run may go on with more or fewer of them. The
reference is torch alone, in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROWS, LENGTH, VOCABULARY = 24, 4, 19
HALF, STEPS = 5, 10


class Net(nn.Module):
    """Tied head, odd shapes, a 0-dim parameter, a frozen layer, a non-float parameter, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.first = nn.Linear(12, 26)
        self.norm = nn.LayerNorm(26)
        self.fixed = nn.Linear(26, 26).requires_grad_(False)
        self.second = nn.Linear(26, 12, bias=False)
        self.head = nn.Linear(12, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.codes = nn.Parameter(torch.randint(1, 4, (12,), dtype=torch.int8), requires_grad=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.first(self.embed(tokens) * self.codes)
        hidden = torch.tanh(self.norm(hidden) + self.fixed(hidden)) * self.scale
        return self.head(self.second(hidden))


@dataclass(frozen=True)
class Spec:
    """A plan on a world. ``sharding``: as in the amsp block."""

    world: int
    node: int
    sharding: Any
    bf16: bool = False
    amsp: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    stage: int | None = None

    def but(self, **changes: Any) -> Spec:
        return replace(self, **changes)

    def __str__(self) -> str:
        factors = self.sharding
        if not isinstance(factors, str):
            factors = "/".join("x".join(map(str, factor)) for factor in factors)
        marks = [str(value) for value in self.amsp.values()] + ["bf16"] * self.bf16
        return "-".join([f"{self.world}r{self.node}", factors, *marks])

    def ds_config(self) -> dict[str, Any]:
        factors = self.sharding
        if isinstance(factors, str):
            stage = {"ddp": 1, "zero1": 1, "zero2": 2, "zero3": 3, "mics": 3}[factors]
        else:
            p, g, os = factors
            stage = 3 if p != (1, 1) else 2 if g != (1, 1) else 1
            factors = {"parameters": list(p), "gradients": list(g), "optimizer_states": list(os)}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS // self.world,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.7,
            "zero_optimization": {"stage": self.stage or stage},
            "scheduler": {"type": "StepLR", "params": {"step_size": 3, "gamma": 0.5}},
            "steps_per_print": 10**9,
            "amsp": {
                "sharding": factors, "bucket_bytes": 1000, "topology": {"gpus_per_node": self.node}, **self.amsp,
            },
            **self.extra,
        }  # fmt: skip
        if self.bf16:
            config["bf16"] = {"enabled": True}
        return config


def tokens(step: int) -> torch.Tensor:
    """[ROWS, LENGTH + 1] of one step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)


def loss_of(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Decaying and other parameters, as users make them, and a group that is empty."""
    decaying = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    return [
        {"params": others, "weight_decay": 0.0, "lr": 2e-2},
        {"params": []},
        {"params": decaying, "weight_decay": 0.1},
    ]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # eps is large where the update divides by the gradient's own size: the smallest gradients are rounding.
    return torch.optim.AdamW(groups_of(model), lr=1e-2, eps=1e-3)


def make_model(seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


@dataclass
class Reference:
    """One process: what it holds after HALF and after STEPS steps."""

    losses: list[float]
    rates: list[float]
    half: dict[str, dict[str, torch.Tensor]]
    end: dict[str, dict[str, torch.Tensor]]


def reference() -> Reference:
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    losses, rates, held = [], [], []
    for step in range(STEPS):
        rows = tokens(step)
        loss = loss_of(model(rows[:, :-1]), rows)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[-1]["lr"])
        if step + 1 in (HALF, STEPS):
            held.append(
                {
                    name: {key: value.detach().clone() for key, value in {"master": p, **optimizer.state[p]}.items()}
                    for name, p in model.named_parameters()
                    if p.requires_grad
                }
            )
    return Reference(losses, rates, *held)


# ---- on the ranks ------------------------------------------------------------------------------------------

Pieces = dict[tuple[str, int, int], dict[str, torch.Tensor]]


@dataclass
class Held:
    """What one rank has. pieces: master and states of what it owns, flat; working: whole working copies."""

    pieces: Pieces
    working: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    groups: list[dict[str, Any]]


def make_engine(spec: Spec, seed: int = 7) -> Any:
    import deepspeed

    import deepspeed_amsp  # noqa: F401  (installs the engine)

    model = make_model(seed)
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=spec.ds_config())
    return engine


def train_step(engine: Any, step: int) -> float:
    """The mean loss over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = tokens(step).chunk(world)[rank]
    loss = loss_of(engine(rows[:, :-1]), rows)
    engine.backward(loss)
    engine.step()
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total) / world


def held_by(engine: Any) -> Held:
    optimizer = engine.optimizer
    optimizer.wait_for_parameters()
    pieces: Pieces = {}
    for master in optimizer.states.all_masters():
        piece = master.slot.piece
        values = {"master": master.value.data, **optimizer.state.get(master.value, {})}
        pieces[piece.param.name, piece.start, piece.stop] = {
            key: value.detach().clone().flatten() for key, value in values.items()
        }
    working = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    for unit, whole in optimizer.gathered_units():
        for param, value in zip(unit.layout.params, whole, strict=True):
            working[param.name] = value.detach().clone()
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return Held(pieces, working, buffers, groups)


def merged(held: Sequence[Held]) -> dict[str, dict[str, torch.Tensor]]:
    """Name -> "master", states and "step", whole and flat; every element must be owned, and replicas bit-equal."""
    shapes = {name: value.shape for name, value in make_model().named_parameters()}
    result: dict[str, dict[str, torch.Tensor]] = {}
    for mine in held:
        for (name, start, stop), values in mine.pieces.items():
            numel = shapes[name].numel()
            for key, value in values.items():
                whole = result.setdefault(name, {})
                if value.numel() != stop - start or (key == "step" and numel > 1):
                    assert torch.equal(whole.setdefault(key, value), value), f"{key} of {name} differs"
                    continue
                into = whole.setdefault(key, torch.full((numel,), float("nan")))
                old = into[start:stop]
                assert torch.equal(old[~old.isnan()], value[~old.isnan()]), f"{key} of {name}: replicas differ"
                old.copy_(value)
    for name, whole in result.items():
        for key, value in whole.items():
            assert not value.isnan().any(), f"{key} of {name} has elements without an owner"
            whole[key] = value.view(shapes[name]) if value.numel() == shapes[name].numel() else value.view(())
    return result


@dataclass
class Told:
    """What one rank reports: losses of its steps, the rates after them, what it held at the save or load, and at the
    end."""

    losses: list[float]
    rates: list[float]
    then: Held
    end: Held
    counters: tuple[int, int]


def source(spec: Spec, folder: str) -> Told:
    """HALF steps, a save, and the rest of the steps."""
    engine = make_engine(spec)
    losses, rates = [], []
    then = None
    for step in range(STEPS):
        if step == HALF:
            engine.save_checkpoint(folder, client_state={"position": step, "spec": str(spec)})
            then = held_by(engine)
        losses.append(train_step(engine, step))
        rates.append(engine.get_lr()[-1])
    assert then is not None
    told = Told(losses, rates, then, held_by(engine), (engine.global_steps, engine.skipped_steps))
    engine.destroy()
    return told


def target(spec: Spec, folders: Sequence[str]) -> list[Told]:
    """Another beginning; then from each folder a load, and the rest of the steps."""
    engine = make_engine(spec, seed=99)
    # Other states than the saved ones, too, so that what a load leaves as it was is seen.
    train_step(engine, 50)
    told = []
    for folder in folders:
        path, client_state = engine.load_checkpoint(folder)
        assert path is not None and client_state["position"] == HALF
        then = held_by(engine)
        losses, rates = [], []
        for step in range(HALF, STEPS):
            losses.append(train_step(engine, step))
            rates.append(engine.get_lr()[-1])
        told.append(Told(losses, rates, then, held_by(engine), (engine.global_steps, engine.skipped_steps)))
    engine.destroy()
    return told
