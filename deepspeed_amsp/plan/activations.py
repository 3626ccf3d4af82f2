"""Bytes of activations for a training spec: probed figures scaled to it, or the documented estimate."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_amsp.plan.specs import Activations, Mixture, ModelSpec, TrainSpec

PER_LAYER = 34
"""Bytes for every sequence position, sample and hidden element that a layer keeps (Korthikanti et al.,
arXiv 2205.05198, Eq. 1 without the scores, which a fused attention does not keep)."""


BESIDE_EXPERTS = 28
"""The same for what a layer of a mixture has besides its experts, as probed of transformers' Mixtral, whose norms keep
their input in fp32."""


def _of_experts(mixture: Mixture, hidden: int) -> int:
    """Bytes for a token in its active experts, 16-bit: of each, input and output (hidden), and both projections, the
    activation and their product (width)."""
    return mixture.active * (4 * hidden + 8 * mixture.width)


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes on one GPU for one micro-batch.

    layer: what a layer keeps for its backward. kept: what is kept of it until then, less where it is recomputed.
    all_layers: kept of all layers. layer_in_backward: of the layer whose backward runs, everything that it has.
    outside: of the rest of the model, logits and loss. outside_gradient: what is left of it when the backward of the
    loss is over, the gradient of the logits. *_backward: the most that a backward holds on top.
    estimated: what the figures are, in one line, where they were not measured.
    """

    layer: int
    kept: int
    all_layers: int
    outside: int
    outside_gradient: int
    layer_backward: int
    outside_backward: int
    estimated: str | None

    @property
    def layer_in_backward(self) -> int:
        """Its inputs, too, when it is recomputed."""
        return self.layer if self.kept == self.layer else self.kept + self.layer


def activation_bytes(model: ModelSpec, train: TrainSpec) -> ActivationBytes:
    """Figures of the nearest probed sequence, scaled by tokens: flash attention keeps nothing that grows faster.

    Tensor parallelism divides them, as it does with sequence parallelism.
    """
    tokens = train.sequence * train.micro_batch
    if model.activations:
        probed = min(model.activations, key=lambda figures: (abs(figures.sequence - train.sequence), figures.sequence))
        scale, estimated = tokens / probed.sequence, None
    else:
        probed, scale = _estimate(model, tokens), 1.0
        kept = "their inputs 2*s*b*h" if train.recompute else _formula(model)
        estimated = f"activations were not measured: {kept} a layer"
    scale *= train.parameter_bytes / 2 / train.tensor_parallel
    # A weight's gradient, whole until it is in its bucket, does not grow with the tokens.
    widest = max((unit.trainable_numel for unit in model.units if unit.layer is not None), default=0)
    weights = train.parameter_bytes * widest

    def scaled(value: int) -> int:
        return round(value * scale)

    kept_bytes = scaled(probed.layer_input if train.recompute else probed.layer)
    return ActivationBytes(
        layer=scaled(probed.layer),
        kept=kept_bytes,
        all_layers=kept_bytes * model.layers,
        outside=scaled(probed.outside),
        outside_gradient=scaled(2 * model.vocab * (probed.sequence if model.activations else tokens)),
        layer_backward=weights + scaled(max(probed.layer_backward - 2 * train.tensor_parallel * widest, 0)),
        outside_backward=scaled(probed.outside_backward),
        estimated=estimated,
    )


def _formula(model: ModelSpec) -> str:
    if model.mixture is None:
        return f"{PER_LAYER}*s*b*h bytes"
    active, width = model.mixture.active, model.mixture.width
    return f"s*b*({BESIDE_EXPERTS}*h + {active}*(4*h + 8*{width})) bytes"


def _estimate(model: ModelSpec, tokens: int) -> Activations:
    """Where nothing was measured; of logits, log-probabilities in fp32 are kept, and twice that is needed once more."""
    hidden = tokens * model.hidden
    layer = PER_LAYER * hidden
    if model.mixture is not None:
        layer = BESIDE_EXPERTS * hidden + tokens * _of_experts(model.mixture, model.hidden)
    widest = max((unit.trainable_numel for unit in model.units if unit.layer is not None), default=0)
    return Activations(
        sequence=tokens,
        layer=layer,
        layer_input=2 * hidden,
        outside=4 * tokens * model.vocab + 4 * hidden,
        layer_backward=8 * hidden + 2 * widest,
        outside_backward=8 * tokens * model.vocab,
    )
