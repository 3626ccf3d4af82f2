"""Profiles that come with the package: analytic, from data sheets and from the points that the paper states."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from deepspeed_amsp.plan.curves import ProfileError
from deepspeed_amsp.plan.links import Links
from deepspeed_amsp.plan.profile import Profile
from deepspeed_amsp.plan.specs import GB

IN_NODE_SHARE, CROSS_NODE_SHARE = 0.8, 0.9
"""What large NCCL rings reach of a data sheet's NVLink and NIC bandwidth; assumptions."""
IN_NODE_LATENCY, CROSS_NODE_LATENCY = 1.5e-6, 5e-6
"""Seconds a hop; chosen with a800-hdr so that both of the paper's points come out."""

MEMORY_SHARE = 0.8
"""What a fused update reaches of a data sheet's HBM bandwidth; an assumption."""


class Gpu(NamedTuple):
    """What a profile says of its GPUs; see `Profile`."""

    peak_flops: float
    peak_flops_fp32: float
    gpu_memory: float
    memory_bandwidth: float


A100 = Gpu(312e12, 19.5e12, 80 * GB, MEMORY_SHARE * 2.0e12)
H100 = Gpu(989e12, 67e12, 80 * GB, MEMORY_SHARE * 3.35e12)
"""Data sheets, SXM with 80 GB: dense 16-bit, and fp32 outside tensor cores, which is torch's default. An A800 is an
A100 with slower NVLink."""


def _profile(name: str, gpu: Gpu, links: Links, host: str, notes: str) -> Profile:
    """128 nodes of 8."""
    return Profile(name=name, gpus_per_node=8, nodes=128, links=links, host=host, notes=notes, **gpu._asdict())


BUILTIN: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        _profile(
            name="a800-hdr",
            # 64 MB in the time that 1200 Gbit/s say is 427 us; 416 us of it for 7/8 of the bytes are 134.5 GB/s.
            links=Links(134.5 * GB, CROSS_NODE_SHARE * 100 * GB, IN_NODE_LATENCY, CROSS_NODE_LATENCY),
            host="the paper's cluster: 128 nodes of 8 A800, NVLink 400 GB/s, 4 x HDR InfiniBand a node",
            gpu=A100,
            notes=(
                "approximate: fits the AllGather of 64 MB in Fig. 3 of arXiv 2311.00257, about 1200 Gbit/s on 8x1 and "
                "300 on 8x64, read as message over time"
            ),
        ),
        _profile(
            name="a100-hdr",
            links=Links(IN_NODE_SHARE * 300 * GB, CROSS_NODE_SHARE * 200 * GB, IN_NODE_LATENCY, CROSS_NODE_LATENCY),
            host="data sheet of a node of 8 A100: NVLink 600 GB/s in both directions, 8 x HDR 200 Gbit/s",
            gpu=A100,
            notes="from data sheets; nothing was measured",
        ),
        _profile(
            name="h100-ndr",
            links=Links(IN_NODE_SHARE * 450 * GB, CROSS_NODE_SHARE * 400 * GB, IN_NODE_LATENCY, CROSS_NODE_LATENCY),
            host="data sheet of a node of 8 H100: NVLink 900 GB/s in both directions, 8 x NDR 400 Gbit/s",
            gpu=H100,
            notes="from data sheets; nothing was measured",
        ),
    )
}


def find_profile(source: str | Path) -> Profile:
    """The built-in profile of that name, else the file.

    Raises:
        ProfileError: neither; or a file that is no profile.
    """
    name = str(source)
    if name in BUILTIN:
        return BUILTIN[name]
    if not Path(name).exists():
        raise ProfileError(
            f"profile {name!r} is neither a file nor built in; built in are {', '.join(BUILTIN)}. "
            f"amsp profile measures a cluster."
        )
    return Profile.load(name)
