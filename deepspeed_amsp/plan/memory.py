"""Bytes on the fullest rank of a plan, term by term: what a step holds at its fullest moment.

P is the working copy (1/s_p, shards padded), G gradients (the accumulation dtype), masters 4 bytes and moments what
the optimizer has an element, both for what the fullest owner really owns. Buffers are those of the executor, replayed
by `plan.residency`; activations are probed figures, or an estimate that `Memory.estimated` names. Not counted: what
the allocator keeps for itself, the runtime's own memory, and communicators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from deepspeed_amsp.plan.activations import ActivationBytes, activation_bytes
from deepspeed_amsp.plan.layout import Piece
from deepspeed_amsp.plan.owners import Geometry, geometry
from deepspeed_amsp.plan.residency import KINDS, WIDE, Residency
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.specs import ModelSpec, TrainSpec

P, G, MASTERS, MOMENTS = "P", "G", "masters", "moments"


class Term(NamedTuple):
    """A row of the account: what, how it is computed, and bytes at the peak."""

    name: str
    formula: str
    bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    owner: its number on the ``optim`` axis, that of the rank with most. at_rest: P, masters and moments; G between
    micro-batches ("G resting", 0 when there is one) and before the step ("G owned"). at_peak: all categories when
    their sum is largest, in ``phase``. phases: the largest sum of every phase. formulas: by category.
    estimated: what the activations are, where they were not measured; else None.
    """

    owner: int
    at_rest: Mapping[str, int]
    at_peak: Mapping[str, int]
    phase: str
    phases: Mapping[str, int]
    formulas: Mapping[str, str]
    estimated: str | None

    @property
    def peak(self) -> int:
        """The most bytes at one time."""
        return self.phases[self.phase]

    @property
    def model_states(self) -> int:
        """P, G, masters and moments at rest: the static part; G as it is where it is largest."""
        gradients = max(self.at_rest["G resting"], self.at_rest["G owned"])
        return gradients + sum(self.at_rest[name] for name in (P, MASTERS, MOMENTS))

    def terms(self) -> tuple[Term, ...]:
        """What the peak consists of, in a fixed order; categories that are empty then are left out."""
        return tuple(Term(name, self.formulas[name], size) for name, size in self.at_peak.items() if size)


def memory(model: ModelSpec, plan: Plan, train: TrainSpec) -> Memory:
    """Bytes on the fullest rank. With pipeline parallelism that is one of the fullest stage.

    The plan's data-parallel ranks are those that tensor and pipeline parallelism leave; each of them divides once.
    A plan that the engine refuses for its optimizer (whole tensors with s_p > 1) is counted as if it could.
    """
    shares = [_of_a_share(share, plan, train) for share in _shares(model, train)]
    return max(shares, key=lambda share: share.peak)


def _of_a_share(share: _Share, plan: Plan, train: TrainSpec) -> Memory:
    model = share.model
    places, activations = geometry(model, plan, train), activation_bytes(model, train)
    if not share.head:
        activations = replace(activations, outside=0, outside_gradient=0, outside_backward=0)
    rows = _state_bytes(places, train)
    per_gradient = train.gradient_bytes
    owner = max(range(places.owners), key=lambda o: (rows[o] + per_gradient * places.sections[o], -o))
    residency = Residency(model, plan, train, places, owner, activations, share.in_flight)
    masters = WIDE * places.owned[owner] if places.buckets else 0
    fixed = {P: train.parameter_bytes * sum(places.shards), MASTERS: masters, MOMENTS: rows[owner] - masters}
    peaks = residency.peaks()
    phases = {phase: sum(moment) + sum(fixed.values()) for phase, moment in peaks.moments.items()}
    phase = max(phases, key=lambda name: phases[name])
    changing = dict(zip(KINDS, peaks.moments[phase], strict=True))
    resting = sum(residency.kept) if train.micro_batches > 1 else 0
    return Memory(
        owner=owner,
        at_rest={**fixed, "G resting": resting, "G owned": sum(residency.owned)},
        at_peak={P: fixed[P], G: changing.pop(G), MASTERS: masters, MOMENTS: fixed[MOMENTS], **changing},
        phase=phase,
        phases=phases,
        formulas=_formulas(model, plan, train, places, owner, activations, phase),
        estimated=activations.estimated,
    )


