"""Runs a comparison: gives orders to ranks, keeps what they report, and goes on without what fails.

The ranks of all environments of a cluster are started together and take turns, so that a round's strategies are
neighbours in time whichever DeepSpeed they need. A strategy that hangs or dies takes the ranks with it: they are
killed by process group, and started again for what is left.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from deepspeed_amsp.compare import environments, fairness, results
from deepspeed_amsp.compare.catalog import Family, Strategy
from deepspeed_amsp.compare.cluster import (
    ClusterSpec,
    ClusterUnavailable,
    Loopback,
    emulated_cluster,
    loopback_cluster,
)
from deepspeed_amsp.compare.config import CompareConfig, CompareConfigError
from deepspeed_amsp.compare.launch import RankCommand, RankFailed, run_ranks
from deepspeed_amsp.compare.ranks import RESULT, Order
from deepspeed_amsp.compare.results import Run, Setup

START_S = 300.0
"""Within which the ranks of a launch must be ready."""


class Watcher(Protocol):
    """Who shows a comparison as it goes on."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def began(self, order: Order, done: int, total: int) -> None:
        """An order has been given; ``done`` of ``total`` have been obeyed."""

    def ended(self, run: Run) -> None:
        """It was measured, or failed."""


class Hung(RuntimeError):
    """An order took too long."""


