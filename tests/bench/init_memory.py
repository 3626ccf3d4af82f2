"""Peak host memory of a rank from building a model to a ready engine: python -m tests.bench.init_memory

Four gloo ranks with parameters over all of them. The peak is of anonymous memory (RssAnon, sampled), above what the
process held before, as a part of the model in bf16. It includes the rank's fp32 masters, which are made with the
engine: 2 / 4 of the model here. One way after the other, each in a fresh pool. Blocks from 1 MiB are given back when
they are freed (MALLOC_MMAP_THRESHOLD_=1048576); glibc's own rule keeps about as much again with the process.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
import time
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from tests.support import pool as pool_module

SIZES = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
WORLD = 4
M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "amsp": {"sharding": "zero3", "topology": {"gpus_per_node": 4}},
}


class Peak:
    """Largest anonymous memory of this process above what it had at the start, sampled every millisecond.

    Mapped files do not count: the kernel drops their pages when it wants memory.
    """

    def __enter__(self) -> Peak:
        self._before = self.most = anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.most - self._before

    def _sample(self) -> None:
        while not self._over.is_set():
            self.most = max(self.most, anonymous())
            time.sleep(1e-3)


def anonymous() -> int:
    """RssAnon of this process, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def save(folder: str) -> int:
    """The checkpoint, by rank 0; returns its elements."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if dist.get_rank() == 0:
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="100MB")
        elements = sum(param.numel() for param in model.parameters())
    dist.barrier()
    return elements if dist.get_rank() == 0 else 0


def load(folder: str, how: str) -> tuple[int, float]:
    """(peak bytes of this rank, a checksum of the weights after)."""
    import deepspeed
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    import deepspeed_amsp

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    with Peak() as peak:
        known = HfDeepSpeedConfig(CONFIG) if how == "from_pretrained, stage 3" else None
        if how.startswith("Init"):
            with deepspeed_amsp.Init(folder):
                model = LlamaForCausalLM(LlamaConfig(**SIZES))
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
        del known
    total = torch.zeros((), dtype=torch.float64)
    for unit in engine.amsp.units:
        total += unit.shard.double().sum()
    dist.all_reduce(total)
    engine.destroy()
    return peak.bytes, float(total)


def main() -> None:
    """Print the table."""
    if find_spec("transformers") is None:
        raise SystemExit("needs transformers: pip install deepspeed_amsp[integrations]")
    with tempfile.TemporaryDirectory() as folder:
        workers = pool_module.fresh(WORLD)
        model_bytes = 2 * workers.run(save, folder, timeout=300)[0]
        workers.close()
        print(f"a model of {model_bytes / 1e6:.0f} MB, {WORLD} ranks, all parameters over all ranks")
        for how in ("from_pretrained, plain", "from_pretrained, stage 3", "Init and files"):
            workers = pool_module.fresh(WORLD)
            results = workers.run(load, folder, how, timeout=300)
            workers.close()
            peaks = ", ".join(f"{peak / model_bytes:.2f}" for peak, _ in results)
            print(f"{how:26s} peak of each rank / model: {peaks}; sum of the weights {results[0][1]:.6f}")


if __name__ == "__main__":
    main()
