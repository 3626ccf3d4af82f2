"""Which factors a run uses, and what they cost: pure arithmetic, without torch.distributed and deepspeed."""
