"""What of DeepSpeed's engine saves, loads and exports, for states that are cut by the plan.

A checkpoint outlives the plan: it can be loaded by any plan, on any number of ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from deepspeed_amsp.checkpoint.background import Background
from deepspeed_amsp.checkpoint.contents import aliases
from deepspeed_amsp.checkpoint.load import Checkpoint, load
from deepspeed_amsp.checkpoint.manifest import scaler_progress
from deepspeed_amsp.checkpoint.restore import Choice, as_it_is
from deepspeed_amsp.checkpoint.rng import random_states, set_random_states
from deepspeed_amsp.checkpoint.save import About, Save
from deepspeed_amsp.checkpoint.together import SHOWN, CheckpointError, TagsDiffer, together
from deepspeed_amsp.config import AmspBlock
from deepspeed_amsp.partition.params import ShardedUnit
from deepspeed_amsp.runtime import Runtime


class CheckpointingEngine(DeepSpeedEngine):  # type: ignore[misc]
    """The base of AMSPEngine, which fills in ``amsp`` before DeepSpeed's constructor runs."""

    amsp: Runtime
    _block: AmspBlock
    _unpartitioned_view = False
    _save_under_way: Background | None = None

    @property
    def _sharded(self) -> bool:
        return self.amsp.plan.sharding.s_p > 1

    @contextmanager
    def _unpartitioned(self) -> Iterator[None]:
        """Let an engine method take its path for whole parameters: the stage 3 path is made for ``ds_`` ones."""
        before, self._unpartitioned_view = self._unpartitioned_view, True
        try:
            yield
        finally:
            self._unpartitioned_view = before

    def zero_optimization_partition_weights(self) -> bool:
        return not self._unpartitioned_view and bool(super().zero_optimization_partition_weights())

    def module_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state, current; with s_p > 1 parameters in it are empty, as in the module itself."""
        self._wait_for_parameters()
        return super().module_state_dict(*args, **kwargs)

    # ---- checkpoints --------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's; the checkpoint can be loaded by any plan, on any number of ranks. Collective.

        All ranks must see ``save_dir``. The tag and the client's state are rank 0's.

        Raises:
            ValueError: no folder was named.
            CheckpointError: on every rank, with the reason of the rank that failed, or when not all ranks call this
                within the timeout. What was there before is as it was.
            TagsDiffer: one of them, if ``checkpoint.tag_validation`` is "Fail".
        """
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        self._wait_for_parameters()
        self._settle_save()
        mine = str(tag) if tag is not None else f"global_step{self.global_steps}"
        agreed = self._agreed(together(f"save_checkpoint to {save_dir}", lambda: mine))
        if dist.get_rank() == 0 and self.micro_steps % self.gradient_accumulation_steps():
            logger.warning("amsp: a checkpoint within an accumulation window does not hold the window's gradients")

        def about() -> About:
            return About(
                self.global_steps,
                self._state_to_save(client_state or {}) if dist.get_rank() == 0 else {},
                random_states() if self._block.checkpoint.save_rng else None,
                {"deepspeed": deepspeed.__version__, "torch": torch.__version__},
                save_latest,
            )

        left_out = tuple(sorted(self._frozen_names())) if exclude_frozen_parameters else ()
        save = Save(self.amsp, self.module, Path(save_dir), agreed, left_out, about)
        if self._block.checkpoint.async_save:
            self._save_under_way = save.in_background()
        else:
            save.now()
        return True

    def _agreed(self, tags: Sequence[str]) -> str:
        """Rank 0's of every rank's tag; those that differ are told as ``checkpoint.tag_validation`` says."""
        others = [f"rank {rank}: {tag!r}" for rank, tag in enumerate(tags) if tag != tags[0]]
        if others and self.checkpoint_tag_validation_enabled():
            more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
            text = (
                f"the checkpoint tag is not consistent across all ranks: rank 0: {tags[0]!r}, "
                f"{', '.join(others[:SHOWN])}{more}. Pass the same tag on all ranks"
            )
            if self.checkpoint_tag_validation_fail():
                raise TagsDiffer(text)
            if dist.get_rank() == 0:
                logger.warning(f"amsp: {text}; the checkpoint gets the one of rank 0")
        return tags[0]

    def wait_for_checkpoint(self) -> None:
        """Wait until a save in the background is complete. Collective.

        Raises:
            CheckpointError: on every rank, if it has failed.
        """
        self._settle_save()

    def _settle_save(self) -> None:
        under_way, self._save_under_way = self._save_under_way, None
        if under_way is not None:
            under_way.settle()

    def _check_save(self) -> None:
        """Between steps: forget a save in the background that is complete; raise if it has failed."""
        under_way, self._save_under_way = self._save_under_way, None
        if under_way is not None and not under_way.check():
            self._save_under_way = under_way

    def destroy(self) -> None:
        """As DeepSpeed's, once a save in the background is complete. Collective while there is one.

        Raises:
            CheckpointError: on every rank, when all is torn down, if that save has failed.
        """
        try:
            self._settle_save()
        finally:
            super().destroy()

    def __del__(self) -> None:
        # Who is collected is not asked together with the other ranks; the thread goes on to its end.
        self._save_under_way = None
        super().__del__()

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As DeepSpeed's, for a checkpoint of any plan and world size. Collective.

        Returns the path of what was loaded and the client's state; (None, None) if no tag is named and there is no
        ``latest``. Gradients of a window under way are dropped.

        Raises:
            CheckpointError: on every rank: no such checkpoint, a damaged one, another model. The engine is as it was.
        """
        self._wait_for_parameters()
        self._settle_save()
        choice = Choice(
            strict=load_module_strict,
            optimizer_states=load_optimizer_states and not load_module_only,
            exact_masters=bool(self.zero_load_from_fp32_weights()),
            custom=custom_load_fn,
        )

        def take(checkpoint: Checkpoint, undo: ExitStack) -> None:
            if not load_module_only:
                self._take_objects(checkpoint.state, load_optimizer_states, load_lr_scheduler_states, undo)

        loaded = load(self.amsp, self.module, Path(load_dir), None if tag is None else str(tag), choice, take)
        if loaded is None:
            logger.warning(f"amsp: there is no 'latest' in {load_dir}, so nothing is loaded; name a tag to load one")
            return None, None
        self.zero_grad()
        if not load_module_only:
            self._take_counters(loaded)
        return str(loaded.path), loaded.state["client_state"]

    def _state_to_save(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        # A static scale says nothing to a run with a dynamic one (another dtype), and is configuration otherwise.
        dynamic = self.optimizer.dynamic_loss_scale
        sampler, scheduler = self._data_sampler(), self.lr_scheduler
        return {
            "client_state": dict(client_state),
            "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
            "data_sampler": sampler.state_dict() if sampler is not None else None,
            "random_ltd": self.random_ltd_scheduler.state_dict() if self.random_ltd_enabled() else None,
            "loss_scaler": scaler_progress(self.optimizer.loss_scaler) if dynamic else {},
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
        }

    def _take_objects(
        self, state: Mapping[str, Any], optimizer_states: bool, scheduler_states: bool, undo: ExitStack
    ) -> None:
        """Tell the user's scheduler and DeepSpeed's objects their states; any of them may refuse."""
        wanted = [(self._data_sampler(), state["data_sampler"])]
        if scheduler_states:
            wanted.append((self.lr_scheduler, state["lr_scheduler"]))
        if self.random_ltd_enabled():
            wanted.append((self.random_ltd_scheduler, state["random_ltd"]))
        for taker, its_state in wanted:
            if taker is not None and its_state is not None:
                undo.callback(as_it_is(taker))
                taker.load_state_dict(its_state)
        if optimizer_states and self.optimizer.dynamic_loss_scale:
            scaler = self.optimizer.loss_scaler
            undo.callback(vars(scaler).update, dict(vars(scaler)))
            vars(scaler).update(state["loss_scaler"])

    def _take_counters(self, loaded: Checkpoint) -> None:
        state = loaded.state
        self.global_steps = state["global_steps"]
        self.global_samples = state["global_samples"]
        self.skipped_steps = state["skipped_steps"]
        # A window begins here, whatever gradient_accumulation_steps was when the checkpoint was written.
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        self.loaded_checkpoint_dp_world_size = loaded.manifest.plan["world_size"]
        self.loaded_checkpoint_mp_world_size = loaded.manifest.parts
        if self._block.checkpoint.save_rng:
            self._take_random_states(state["random"])

    def _take_random_states(self, by_rank: Sequence[dict[str, Any]] | None) -> None:
        if by_rank is not None and len(by_rank) == dist.get_world_size():
            set_random_states(by_rank[dist.get_rank()])
        elif dist.get_rank() == 0:
            why = "holds none" if by_rank is None else f"holds those of {len(by_rank)} ranks"
            logger.warning(
                f"amsp: random states stay as they are: the checkpoint {why}, here are {dist.get_world_size()}"
            )

    def _data_sampler(self) -> Any:
        if self.training_dataloader is None or not self.curriculum_learning_enabled():
            return None
        return self.training_dataloader.data_sampler

    # ---- whole weights ------------------------------------------------------------------------------------

    def _get_shared_params(self) -> dict[str, str]:
        return aliases(self.module)

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> bool:
        """As DeepSpeed's, but never without a file. Collective.

        Raises:
            ValueError: on every rank, where DeepSpeed's saves nothing and returns False: parameters are sharded, and
                gathering them is not allowed.
            CheckpointError: on every rank, if rank 0 cannot write the file.
        """
        self._refuse_parts("save_16bit_model")
        if self._sharded and not self.zero_gather_16bit_weights_on_model_save():
            raise ValueError(
                "save_16bit_model: parameters are sharded, and stage3_gather_16bit_weights_on_model_save is false. Set "
                "it to true in zero_optimization, or call save_checkpoint and then `amsp export`"
            )
        self._wait_for_parameters()
        save = super().save_16bit_model
        return all(together("save_16bit_model", lambda: bool(save(*args, **kwargs))))

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """Whole working copies on the CPU of rank 0, gathered unit by unit; None on other ranks. Collective."""
        self._refuse_parts("a consolidated state_dict")
        self._wait_for_parameters()
        keep = dist.get_rank() == 0
        whole: dict[str, torch.Tensor] = {}
        for unit, values in self.optimizer.gathered_units():
            if keep:
                names = (spec.name for spec in unit.layout.params)
                whole.update((name, value.detach().cpu().clone()) for name, value in zip(names, values, strict=True))
        if not keep:
            return None
        shared = self._get_shared_params()
        frozen = self._frozen_names()
        state = OrderedDict()
        for name, value in self.module.state_dict().items():
            source = shared.get(name, name)
            if not (exclude_frozen_parameters and source in frozen):
                state[name] = whole[source] if source in whole else value.cpu()
        return state

    def _refuse_parts(self, what: str) -> None:
        """Raises CheckpointError on all ranks where rank 0 has a part of the model only."""
        if self.amsp.data_parallel.parts > 1:
            raise CheckpointError(
                f"{what} is of a whole model, and each model-parallel rank has a part of it: save_checkpoint keeps all "
                f"parts, and amsp export writes them with names that begin with mp_rank_00. and so on"
            )

    def _frozen_names(self) -> set[str]:
        return {name for name, param in self.module.named_parameters() if not param.requires_grad}

    def _sharded_units(self) -> list[ShardedUnit]:
        return [unit for unit in self.amsp.units if isinstance(unit, ShardedUnit)]

    def _wait_for_parameters(self) -> None:
        if self.amsp.optimizer is not None:
            self.amsp.optimizer.wait_for_parameters()
