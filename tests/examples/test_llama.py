"""The demo's model: its size by formula, rotary positions, causality, recomputation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from deepspeed_amsp.compare.llama import Llama, LlamaConfig, parameter_count, rope_tables, rotate

TINY = LlamaConfig(dim=32, layers=2, heads=4, ffn=48)
GROUPED = replace(TINY, kv_heads=2)


def seeded(config: LlamaConfig) -> Llama:
    """A model with reproducible weights."""
    torch.manual_seed(0)
    return Llama(config)


@pytest.mark.parametrize("config", [TINY, GROUPED, LlamaConfig()], ids=["tiny", "grouped", "default"])
def test_parameter_count_is_the_number_of_elements(config: LlamaConfig) -> None:
    """The formula counts what the module holds."""
    with torch.device("meta"):
        model = Llama(config)
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())


def test_default_is_about_ten_million() -> None:
    """What the README says about the demo."""
    assert 9.5e6 < parameter_count(LlamaConfig()) < 10.5e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "multiple of heads 5"),
        ({"dim": 12}, "3 must be even"),
        ({"kv_heads": 3}, "multiple of kv_heads 3"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, int], message: str) -> None:
    """The error names the numbers."""
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_rotary_scores_depend_on_distance_only() -> None:
    """The product of a turned query and a turned key is the same wherever the pair stands."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, TINY.head_dim, dtype=torch.float64).unbind()
    cos, sin = rope_tables(40, TINY, torch.device("cpu"))
    queries = rotate(query.expand(1, 1, 40, -1), cos.double(), sin.double())
    keys = rotate(key.expand(1, 1, 40, -1), cos.double(), sin.double())
    scores = (queries @ keys.transpose(-1, -2))[0, 0]
    for distance in (0, 1, 7, 30):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4)
    assert not torch.allclose(scores[0, 0], scores[7, 0], atol=1e-2)


def test_rotation_keeps_lengths() -> None:
    """Turning changes no norm."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 20, TINY.head_dim)
    turned = rotate(x, *rope_tables(20, TINY, torch.device("cpu")))
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)


@pytest.mark.parametrize("config", [TINY, GROUPED], ids=["tiny", "grouped"])
def test_future_bytes_do_not_change_past_scores(config: LlamaConfig) -> None:
    """Changing one byte changes scores from its position on, and none before it."""
    model = seeded(config)
    tokens = torch.randint(0, 256, (2, 24))
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % 256
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.allclose(before[:, :15], after[:, :15], atol=1e-6)
    assert not torch.allclose(before[:, 15:], after[:, 15:], atol=1e-3)


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    """Fresh weights know nothing: ln 256 nats per byte."""
    loss = seeded(LlamaConfig(layers=1))(torch.randint(0, 256, (4, 33)))
    assert loss.item() == pytest.approx(math.log(256), abs=0.3)


def test_recomputation_changes_nothing() -> None:
    """Loss and gradients are equal with and without."""
    windows = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
    gradients = []
    for recompute in (False, True):
        model = seeded(replace(TINY, recompute=recompute))
        model(windows).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)