@dataclass
class Harness:
    """One comparison on this machine. Results go to ``out``/results.jsonl as they come. program: the module that a
    rank runs."""

    config: CompareConfig
    out: Path
    watcher: Watcher
    program: str = "deepspeed_amsp.compare.ranks"

    def __post_init__(self) -> None:
        self._strategies = {strategy.name: strategy for strategy in self.config.resolved()}
        self._failed: dict[tuple[str, int], str] = {}
        self._pythons: dict[str, Path] = {"main": Path(sys.executable)}
        self._done = self._total = 0
        self._check()
        self._congestion_control: str | None = None
        self._emulated = self._can_emulate()
        self._theory = Theory(self.config)

    @property
    def results(self) -> Path:
        """The file of raw figures."""
        return self.out / "results.jsonl"

    def run(self) -> Path:
        """Measure everything; the file of results, which is whole up to any exception.

        Raises:
            RuntimeError: the ranks do not even start.
        """
        self._begin()
        self._find_environments()
        rates: Sequence[float | None] = self.config.cluster.nic_mbit if self._emulated else (None,)
        self._total = len(rates) * len(self._orders(None))
        for rate in rates:
            pending = self._possible(deque(self._orders(rate)))
            with self._cluster(rate) as cluster:
                self._measure(cluster, pending)
        return self.results

    def _check(self) -> None:
        """What can be known before ranks start, besides the file itself. Raises CompareConfigError."""
        self._check_release()
        if self.config.model.factory or self.config.model.hf:
            from deepspeed_amsp.compare.scale import check_model  # with torch

            check_model(self.config.model)

    def _check_release(self) -> None:
        environments.check_stage3(self._strategies)

    def _begin(self) -> None:
        """The file with its first line. Raises CompareConfigError."""
        setup = self._setup()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            results.start(self.results, setup)
        except OSError as error:
            raise CompareConfigError(f"out: {self.out} cannot be written: {error}") from error

    # ---- what is to be done ----------------------------------------------------------------------------------

    def _orders(self, nic_mbit: float | None) -> list[Order]:
        """Rounds go there and back: a drift of the machine's speed then favours nobody."""
        orders = []
        for number in range(self.config.rounds):
            for count in self.config.micro_batches:
                row = [Order(name, count, nic_mbit, number) for name in self._strategies]
                orders += row if number % 2 == 0 else row[::-1]
        return orders

    def _cluster(self, nic_mbit: float | None) -> AbstractContextManager[Loopback]:
        spec = self._spec(nic_mbit)
        return loopback_cluster(spec) if nic_mbit is None else emulated_cluster(spec)

    def _spec(self, nic_mbit: float | None) -> ClusterSpec:
        """Raises CompareConfigError."""
        cluster = self.config.cluster
        rate = nic_mbit or cluster.nic_mbit[0]
        try:
            return ClusterSpec(cluster.nodes, cluster.ranks_per_node, rate, cluster.lo_mbit, cluster.spine_mbit)
        except ValueError as error:
            raise CompareConfigError(f"cluster: {error}") from error

    def _can_emulate(self) -> bool:
        wish, spec = self.config.cluster.emulate, self._spec(None)
        if wish == "never":
            return False
        try:
            # Root and tools do not suffice: a container's kernel may refuse.
            with emulated_cluster(spec) as cluster:
                self._congestion_control = cluster.congestion_control
        except ClusterUnavailable as error:
            if wish == "always":
                raise CompareConfigError(f"cluster.emulate is always, but {error}") from error
            self.watcher.note(f"warning: no slow links, ratios say little: {error}")
            return False
        return True

    def _find_environments(self) -> None:
        if not self._with_mics:
            return
        try:
            self._pythons["mics"] = environments.mics_python(self.watcher.note)
        except environments.EnvironmentFailed as error:
            self._blame_environment("mics", str(error))

    # ---- doing it --------------------------------------------------------------------------------------------

    def _measure(self, cluster: Loopback, pending: deque[Order]) -> None:
        """All orders of one cluster; a launch that fails costs the order that was at work."""
        while pending:
            launch = _Launch(self, pending)
            try:
                launch.run(cluster)
            except (RankFailed, Hung) as error:
                if not pending:
                    return  # everything was measured: ranks failed as they left
                if launch.at_fault(error) == "mics" and launch.environment != "mics":
                    self._blame_environment("mics", str(error))
                else:
                    self.blame(launch.running, str(error))
                pending = self._possible(pending)

    def blame(self, order: Order | None, reason: str) -> None:
        """The strategy of ``order`` is not tried again.

        Raises:
            RuntimeError: there was none: the ranks did not even start.
        """
        if order is None:
            raise RuntimeError(f"the ranks did not start: {reason}")
        self._failed[order.strategy, order.micro_batches] = reason

    def _blame_environment(self, environment: str, reason: str) -> None:
        """None of its strategies can run."""
        for strategy in self._strategies.values():
            if strategy.environment == environment:
                self._failed |= {(strategy.name, count): reason for count in self.config.micro_batches}

    def _possible(self, pending: deque[Order]) -> deque[Order]:
        """Orders without those of strategies that have failed; each of these is reported once for a rate."""
        left: deque[Order] = deque()
        reported: set[tuple[str, int]] = set()
        for order in pending:
            key = (order.strategy, order.micro_batches)
            if key not in self._failed:
                left.append(order)
            elif key not in reported:
                reported.add(key)
                self._keep(Run(**self._about(order), error=self._failed[key]))
        self._total -= len(pending) - len(left) - len(reported)
        return left

    def began(self, order: Order) -> None:
        """For launches."""
        self.watcher.began(order, self._done, self._total)

    def obeyed(self, order: Order, found: Mapping[str, Any]) -> None:
        """For launches: keep what rank 0 reports."""
        strategy = self._strategies[order.strategy]
        values = dict(found)
        if values.get("sent_bytes_per_node") is not None:
            values["theory_bytes_per_node"] = self._theory.bytes_of(strategy, order.micro_batches)
        self._keep(Run(**self._about(order), **values))

    def _keep(self, run: Run) -> None:
        results.append(self.results, run)
        self._done += 1
        self.watcher.ended(run)

    def _about(self, order: Order) -> dict[str, Any]:
        model, world = self.config.model, self.config.cluster.world_size
        return {
            "strategy": order.strategy,
            "title": self._strategies[order.strategy].title,
            "micro_batches": order.micro_batches,
            "nic_mbit": order.nic_mbit,
            "round": order.round,
            "tokens_per_step": world * model.micro_batch * model.sequence * order.micro_batches,
        }

    @property
    def _with_mics(self) -> bool:
        return any(strategy.family is Family.MICS for strategy in self._strategies.values())

    def python(self, environment: str) -> Path:
        """For launches: the interpreter."""
        return self._pythons[environment]

    def environment_of(self, order: Order) -> str:
        """For launches."""
        return self._strategies[order.strategy].environment

    # ---- set-up ----------------------------------------------------------------------------------------------

    def _setup(self) -> Setup:
        cluster = self.config.cluster
        return Setup(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            host=f"{socket.gethostname()}: {os.cpu_count()} cores, {platform.system()} {platform.machine()}",
            versions=environments.versions(self._with_mics),
            config=self.config.as_json(),
            emulated=self._emulated,
            fairness=self._fairness(),
            nodes=cluster.nodes,
            ranks_per_node=cluster.ranks_per_node,
            loss_tolerance=self.config.loss_tolerance,
        )

    def _fairness(self) -> list[str]:
        said = [*fairness.common(self.config), *fairness.on_gloo(self.config)]
        if self._congestion_control is not None:
            said.append(fairness.of_links(self._congestion_control))
        return [*said, fairness.of_mics()] if self._with_mics else said


