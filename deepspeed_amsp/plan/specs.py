"""What is planned: a model as units of tensors, a cluster, and how one trains on it.

Pure data. Where they come from is `plan.models` (a Hugging Face config.json, a name) and `plan.probe` (a module).
Bytes are bytes, times seconds, FLOPs count a multiply-add as two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from deepspeed_amsp.plan.factors import ShardFactor
from deepspeed_amsp.plan.layout import PADDING_LIMIT, ParamSpec

GB = 1e9
GRADIENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Of an element of a gradient at rest, by data_types.grad_accum_dtype."""
"""Sizes of GPUs are decimal in this package, as in the paper's 80 GB."""


class SpecError(ValueError):
    """A model, cluster or training spec that makes no sense; the message names the field."""


def _positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise SpecError(f"{owner}: {name} must be a number above 0, not {value!r}.")


@dataclass(frozen=True)
class UnitSpec:
    """A module with parameters of its own, gathered and freed together; units stand in forward order.

    params: each tensor once; a tied tensor belongs to the unit that uses it first.
    layer: which block of the model it is part of; None for an embedding, a final norm, a head.
    flops_per_token: forward FLOPs of its matrix products for one token (a mixture's counts active experts only).
    attention_width: heads * head size where this unit follows softmax attention, else 0.
    """

    name: str
    params: tuple[ParamSpec, ...]
    layer: int | None = None
    flops_per_token: float = 0.0
    attention_width: int = 0
    frozen: frozenset[str] = frozenset()

    @cached_property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(param.numel for param in self.params)

    @cached_property
    def trainable_numel(self) -> int:
        """Elements that have gradients and optimizer states."""
        return sum(param.numel for param in self.params if param.name not in self.frozen)

    def forward_flops(self, sequence: int, micro_batch: int) -> float:
        """FLOPs of a forward pass over micro_batch sequences; attention as 4 s^2 h without the causal discount."""
        return sequence * micro_batch * (self.flops_per_token + 4.0 * sequence * self.attention_width)

    def backward_flops(self, sequence: int, micro_batch: int, inward: bool) -> float:
        """FLOPs of a backward pass: a product as large as the forward's for the gradient of trainable weights, and
        one for that of its input where that goes on ``inward``; attention, which has no weights, two for its inputs.
        """
        weights = self.flops_per_token * self._trainable_share
        inputs = self.flops_per_token + 8.0 * sequence * self.attention_width
        return sequence * micro_batch * (weights + inputs * inward)

    @cached_property
    def _trainable_share(self) -> float:
        """Of the elements of its matrices (of all, where it has none: a tied head's product counts at a norm)."""
        counted = [param for param in self.params if len(param.shape) > 1] or list(self.params)
        total = sum(param.numel for param in counted)
        return sum(param.numel for param in counted if param.name not in self.frozen) / total if total else 0.0


@dataclass(frozen=True)
class Activations:
    """Bytes of activations, as measured on fake tensors for one sequence of ``sequence`` tokens in 16-bit.

    layer: what a layer keeps for its backward. layer_input: what a recomputed layer keeps (its inputs).
    outside: what the rest of the model keeps (embedding, final norm, and logits with their loss).
    layer_backward, outside_backward: the most that the backward of a layer, or of head and loss, holds on top.
    """

    sequence: int
    layer: int
    layer_input: int
    outside: int
    layer_backward: int
    outside_backward: int


@dataclass(frozen=True)
class Mixture:
    """Feed-forward layers of experts, of which a token goes through ``active``, each ``width`` elements wide inside."""

    active: int
    width: int


