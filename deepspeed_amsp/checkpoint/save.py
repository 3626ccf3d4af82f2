"""Writing a checkpoint, together or in the background: who writes what is settled by all ranks beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn

from deepspeed_amsp.checkpoint import folder as folders
from deepspeed_amsp.checkpoint.background import Background
from deepspeed_amsp.checkpoint.claim import Claim
from deepspeed_amsp.checkpoint.contents import Contents, to_write
from deepspeed_amsp.checkpoint.manifest import Manifest, part_prefix, prefixed
from deepspeed_amsp.checkpoint.share import Head, Share
from deepspeed_amsp.checkpoint.together import together
from deepspeed_amsp.checkpoint.zero_to_fp32 import SCRIPT
from deepspeed_amsp.runtime import Runtime


class About(NamedTuple):
    """What the engine adds.

    state: what goes to `manifest.STATE`, on rank 0.
    random: this rank's random states, if they are to be saved.
    latest: whether ``latest`` shall name the tag.
    """

    global_steps: int
    state: Mapping[str, Any]
    random: Any
    versions: Mapping[str, str]
    latest: bool


@dataclass(frozen=True)
class Save:
    """One save of the checkpoint ``tag``. All methods are collective.

    about: asked once, where a failure on one rank is heard by all: it calls code of the user's (schedulers).

    Raises:
        CheckpointError: from each method, on every rank; what was there before is as it was.
    """

    amsp: Runtime
    module: nn.Module
    save_dir: Path
    tag: str
    left_out: tuple[str, ...]
    about: Callable[[], About]

    @property
    def _what(self) -> str:
        return f"save_checkpoint to {self.save_dir / self.tag}"

    def now(self) -> None:
        """Write it."""
        shares: list[Share] = []

        def write() -> None:
            shares.append(self._share())
            shares[0].write()

        claim = self._begin()
        try:
            together(self._what, write)
            together(self._what, lambda: shares[0].finish(claim) if claim else None)
        except BaseException:
            if claim is not None:
                claim.discard()
            raise

    def in_background(self) -> Background:
        """Copy to the host what is to be written, and write it while the caller goes on."""
        shares: list[Share] = []
        claim = self._begin()
        try:
            together(self._what, lambda: shares.append(self._share().own_copy()))
        except BaseException:
            if claim is not None:
                claim.discard()
            raise
        return Background(shares[0], claim, self._what)

    def _begin(self) -> Claim | None:
        """Rank 0 claims the folder."""
        claims: list[Claim] = []

        def begin() -> None:
            if dist.get_rank() == 0:
                claims.append(folders.begin(self.save_dir, self.tag))
                self._sweep(claims[0])

        try:
            together(self._what, begin)
        except BaseException:
            for claim in claims:
                claim.discard()
            raise
        return claims[0] if claims else None

    def _sweep(self, claim: Claim) -> None:
        with suppress(OSError):  # leftovers that cannot be looked at or removed keep no save from going on
            removed = folders.sweep(claim.folder.parent, claim)
            if removed:
                logger.warning(f"amsp: removed what dead saves had left in {self.save_dir}: {', '.join(removed)}")

    def _share(self) -> Share:
        optimizer, mesh, among = self.amsp.optimizer, self.amsp.mesh, self.amsp.data_parallel
        assert optimizer is not None
        about = self.about()
        contents, blocks = to_write(optimizer, mesh, self.module, self.left_out)
        first, prefix = mesh.rank == 0, part_prefix(among.part, among.parts)
        return Share(
            save_dir=self.save_dir,
            tag=self.tag,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            contents=contents.told(prefix) if mesh.first_replica or first else Contents(),
            blocks={prefixed(key, prefix): tensor for key, tensor in blocks.items()},
            random=about.random,
            head=self._head(about) if first else None,
        )

    def _head(self, about: About) -> Head:
        assert self.amsp.optimizer is not None
        states = self.amsp.optimizer.states
        groups = states.optimizer.param_groups
        manifest = Manifest(
            tag=self.tag,
            plan={**self.amsp.plan.fingerprint(), "model_parallel": self.amsp.data_parallel.parts},
            global_steps=about.global_steps,
            tensors={},
            aliases={},
            left_out=(),
            buffers=(),
            files={},
            versions=dict(about.versions),
        )
        state = {
            **about.state,
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "group_names": states.group_names,
        }
        return Head(state, manifest, about.latest, SCRIPT)
