"""The sum behind gloo's reduce-scatter, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepspeed_amsp.comm import SUMMED_AT_ONCE, sum_in_order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums_are_formed_in_fp32_in_rank_order_and_rounded_once(dtype: torch.dtype, ranks: int) -> None:
    torch.manual_seed(ranks)
    numel = SUMMED_AT_ONCE + 3
    sizes = torch.logspace(-4, 3, ranks).flip(0)[:, None]  # so that the order of a sum shows in its last bits
    parts = (torch.randn(ranks, numel) * sizes).to(dtype)
    expected = parts[0].float().numpy()
    for part in parts[1:]:
        expected = expected + part.float().numpy()
    assert expected.dtype == np.float32
    for out_dtype in {dtype, torch.float32}:
        out = torch.full((numel,), float("nan"), dtype=out_dtype)
        sum_in_order(parts, out)
        assert torch.equal(out, torch.from_numpy(expected).to(out_dtype))
