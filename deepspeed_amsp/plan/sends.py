"""What a plan sends in a step, with durations by a profile: what the replay puts on its clocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from deepspeed_amsp.plan.owners import geometry
from deepspeed_amsp.plan.profile import Profile
from deepspeed_amsp.plan.resolve import Plan
from deepspeed_amsp.plan.routes import Routes, Stages, buckets
from deepspeed_amsp.plan.specs import ModelSpec, TrainSpec

NODE, CROSS = 0, 1


class Stage(NamedTuple):
    """One stage of what is sent: on which link, how long it takes, and for how much of that it keeps the link from
    what comes next (`Profile.busy`). host: seconds that issuing and awaiting it keeps computation, if it does."""

    link: int
    seconds: float
    busy: float
    host: float


Timed = list[Stage]


@dataclass(frozen=True)
class Sends:
    """Durations of everything a plan sends, and the sizes that decide when.

    members: by bucket, how many units. updates: by bucket, elements (see `owners.Geometry`). recomputed: by unit, the
    run of units of its layer if that is recomputed, else an empty one. backward_starts: the first unit that the
    backward reaches, behind frozen ones.
    """

    gather: list[Timed]
    gathered_bytes: list[float]
    param_reduce: list[Timed]
    members: list[int]
    partial: list[Timed]
    final: list[Timed]
    publish: list[Timed]
    updates: tuple[int, ...]
    scalars: Timed
    recomputed: list[range]
    bucket_of: list[int | None]
    backward_starts: int

    @property
    def buckets(self) -> int:
        return len(self.members)


def _timed(stages: Stages, profile: Profile) -> Timed:
    timed: Timed = []
    for message in stages:
        what = message.op, message.size, message.mesh
        link = CROSS if message.mesh.s1 > 1 else NODE
        # Interpolated apart from each other, so that the two may cross.
        seconds = profile.time(*what)
        figures = (seconds, min(profile.busy(*what), seconds), profile.host_seconds or 0.0)
        timed.append(Stage(link, *(message.copies * value for value in figures)))
    return timed


def sends_of(model: ModelSpec, plan: Plan, train: TrainSpec, profile: Profile) -> Sends:
    """Durations by the profile. Raises ProfileError for a group outside its data."""
    routes, wire = Routes(plan), train.parameter_bytes

    @cache
    def unit(size: float) -> tuple[Timed, Timed]:
        return _timed(routes.gather(size), profile), _timed(routes.param_reduce(size), profile)

    @cache
    def reduced(size: float) -> tuple[Timed, Timed]:
        return _timed(routes.partial(size), profile), _timed(routes.final(size), profile)

    @cache
    def published(size: float, gathered: bool) -> Timed:
        return _timed(routes.publish(size, gathered), profile)

    made, places = buckets(model, plan, train), geometry(model, plan, train)
    sizes = [wire * float(member.numel) for member in model.units]
    bucket_of: list[int | None] = [None] * len(model.units)
    for index, bucket in enumerate(made):
        for member in bucket.units:
            bucket_of[member] = index
    layers = model.ranges
    return Sends(
        gather=[unit(size)[0] for size in sizes],
        gathered_bytes=sizes,
        param_reduce=[unit(size)[1] if u.trainable_numel else [] for size, u in zip(sizes, model.units, strict=True)],
        members=[len(bucket.units) for bucket in made],
        partial=[reduced(bucket.reduced)[0] for bucket in made],
        final=[reduced(bucket.reduced)[1] for bucket in made],
        publish=[published(bucket.published, bucket.gathered) for bucket in made],
        updates=places.updates_forward if train.gradient_clipping else places.updates_backward,
        scalars=_timed(routes.scalars(), profile),
        recomputed=[
            layers[unit.layer] if train.recompute and unit.layer is not None else range(0) for unit in model.units
        ],
        bucket_of=bucket_of,
        backward_starts=model.backward_starts(train.recompute),
    )
