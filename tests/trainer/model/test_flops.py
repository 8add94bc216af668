"""The FLOP formula equals torch's counter exactly."""

import pytest
import torch
from tests.trainer.tiny_model import SMALL
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fluxtrain.contract.run.model import ModelConfig
from fluxtrain.model.flops import forward_flops, training_flops
from fluxtrain.model.flux import Flux

CONFIGS = {
    "small": SMALL,
    "guidance": SMALL.model_copy(update={"guidance_embed": True}),
    "narrow MLP": SMALL.model_copy(update={"mlp_ratio": 1.3, "in_channels": 32}),
    "no double blocks": SMALL.model_copy(update={"depth": 0}),
}


def counted(
    config: ModelConfig, image_tokens: int, text_tokens: int, device: str
) -> tuple[int, int]:
    """Return forward FLOPs, and forward and backward FLOPs, as torch counts them for one sample."""
    with torch.device(device):
        model = Flux(config)
        arguments = {
            "img": torch.zeros(1, image_tokens, config.in_channels),
            "img_ids": torch.zeros(image_tokens, 3),
            "txt": torch.zeros(1, text_tokens, config.context_in_dim),
            "txt_ids": torch.zeros(text_tokens, 3),
            "timesteps": torch.zeros(1),
            "y": torch.zeros(1, config.vec_in_dim),
            "guidance": torch.zeros(1) if config.guidance_embed else None,
        }
    # the counter does not support the CPU's fused attention
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model(**arguments).sum()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "tokens"), [("small", (16, 5)), *((name, (4, 64)) for name in CONFIGS)]
)
def test_flops_of_small_models_equal_torchs_count(name: str, tokens: tuple[int, int]) -> None:
    config = CONFIGS[name]
    ours = forward_flops(config, *tokens), training_flops(config, *tokens)
    assert ours == counted(config, *tokens, device="cpu")


@pytest.mark.parametrize(
    ("tokens", "forward", "training"),
    [
        ((256, 256), 6_806_745_120_768, 20_413_685_956_608),
        pytest.param((4096, 512), 74_384_632_971_264, 223_139_397_107_712, marks=pytest.mark.slow),
    ],
)
def test_flops_of_the_full_model_equal_torchs_count(
    tokens: tuple[int, int], forward: int, training: int
) -> None:
    schnell = ModelConfig()
    assert (forward_flops(schnell, *tokens), training_flops(schnell, *tokens)) == (
        forward,
        training,
    )
    assert counted(schnell, *tokens, device="meta") == (forward, training)