@dataclass(frozen=True)
class ModelSpec:
    """A model. hidden, vocab, mixture: for the documented estimate where activations were not measured.

    follows: its input comes from units with gradients, as that of a later pipeline stage.
    """

    name: str
    units: tuple[UnitSpec, ...]
    hidden: int
    vocab: int
    activations: tuple[Activations, ...] = ()
    mixture: Mixture | None = None
    follows: bool = False

    def __post_init__(self) -> None:
        """Check that there is something to shard."""
        _positive(f"model {self.name}", hidden=self.hidden, vocab=self.vocab)
        if not any(unit.numel for unit in self.units):
            raise SpecError(f"model {self.name}: has no parameters.")

    @cached_property
    def numel(self) -> int:
        """Phi: elements of all parameters, each tied tensor once."""
        return sum(unit.numel for unit in self.units)

    @cached_property
    def trainable_numel(self) -> int:
        """Elements that have gradients and optimizer states."""
        return sum(unit.trainable_numel for unit in self.units)

    @cached_property
    def first_trained(self) -> int:
        """The first unit with gradients of its own; as many as there are units, if none has."""
        return next((at for at, unit in enumerate(self.units) if unit.trainable_numel), len(self.units))

    def backward_starts(self, recompute: bool) -> int:
        """The first unit that a backward reaches: autograd stops where nothing before needs a gradient.

        With recomputation it repeats the forward of the whole layer in which that is.
        """
        if self.follows:
            return 0
        first = self.first_trained
        if not recompute or first == len(self.units):
            return first
        layer = self.units[first].layer
        return first if layer is None else self.ranges[layer].start

    @cached_property
    def layers(self) -> int:
        """Blocks of the model."""
        return len({unit.layer for unit in self.units if unit.layer is not None})

    @cached_property
    def ranges(self) -> dict[int, range]:
        """Layer -> the run of units that it consists of."""
        found: dict[int, list[int]] = {}
        for index, unit in enumerate(self.units):
            if unit.layer is not None:
                found.setdefault(unit.layer, []).append(index)
        return {layer: range(members[0], members[-1] + 1) for layer, members in found.items()}

    def stages(self, tensor_parallel: int, pipeline_parallel: int) -> tuple[ModelSpec, ...]:
        """What one GPU of each pipeline stage has: layers in equal runs, what stands before them in the first, the
        rest in the last; of these, a tensor-parallel part. Made once, so that what is kept with a part is found again.

        Activations stay those of a whole layer: who uses them divides (`activations.activation_bytes`).

        Raises:
            SpecError: more stages than layers.
        """
        if tensor_parallel == pipeline_parallel == 1:
            return (self,)
        if pipeline_parallel > max(self.layers, 1):
            raise SpecError(f"training: pipeline_parallel = {pipeline_parallel} for {self.layers} layers.")
        known: dict[tuple[int, int], tuple[ModelSpec, ...]] = vars(self).setdefault("_stages", {})
        key = tensor_parallel, pipeline_parallel
        if key not in known:
            runs = [[_cut(unit, tensor_parallel) for unit in run] for run in _runs(self, pipeline_parallel)]
            first = list(accumulate(map(len, runs), initial=0))
            known[key] = tuple(
                replace(self, units=tuple(run), follows=start > self.first_trained)
                for run, start in zip(runs, first, strict=False)
            )
        return known[key]

    def part(self, tensor_parallel: int, pipeline_parallel: int) -> ModelSpec:
        """The stage with most elements, whose communication decides. Raises as `stages`."""
        return max(self.stages(tensor_parallel, pipeline_parallel), key=lambda stage: stage.numel)

    def forward_flops(self, sequence: int, micro_batch: int) -> tuple[float, ...]:
        """By unit: FLOPs of a forward pass over micro_batch sequences."""
        return tuple(unit.forward_flops(sequence, micro_batch) for unit in self.units)

    def backward_flops(self, sequence: int, micro_batch: int) -> tuple[float, ...]:
        """By unit: FLOPs of a backward pass, which goes no further back than gradients are needed."""
        return tuple(
            unit.backward_flops(sequence, micro_batch, inward=self.follows or at > self.first_trained)
            for at, unit in enumerate(self.units)
        )


