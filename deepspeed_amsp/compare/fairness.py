"""What is the same for every strategy, in sentences for the report. The code is in `fair`, `scale` and `strategies`."""

from __future__ import annotations

from deepspeed_amsp.compare.config import CompareConfig
from deepspeed_amsp.compare.environments import MICS_DEEPSPEED
from deepspeed_amsp.compare.results import HPZ, MICS, ZERO3


def common(config: CompareConfig) -> list[str]:
    """On every machine."""
    said = [
        "same initial weights, batches, AdamW (fused), learning rate and micro-batches; bf16 with fp32 masters",
        f"gradients are clipped at {config.training.clipping:g} by every strategy, explicitly",
        f"buckets of {config.bucket_bytes / 1e6:g} MB wherever a strategy has buckets",
    ]
    if any(entry in (ZERO3, HPZ, MICS) for entry in config.strategies):
        said.append(_of_stage3(config))
    return said


def _of_stage3(config: CompareConfig) -> str:
    from deepspeed_amsp.compare.scale import stage3_thresholds  # with torch

    values = ", ".join(f"{name} {value:,}" for name, value in stage3_thresholds(config.model).items())
    return (
        f"ZeRO-3, hpZ and MiCS: {values}, after the size of a block (with the defaults of 1e9 a small model is never "
        "gathered again in backward)"
    )


def on_gloo(config: CompareConfig) -> list[str]:
    """On CPUs."""
    replaced = (
        "gloo's reduce-scatter is an AllReduce of twice the bytes: replaced by messages from rank to rank and a sum "
        "in fp32, for every strategy alike"
    )
    own = (
        "UNFAIR by request: the reduce-scatter of others is gloo's own, an AllReduce of twice the bytes; AMSP's are "
        "messages from rank to rank and a sum"
    )
    return [
        replaced if config.fair_reduce_scatter else own,
        "gloo cannot coalesce: coalesced all-gathers of MiCS are issued one by one",
    ]


def of_links(congestion_control: str) -> str:
    """On an emulated cluster."""
    return f"TCP between the emulated nodes is that of {congestion_control}, for every strategy"


def on_gpus() -> list[str]:
    """On accelerators."""
    return ["ZeRO-1 and ZeRO-2: overlap_comm, which is off by default, is on"]


def of_mics() -> str:
    """Where it takes part."""
    return f"MiCS runs on DeepSpeed {MICS_DEEPSPEED}, the last release in which it works"