def _state_bytes(places: Geometry, train: TrainSpec) -> list[int]:
    """By owner: bytes of masters and moments."""
    if train.optimizer.name != "adafactor":
        each = WIDE + train.optimizer.moments
        return [math.ceil(each * owned) for owned in places.owned] or [0]
    rows = [WIDE * owned for owned in places.owned] or [0]
    for bucket in places.buckets:
        for slot in bucket.slots:
            rows[slot.owner] += WIDE * _factored(slot.piece)
    return rows


def _factored(piece: Piece) -> int:
    """Elements of Adafactor's second moment: a row and a column of statistics for every matrix, else one each."""
    shape = piece.shape
    return piece.numel // shape[-1] + piece.numel // shape[-2] if len(shape) > 1 else piece.numel


class _Share(NamedTuple):
    """What a GPU has of the model, of how many micro-batches it keeps activations, and whether it has the head."""

    model: ModelSpec
    in_flight: int
    head: bool


def _shares(model: ModelSpec, train: TrainSpec) -> list[_Share]:
    """One share of every pipeline stage. A stage keeps as many micro-batches as there are stages from it to the end
    (one forward, one backward); the first has the embedding, the last has the head."""
    stages = model.stages(train.tensor_parallel, train.pipeline_parallel)
    count = len(stages)
    return [
        _Share(stage, min(count - number, train.micro_batches), number == count - 1)
        for number, stage in enumerate(stages)
    ]


def _formulas(
    model: ModelSpec,
    plan: Plan,
    train: TrainSpec,
    places: Geometry,
    owner: int,
    activations: ActivationBytes,
    phase: str,
) -> dict[str, str]:
    """How every category is computed, with sizes of elements and dtypes."""
    s, owned = plan.sharding, places.owned[owner] if places.buckets else 0
    width, accumulation = train.parameter_bytes, train.gradient_bytes
    even = sum(places.owned) // places.owners
    share = f"{owned:,} elements, the most of {places.owners} owners (an even share is {even:,})"
    names = {2: "bf16", 4: "fp32"}
    per_moment = "rows and columns of fp32 statistics" if train.optimizer.name == "adafactor" else ""
    kept = "recomputed, its inputs" if train.recompute else "kept"
    bucket = max(places.sizes, default=0)
    return {
        P: f"{width} B ({names[width]}) x {sum(places.shards):,} elements of {model.numel:,} (s_p {s.s_p}, padded)",
        G: f"{accumulation} B ({names[accumulation]}) x what rests in phase {phase!r} (s_g {s.s_g}, s_os {s.s_os}, "
        f"M {train.micro_batches}); of its owner {places.sections[owner] if places.buckets else 0:,} elements",
        MASTERS: f"4 B (fp32) x {share}",
        MOMENTS: per_moment or f"{train.optimizer.moments:g} B ({train.optimizer.name}) x {owned:,} elements",
        "gather buffers": f"{width} B x whole units in use, and ahead of use ({plan.prefetch_bytes:,} B in forward)",
        "reduce buffers": f"{width} B x units and buckets on their way; the largest bucket has {bucket:,} elements",
        "publish buffers": f"{width} B x {sum(places.sizes):,} elements of {len(places.buckets)} buckets "
        f"({plan.publish.value})",
        "activations": f"{train.micro_batch} x {train.sequence:,} tokens: {model.layers} layers x "
        f"{activations.kept:,} B ({kept}), {activations.outside:,} B of embedding, logits and loss"
        + (f" ({activations.estimated})" if activations.estimated else ""),
        "backward temporaries": f"at most {activations.layer_backward:,} B in a layer, "
        f"{activations.outside_backward:,} B in the loss, {width} B x a unit's gradient elsewhere",
        "step temporaries": f"4 B (fp32 gradient) x what its owner has of a bucket ({train.optimizer.name})",
    }
