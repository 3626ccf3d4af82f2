"""amsp.verify_every: replicas of the working copies are compared by checksum, and a difference stops the run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_amsp.comm import Communicator
from deepspeed_amsp.mesh import Mesh
from deepspeed_amsp.partition.params import Unit
from deepspeed_amsp.plan.layout import Piece, shard_pieces

_PERIOD = 8191
"""Elements are weighted by their position modulo this prime, so that a swap is seen as well as a change."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaMismatch(RuntimeError):
    """Ranks that hold the same values by plan hold different ones."""


def verify_replicas(units: Sequence[Unit], comm: Communicator, mesh: Mesh, device: torch.device) -> None:
    """Compare every piece's working copy over ``optim x replicate``, where all ranks hold the same shard.

    Collective over all ranks; reads the result on the host. The working copies must be current.

    Raises:
        ReplicaMismatch: on every rank, with the tensors' names and the checksums by rank.
    """
    named = [
        (piece.param.name, _checksum(unit, piece))
        for unit in units
        for piece in shard_pieces(unit.layout, unit.index, mesh.coordinates.param)
    ]
    sums = torch.stack([value for _, value in named]) if named else torch.zeros(0, dtype=torch.int64, device=device)
    spread = torch.stack([sums, -sums])
    if mesh.data.size > 1 and sums.numel():
        comm.all_reduce(mesh.data.flat, spread, "replica checksums", largest=True).wait()
    differs = (spread[0] != -spread[1]).nonzero().flatten().tolist()
    mine = {named[index][0]: int(sums[index]) for index in differs}
    seen = comm.all_gather_objects(mesh.world, mine) if mesh.world.size > 1 else [mine]
    if not any(seen):
        return
    lines = []
    for name in sorted({name for found in seen for name in found}):
        values = {rank: found[name] for rank, found in zip(mesh.world.ranks, seen, strict=True) if name in found}
        lines.append(f"{name}: checksums by rank {values}")
    raise ReplicaMismatch("replicas of a parameter differ, so training would go wrong from here:\n" + "\n".join(lines))


def _checksum(unit: Unit, piece: Piece) -> torch.Tensor:
    """0-dim int64 over the bits of a piece's working copy."""
    view = unit.piece_view(piece)
    bits = view.view(_INTEGERS[view.element_size()]).to(torch.int64)
    weights = torch.arange(bits.numel(), device=bits.device) % _PERIOD + 1
    return (bits * weights).sum()