def _runs(model: ModelSpec, pipeline: int) -> list[list[UnitSpec]]:
    """Units by pipeline stage."""
    numbers = list(model.ranges)
    stage_of = {layer: position * pipeline // len(numbers) for position, layer in enumerate(numbers)}
    runs: list[list[UnitSpec]] = [[] for _ in range(pipeline)]
    last = max((units[-1] for units in model.ranges.values()), default=-1)
    stage = 0
    for index, unit in enumerate(model.units):
        if unit.layer is not None:
            stage = stage_of[unit.layer]
        elif numbers and index > last:
            stage = pipeline - 1
        runs[stage].append(unit)
    return runs


def _cut(unit: UnitSpec, parts: int) -> UnitSpec:
    """One of ``parts`` of a unit: matrices by rows, rounded up; vectors whole, as tensor parallelism has norms."""
    params = tuple(
        ParamSpec(param.name, (-(-param.shape[0] // parts), *param.shape[1:])) if len(param.shape) > 1 else param
        for param in unit.params
    )
    return replace(
        unit,
        params=params,
        flops_per_token=unit.flops_per_token / parts,
        attention_width=unit.attention_width // parts,
    )


@dataclass(frozen=True)
class ClusterSpec:
    """nodes x gpus_per_node GPUs.

    gpu_memory: bytes of one GPU that the job may use. peak_flops, peak_flops_fp32: FLOP/s of one GPU in 16 bits and in
    fp32. efficiency: the part of them that compute reaches when no communication disturbs it, in (0, 1].
    memory_bandwidth: bytes/s that an optimizer's update reaches. The defaults are an A100's: 312 and 19.5 TFLOP/s
    (torch multiplies in fp32, not TF32, unless it is told otherwise), and 0.8 of 2.0 TB/s.
    """

    nodes: int
    gpus_per_node: int
    gpu_memory: float = 80 * GB
    peak_flops: float = 312e12
    peak_flops_fp32: float = 19.5e12
    efficiency: float = 0.62
    memory_bandwidth: float = 1.6e12

    def __post_init__(self) -> None:
        """Check ranges; memory in MB or GB where bytes are meant is told from its size."""
        names = ("gpu_memory", "peak_flops", "peak_flops_fp32", "efficiency", "memory_bandwidth")
        _positive("cluster", **{name: getattr(self, name) for name in names})
        for name, value in (("nodes", self.nodes), ("gpus_per_node", self.gpus_per_node)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"cluster: {name} must be a whole number of at least 1, not {value!r}.")
        if self.efficiency > 1:
            raise SpecError(f"cluster: efficiency must be at most 1, not {self.efficiency!r}.")

    def peak(self, parameter_bytes: int) -> float:
        """FLOP/s of one GPU with working copies of that width."""
        return self.peak_flops_fp32 if parameter_bytes == 4 else self.peak_flops

    @property
    def world_size(self) -> int:
        """W: all GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def data_parallel(self) -> ShardFactor:
        """(R, N)."""
        return ShardFactor(self.gpus_per_node, self.nodes)


@dataclass(frozen=True)
class Optimizer:
    """Bytes that an optimizer keeps for one parameter, next to a 4-byte master, and what its update costs.

    moments: bytes an element (adafactor: of a matrix, which has a row and a column of statistics instead).
    whole_tensors: its update needs a tensor whole, so that none is cut between owners.
    traffic: bytes an element that an update reads and writes, which bounds its time on a GPU.
    """

    name: str
    moments: float
    whole_tensors: bool = False
    traffic: float = 28.0


OPTIMIZERS: dict[str, Optimizer] = {
    # Reads gradient 4, master 4, moments; writes master 4, moments, working copy 2.
    optimizer.name: optimizer
    for optimizer in (
        Optimizer("adamw", 8.0, traffic=30.0),
        Optimizer("lion", 4.0, traffic=22.0),
        Optimizer("adam8bit", 2.0, traffic=18.0),
        Optimizer("adafactor", 0.0, whole_tensors=True, traffic=14.0),
        Optimizer("muon", 4.0, whole_tensors=True, traffic=22.0),
        Optimizer("sgd", 0.0, traffic=14.0),
    )
}
"""AdamW 8 bytes, Lion 4, 8-bit Adam 2, Muon 4, SGD 0; a factored state is counted in `memory`."""


@dataclass(frozen=True)
class TrainSpec:
    """How one trains: micro_batch sequences of ``sequence`` tokens at a time on each GPU, M of them a step.

    micro_batches: M. recompute: activations of blocks are recomputed in the backward. gradient_bytes: of a resting
    gradient (the accumulation dtype). gradient_clipping: off lets updates start as gradients arrive.
    tensor_parallel, pipeline_parallel: GPUs that share one replica of the model otherwise; their parameters are cut
    evenly and data parallelism has what is left. padding_limit: owners' sections of a bucket are padded to one length
    while that makes it at most so much longer; 1.0 on gloo.
    """

    sequence: int = 4096
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: bool = False
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    parameter_bytes: int = 2
    gradient_bytes: int = 2
    gradient_clipping: bool = True
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    padding_limit: float = PADDING_LIMIT

    def __post_init__(self) -> None:
        """Check ranges."""
        whole = ("sequence", "micro_batch", "micro_batches", "tensor_parallel", "pipeline_parallel")
        for name in whole:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"training: {name} must be a whole number of at least 1, not {value!r}.")
        for name in ("parameter_bytes", "gradient_bytes"):
            if getattr(self, name) not in (2, 4):
                raise SpecError(f"training: {name} must be 2 or 4, not {getattr(self, name)!r}.")

    @property
    def model_parallel(self) -> int:
        """GPUs that hold one replica of the model without data parallelism."""
        return self.tensor_parallel * self.pipeline_parallel

    def data_parallel(self, cluster: ClusterSpec) -> ShardFactor:
        """(R, N) that is left for data parallelism: tensor parallelism stays in a node, pipeline stages take nodes.

        Raises:
            SpecError: they do not divide the cluster.
        """
        if cluster.gpus_per_node % self.tensor_parallel:
            raise SpecError(
                f"training: tensor_parallel = {self.tensor_parallel} must divide the {cluster.gpus_per_node} GPUs of a "
                f"node."
            )
        if cluster.nodes % self.pipeline_parallel:
            raise SpecError(
                f"training: pipeline_parallel = {self.pipeline_parallel} must divide the {cluster.nodes} nodes."
            )
        return ShardFactor(cluster.gpus_per_node // self.tensor_parallel, cluster.nodes // self.pipeline_parallel)


def micro_batches(global_batch_tokens: int, sequence: int, micro_batch: int, replicas: int) -> int:
    """M so that a step sees global_batch_tokens.

    Raises:
        SpecError: when no whole M does; the nearest batches that do are named.
    """
    a_micro_batch = sequence * micro_batch * replicas
    if global_batch_tokens < a_micro_batch or global_batch_tokens % a_micro_batch:
        below = max(global_batch_tokens // a_micro_batch, 1) * a_micro_batch
        raise SpecError(
            f"training: {global_batch_tokens} tokens are no whole number of micro-batches: {replicas} replicas take "
            f"{a_micro_batch} tokens at once ({micro_batch} x {sequence} each). Nearest: {below} or "
            f"{below + a_micro_batch} tokens."
        )
    return global_batch_tokens // a_micro_batch