class Theory:
    """Bytes out of a node, for a configuration."""

    def __init__(self, config: CompareConfig) -> None:
        self._config = config

    def bytes_of(self, strategy: Strategy, micro_batches: int) -> float:
        """Per step, out of the busiest node."""
        from deepspeed_amsp.compare.scale import spec_of, stage3_thresholds
        from deepspeed_amsp.compare.theory import Case, sent_per_node
        from deepspeed_amsp.plan.factors import ShardFactor

        config = self._config
        case = Case(
            spec_of(config.model),
            ShardFactor(config.cluster.ranks_per_node, config.cluster.nodes),
            micro_batches,
            config.bucket_bytes,
            config.fair_reduce_scatter,
            stage3_thresholds(config.model)["stage3_prefetch_bucket_size"],
        )
        return sent_per_node(strategy, case)


class _Launch:
    """One start of the ranks of every environment that ``pending`` needs. Takes obeyed orders out of it."""

    def __init__(self, harness: Harness, pending: deque[Order]) -> None:
        self._harness, self._pending = harness, pending
        self.running: Order | None = None
        self._deadline = time.monotonic() + START_S
        needed = dict.fromkeys(map(harness.environment_of, pending))
        self._waiting = set(needed)
        self._folder = Path()
        self._environments = list(needed)

    def run(self, cluster: Loopback) -> None:
        """Until all is obeyed.

        Raises:
            RankFailed, Hung: ``running`` is the order at work, None before the first.
        """
        with tempfile.TemporaryDirectory(prefix="amsp-compare-", ignore_cleanup_errors=True) as folder:
            self._folder = Path(folder)
            commands: list[RankCommand] = []
            for environment in self._environments:
                commands += cluster.commands(self._command(environment), self._variables())
            run_ranks(commands, 1e9, self._heard, self._look)

    @property
    def environment(self) -> str | None:
        """Whose turn it is; None before the first order."""
        return None if self.running is None else self._harness.environment_of(self.running)

    def at_fault(self, error: RankFailed | Hung) -> str | None:
        """The environment of the rank that failed; before the first order also the only one that is not ready."""
        if isinstance(error, Hung):
            return next(iter(self._waiting)) if len(self._waiting) == 1 else None
        return None if error.rank is None else self._environments[error.rank // self._harness.config.cluster.world_size]

    def _command(self, environment: str) -> list[str]:
        orders, job = self._orders(environment), self._folder / f"{environment}.json"
        orders.touch()
        config = self._harness.config.as_json()
        job.write_text(
            json.dumps({"config": config, "environment": environment, "orders": str(orders)}), encoding="utf-8"
        )
        return [str(self._harness.python(environment)), "-m", self._harness.program, str(job)]

    def _variables(self) -> dict[str, str]:
        return {
            "PYTHONPATH": environments.search_path(self._folder / "source"),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONWARNINGS": "ignore",
            # Some releases of DeepSpeed compile helpers, for minutes, in the first step.
            "TORCH_COMPILE_DISABLE": "1",
        }

    def _orders(self, environment: str) -> Path:
        return self._folder / f"{environment}.orders"

    def _heard(self, rank: int, line: str) -> None:
        _, found, text = line.partition(RESULT)  # a library may have printed half a line before it
        if not found:
            return
        said = json.loads(text)
        if "ready" in said:
            self._waiting.discard(said["ready"])
        else:
            order = Order(**said.pop("order"))
            assert order == self._pending[0], f"{order} was not asked for"
            self._pending.popleft()
            self._harness.obeyed(order, said)
        if not self._waiting:
            self._next()

    def _next(self) -> None:
        if not self._pending:
            for environment in self._environments:
                self._write(environment, "null\n")
            return
        self.running = self._pending[0]
        self._deadline = time.monotonic() + self._harness.config.row_timeout_s
        self._harness.began(self.running)
        self._write(self._harness.environment_of(self.running), self.running.line())

    def _write(self, environment: str, line: str) -> None:
        with self._orders(environment).open("a", encoding="utf-8") as file:
            file.write(line)

    def _look(self) -> None:
        if time.monotonic() > self._deadline:
            what = "the start of the ranks" if self.running is None else f"{self.running.strategy}"
            limit = START_S if self.running is None else self._harness.config.row_timeout_s
            raise Hung(f"{what} was not done after {limit:g} s; its ranks have been killed")
