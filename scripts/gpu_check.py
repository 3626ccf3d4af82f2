"""One check of scripts/gpu_check.sh, in processes of its own."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

VOCABULARY, WIDTH, ROWS, TOKENS = 64, 32, 2, 16
MATRIX_1B = 8192
"""Fifteen square matrices of this width are a model of 1.0e9 parameters."""


class Small(nn.Module):
    """Enough layers for several buckets and units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


class Billion(nn.Module):
    """1.0e9 parameters, with next to no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(MATRIX_1B, MATRIX_1B, bias=False) for _ in range(15))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def tokens_of(step: int, ranks: int) -> torch.Tensor:
    """Everybody's tokens of a step [ranks * ROWS, TOKENS + 1]."""
    return torch.randint(VOCABULARY, (ranks * ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(step))


def loss_of(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token, 0-dim, fp32."""
    return nn.functional.cross_entropy(output.flatten(0, 1).float(), tokens[:, 1:].flatten())


def reference(ranks: int, steps: int) -> list[float]:
    """Losses of plain torch on the CPU, on the batch of all ranks."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = tokens_of(step, ranks)
        loss = loss_of(model(tokens[:, :-1]), tokens)
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def make_engine(model: nn.Module, factors: dict[str, list[int]], **config: Any) -> Any:
    """An AMSP engine with small buckets and an explicit clip."""
    import deepspeed

    import deepspeed_amsp  # noqa: F401  (installs the engine)

    stage = 3 if factors["parameters"] != [1, 1] else 1
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_clipping": 0.5,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage},
            "timers": {"throughput": {"enabled": False, "synchronized": False}},
            "amsp": {"sharding": factors, "bucket_bytes": 4096},
            **config,
        },
    )
    return engine


def plans(ranks: int) -> list[dict[str, list[int]]]:
    """Whole and sharded, as far as so few ranks go."""
    one, all_of_them = [1, 1], [ranks, 1]
    names = ("parameters", "gradients", "optimizer_states")
    chains = [(one, one, all_of_them), (all_of_them, all_of_them, all_of_them)][: 1 if ranks == 1 else 2]
    return [dict(zip(names, chain, strict=True)) for chain in chains]


def losses(arguments: argparse.Namespace) -> None:
    """The engine's losses are those of one process with plain torch on the CPU, to 1e-4."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    want = reference(ranks, arguments.steps)
    for factors in plans(ranks):
        torch.manual_seed(0)
        engine = make_engine(Small(), factors)
        found = []
        for step in range(arguments.steps):
            tokens = tokens_of(step, ranks)[rank * ROWS : (rank + 1) * ROWS].to(engine.device)
            loss = loss_of(engine(tokens[:, :-1]), tokens)
            engine.backward(loss)
            engine.step()
            total = loss.detach().cpu()
            parts: list[Any] = [None] * ranks
            dist.all_gather_object(parts, float(total))
            found.append(sum(parts) / ranks)
        engine.destroy()
        torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-4, atol=0.0)
        if rank == 0:
            print(f"{factors}: {arguments.steps} losses as on one process, last {found[-1]:.6f}")


def memory(arguments: argparse.Namespace) -> None:
    """Peak of a 1B-parameter model in bf16 within 5 % of its states, gradient and activations by formula."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    engine = make_engine(Billion().to(torch.bfloat16), plans(1)[0], bf16={"enabled": True})
    accelerator.reset_peak_memory_stats()
    for _ in range(3):
        batch = torch.randn(ROWS, MATRIX_1B, device=engine.device, dtype=torch.bfloat16)
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    phi = 15 * MATRIX_1B**2
    # One rank: 2 bytes of P, 4 of master, 8 of moments, 2 of G; the largest bucket's fp32 gradient while it is updated.
    largest = max(layout.numel for layout in engine.optimizer.layouts)
    want = (2 + 4 + 8 + 2) * phi + 4 * largest
    peak = accelerator.max_memory_allocated()
    print(f"peak {peak / 1e9:.2f} GB, formula {want / 1e9:.2f} GB, ratio {peak / want:.3f}")
    assert 0.95 <= peak / want <= 1.05, "the peak is off by more than 5 %"
    engine.destroy()


def profile(arguments: argparse.Namespace) -> None:
    """A step without overflow checking makes the host wait for the device nowhere."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    checked = {"enabled": True, "check_grad_overflow": False}
    engine = make_engine(Small().to(torch.bfloat16), plans(1)[0], bf16=checked)
    tokens = tokens_of(0, 1).to(engine.device)

    def step() -> None:
        engine.backward(loss_of(engine(tokens[:, :-1]), tokens))
        engine.step()

    for _ in range(3):
        step()
    with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
    waits = [e for e in found.events() if "Synchronize" in e.name]
    # The profiler itself synchronises the device when it stops.
    waits = [e for e in waits if "cudaDeviceSynchronize" not in e.name]
    print(f"{len(waits)} synchronisations of a stream or event in one step")
    assert not waits, [e.name for e in waits]
    engine.destroy()


CHECKS = {"losses": losses, "memory": memory, "profile": profile}


def run(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """One rank of one check; several ranks share the only device."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(arguments.ranks), LOCAL_WORLD_SIZE=str(arguments.ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    from examples import cpu

    cpu.prepare()
    import deepspeed

    deepspeed.init_distributed(arguments.backend, verbose=False)
    checked(arguments)
    dist.barrier()
    dist.destroy_process_group()


def checked(arguments: argparse.Namespace) -> None:
    """The check on a rank whose default group stands, with the planted error if one is asked for."""
    if arguments.plant_missing_wait:
        from deepspeed_amsp.comm import Ticket

        with mock.patch.object(Ticket, "wait", return_value=None):
            CHECKS[arguments.check](arguments)
    else:
        CHECKS[arguments.check](arguments)


def main() -> None:
    """Run the check that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plant-missing-wait", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; scripts/gpu_check.sh --cpu runs the half that needs none")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(run, args=(port, arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
