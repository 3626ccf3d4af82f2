"""Ask the planner from Python, in the words of ``amsp plan``.

    from deepspeed_amsp.plan.api import plan

    found = plan("llama-7b", nodes=16, gpus_per_node=8, gpu_memory=80, global_batch_tokens=4_194_304)
    print(found.best.plan.describe(), found.best.step.seconds)

A module of your own becomes a model by `deepspeed_amsp.probe.probe_factory`, which needs torch; this file does not.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from deepspeed_amsp.plan.builtin_profiles import BUILTIN, find_profile
from deepspeed_amsp.plan.factors import PRESETS, ShardFactor, Sharding, preset
from deepspeed_amsp.plan.models import PAPER_MODELS, load_model
from deepspeed_amsp.plan.profile import Profile
from deepspeed_amsp.plan.solver import Modes, Objective, Problem, Search, alternatives, search
from deepspeed_amsp.plan.specs import (
    GB,
    GRADIENT_BYTES,
    OPTIMIZERS,
    ClusterSpec,
    ModelSpec,
    SpecError,
    TrainSpec,
    micro_batches,
)

AUTO = "auto"
LARGEST_GPU_GB = 2_000
"""More than any GPU has, less than the MB of the smallest: what is above was not meant in GB."""


MOST_GPUS = 1_000_000
"""Above, finding the divisors alone takes long; no cluster has so many."""

LARGEST_COUNT = 10**15
"""Of anything else that is counted."""


class RequestError(SpecError):
    """An argument that makes no sense. ``argument`` is its name in `plan`, ``reason`` what is wrong with it."""

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(f"{argument}: {reason}")
        self.argument = argument
        self.reason = reason


def choice(argument: str, value: object, legal: Iterable[str]) -> str:
    """The value, if it is one of ``legal``.

    Raises:
        RequestError: it is not; names the nearest.
    """
    names = list(legal)
    if isinstance(value, str) and value in names:
        return value
    raise RequestError(argument, f"{value!r} is not one of {_listed(value, names)}")


def _listed(value: object, names: Iterable[str]) -> str:
    """All names, and which of them was probably meant."""
    legal = list(names)
    nearest = difflib.get_close_matches(str(value).lower(), legal, n=1, cutoff=0.0)[0]
    return f"{', '.join(legal)}; did you mean {nearest}?"


def memory_bytes(argument: str, gigabytes: float) -> float:
    """GB of a GPU in bytes.

    Raises:
        RequestError: not a number above 0, or MB or bytes by the look of it.
    """
    if isinstance(gigabytes, bool) or not isinstance(gigabytes, (int, float)) or not 0 < gigabytes < math.inf:
        raise RequestError(argument, f"must be a number of GB above 0, not {gigabytes!r}.")
    if gigabytes > LARGEST_GPU_GB:
        unit, per_gb = ("MB", 1e3) if gigabytes < 1e8 else ("bytes", 1e9)
        raise RequestError(
            argument, f"{gigabytes:g} looks like {unit}; it is in GB (1e9 bytes): {gigabytes / per_gb:.4g}."
        )
    return gigabytes * GB


def cluster_of(
    profile: Profile, shape: ShardFactor, gpu_memory: float, efficiency: float = ClusterSpec.efficiency
) -> ClusterSpec:
    """(R, N) GPUs as the profile describes them, an A100 where it says nothing; gpu_memory in bytes.

    Where it names 16-bit FLOP/s alone, fp32 has a sixteenth of them, about the ratio on A100 and H100.
    """
    cluster = ClusterSpec(shape.s1, shape.s0, gpu_memory, efficiency=efficiency)
    if profile.peak_flops is not None:
        single = profile.peak_flops_fp32 or profile.peak_flops / 16
        cluster = replace(cluster, peak_flops=profile.peak_flops, peak_flops_fp32=single)
    return replace(cluster, memory_bandwidth=profile.memory_bandwidth or cluster.memory_bandwidth)


def no_factory(name: str) -> ModelSpec:
    """Where a ``module:factory`` cannot be run.

    Raises:
        RequestError: always.
    """
    raise RequestError("model", f"{name!r} names a factory: pass deepspeed_amsp.probe.probe_factory({name!r}).model.")


@dataclass(frozen=True)
class Request:
    """The arguments of `plan`; see there. Checks nothing until `problem` is asked for."""

    model: str | ModelSpec
    nodes: int
    gpus_per_node: int | None = None
    gpu_memory: float | None = None
    seq_len: int = 4096
    micro_batch: int | str = 1
    global_batch_tokens: int | None = None
    profile: str | Path | Profile = "a800-hdr"
    objective: str = Objective.STEP_TIME.value
    optimizer: str = "adamw"
    recompute: bool = False
    grad_dtype: str = "bf16"
    parameter_bytes: int = 2
    gradient_clipping: bool = True
    tp: int = 1
    pp: int = 1
    margin: float = 0.0
    efficiency: float = 0.62
    extrapolate: bool = False
    gradients: str = "paper"
    modes: Modes = field(default_factory=Modes)
    shardings: tuple[Sharding, ...] | None = None
    factory: Callable[[str], ModelSpec] = no_factory

    def problem(self) -> Problem:
        """The question in the solver's terms.

        Raises:
            SpecError: an argument makes no sense (`RequestError`), or they do not go together.
            ProfileError: no such profile, or it is not of this cluster.
            OSError: a file cannot be read.
        """
        objective = Objective(choice("objective", self.objective, [o.value for o in Objective]))
        gradients: Literal["any", "paper"] = (
            "any" if choice("gradients", self.gradients, ("any", "paper")) == "any" else "paper"
        )
        if isinstance(self.margin, bool) or not isinstance(self.margin, (int, float)) or not 0 <= self.margin < 1:
            raise RequestError(
                "margin", f"must be a part of the memory, at least 0 and below 1 (0.1 is 10 %), not {self.margin!r}."
            )
        for name in ("seq_len", "tp", "pp"):
            _whole(name, getattr(self, name))
        profile = self.profile
        if not isinstance(profile, Profile):
            _known("profile", str(profile), BUILTIN)
            profile = find_profile(profile)
        cluster = self._cluster(profile)
        return Problem(
            model=self._model(),
            cluster=cluster,
            trainings=self._trainings(cluster),
            profile=replace(
                profile.for_cluster(cluster.data_parallel), extrapolates=self.extrapolate or profile.extrapolates
            ),
            objective=objective,
            gradients=gradients,
            modes=self.modes,
            margin=self.margin,
            shardings=self.shardings,
        )

    def _model(self) -> ModelSpec:
        if isinstance(self.model, ModelSpec):
            return self.model
        if ":" in self.model and not Path(self.model).exists():
            return self.factory(self.model)
        _known("model", self.model, PAPER_MODELS)
        return load_model(self.model)

    def _cluster(self, profile: Profile) -> ClusterSpec:
        gpus = profile.gpus_per_node if self.gpus_per_node is None else self.gpus_per_node
        for name, value in (("nodes", self.nodes), ("gpus_per_node", gpus)):
            _whole(name, value)
        if self.nodes * gpus > MOST_GPUS:
            raise RequestError("nodes", f"{self.nodes} x {gpus} GPUs are more than {MOST_GPUS:,}.")
        if self.gpu_memory is not None:
            memory = memory_bytes("gpu_memory", self.gpu_memory)
        elif profile.gpu_memory is not None:
            memory = profile.gpu_memory
        else:
            raise RequestError("gpu_memory", f"is needed, in GB: profile {profile.name} does not say it.")
        share = self.efficiency
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise RequestError(
                "efficiency", f"must be the part of peak FLOP/s that compute reaches, in (0, 1], not {share!r}."
            )
        return cluster_of(profile, ShardFactor(gpus, self.nodes), memory, float(share))

    def _trainings(self, cluster: ClusterSpec) -> tuple[TrainSpec, ...]:
        """Alternatives of equal tokens a step: one, or with "auto" every power of two that divides them."""
        auto = self.micro_batch == AUTO
        size = 1 if auto else _whole("micro_batch", self.micro_batch, f' or "{AUTO}"')
        train = TrainSpec(
            sequence=self.seq_len,
            micro_batch=size,
            recompute=self.recompute,
            optimizer=OPTIMIZERS[choice("optimizer", self.optimizer, OPTIMIZERS)],
            parameter_bytes=self.parameter_bytes,
            gradient_bytes=GRADIENT_BYTES[choice("grad_dtype", self.grad_dtype, GRADIENT_BYTES)],
            gradient_clipping=self.gradient_clipping,
            tensor_parallel=self.tp,
            pipeline_parallel=self.pp,
        )
        replicas = train.data_parallel(cluster).size
        if self.global_batch_tokens is None:
            if auto:
                raise RequestError("global_batch_tokens", "is needed to choose micro-batches with M.")
            return (train,)
        _whole("global_batch_tokens", self.global_batch_tokens)
        try:
            count = micro_batches(self.global_batch_tokens, self.seq_len, size, replicas)
        except SpecError as error:
            raise RequestError("global_batch_tokens", str(error).removeprefix("training: ")) from error
        train = replace(train, micro_batches=count)
        return alternatives(train, [2**k for k in range(count.bit_length())]) if auto else (train,)


def _whole(name: str, value: object, otherwise: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(name, f"must be a whole number of at least 1{otherwise}, not {value!r}.")
    if value > LARGEST_COUNT:
        raise RequestError(name, f"must be at most {LARGEST_COUNT:.0e}, not {value:.3e}.")
    return value


def _known(argument: str, text: str, names: Iterable[str]) -> None:
    """Raises RequestError for a word that is none of ``names`` and neither a file nor looks like the path of one."""
    if not Path(text).exists() and not Path(text).suffix and "/" not in text and text.lower() not in names:
        raise RequestError(argument, f"{text!r} is neither a file nor one of {_listed(text, names)}")


def plan(
    model: str | ModelSpec,
    *,
    nodes: int,
    gpus_per_node: int | None = None,
    gpu_memory: float | None = None,
    seq_len: int = 4096,
    micro_batch: int | str = 1,
    global_batch_tokens: int | None = None,
    profile: str | Path | Profile = "a800-hdr",
    objective: str = "step-time",
    optimizer: str = "adamw",
    recompute: bool = False,
    grad_dtype: str = "bf16",
    tp: int = 1,
    pp: int = 1,
    margin: float = 0.0,
    efficiency: float = 0.62,
    extrapolate: bool = False,
) -> Search:
    """Find the plan, and with it all others and why they are not it.

    Args:
        model: a name (llama-7b, -13b, -30b, -65b), the path of a Hugging Face config.json, or a spec.
        nodes, gpus_per_node: the cluster; the profile's GPUs per node by default.
        gpu_memory: GB (1e9 bytes) of one GPU; the profile's by default.
        seq_len: tokens of a sequence.
        micro_batch: sequences a GPU takes at a time, or "auto" to choose them and M together.
        global_batch_tokens: tokens of a step on all GPUs; None for one micro-batch a GPU.
        profile: what collectives take: a built-in name, a file, or a profile.
        objective: "step-time" with overlap, or "comm-time", the paper's T_comm.
        optimizer: adamw, lion, adam8bit, adafactor, muon, sgd.
        recompute: activations are recomputed in the backward.
        grad_dtype: of resting gradients: bf16, fp16, fp32.
        tp, pp: GPUs that tensor and pipeline parallelism take of a replica.
        margin: part of a GPU's memory that stays free, in [0, 1).
        efficiency: part of the peak FLOP/s that computation reaches undisturbed.
        extrapolate: a measured profile answers for groups that it did not measure, such as more nodes.

    Returns:
        Search: ``best`` is None when nothing fits.

    Raises:
        SpecError: an argument makes no sense (`RequestError`), or they do not go together.
        ProfileError: no such profile, or it cannot answer for this cluster.
    """
    return search(Request(**locals()).problem())


def parse_sharding(text: str, data_parallel: ShardFactor) -> Sharding:
    """ "zero1", or factors of P, G and OS: "1x1,1x1,8x1", or numbers of GPUs "1,1,8" that fill nodes first.

    Raises:
        FactorError: not legal on this cluster.
        RequestError: no such name, or no three factors.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 and not parts[0][:1].isdecimal():
        return preset(choice("sharding", parts[0], PRESETS), data_parallel)
    if len(parts) != 3:
        raise RequestError("sharding", f"{text!r} is neither a name nor three factors such as 1x1,1x1,8x1.")
    p, g, os = (_factor(part, data_parallel) for part in parts)
    return Sharding(p, g, os, data_parallel)


def _factor(text: str, data_parallel: ShardFactor) -> ShardFactor:
    numbers = text.split("x")
    if not all(number.isdecimal() for number in numbers) or len(numbers) > 2:
        raise RequestError("sharding", f"{text!r} is no factor; write GPUs in a node x nodes, such as 8x1.")
    if len(numbers) == 1:
        return ShardFactor.fill(int(text), data_parallel.s0)
    return ShardFactor(int(numbers[0]), int(numbers[1]))
