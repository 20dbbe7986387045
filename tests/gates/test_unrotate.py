import pytest
import torch
from gates.gate_tools import tiny_config
from transformers import Phi3Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.rotary import Rotary, unrotate

POSITIONS = torch.tensor([0, 1, 5, 77, 1000, 4095, 100_000])
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
}


def rotated(embedding, apply, keys: torch.Tensor) -> torch.Tensor:
    """keys [H, T, d] as transformers rotates them."""
    cos, sin = embedding(keys, POSITIONS[None])
    return apply(keys[None], keys[None], cos, sin)[1][0]


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("embedding", [LlamaRotaryEmbedding, Qwen3RotaryEmbedding])
def test_inverse_of_transformers(kind, embedding):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **SCALINGS[kind]}
    config = tiny_config(head_dim=32, rope_parameters=rope, max_position_embeddings=1024)
    if embedding is Qwen3RotaryEmbedding:
        config = Qwen3Config(**{**config.to_dict(), "model_type": "qwen3"})
    keys = torch.randn(2, len(POSITIONS), 32)
    turned = rotated(embedding(config), apply_rotary_pos_emb, keys)
    assert (turned - keys)[:, 1:].abs().max() > 0.5
    torch.testing.assert_close(Rotary.of(config).unrotate(turned, POSITIONS), keys, atol=1e-5, rtol=0)


def test_yarn_scales_keys_and_the_scale_is_taken_out():
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, **SCALINGS["yarn"]}
    rotary = Rotary.of(tiny_config(rope_parameters=rope, max_position_embeddings=1024))
    assert rotary.factor > 1.1
    cos, sin = rotary.cos_sin(torch.tensor([0]))
    torch.testing.assert_close(unrotate(torch.full((1, 8), rotary.factor), cos, sin), torch.ones(1, 8))


def phi3_rotary() -> tuple:
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
        pad_token_id=None,
    )
    return config, modeling_phi3.Phi3RotaryEmbedding(config)


def linear_rotary() -> tuple:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75, "factor": 4.0}
    config = tiny_config(head_dim=32, rope_parameters=rope)
    return config, LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("make", [phi3_rotary, linear_rotary])
def test_partial_rotary(make):
    config, embedding = make()
    keys = torch.randn(2, len(POSITIONS), 32)
    turned = rotated(embedding, modeling_phi3.apply_rotary_pos_emb, keys)
    assert torch.equal(turned[..., 24:], keys[..., 24:]) and not torch.equal(turned[..., :24], keys[..., :24])
    torch.testing.assert_close(Rotary.of(config).unrotate(turned, POSITIONS), keys, atol=1e-5, rtol=0)


def test_exact_inverse_of_rounded_cosines():
    rotary = Rotary.of(tiny_config())
    cos, sin = (x.bfloat16() for x in rotary.cos_sin(POSITIONS))
    assert ((cos.float() ** 2 + sin.float() ** 2) - 1).abs().max() > 1e-3
    keys = torch.randn(2, len(POSITIONS), 8)
    first, second = keys.chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    torch.testing.assert_close(unrotate(turned, cos, sin), keys)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"model_type": "glm4"}, "model type 'glm4' cannot be un-rotated"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "no single rope_theta"),
    ],
)
def test_what_cannot_be_unrotated_is_refused(change, message):
    config = tiny_config()
    for name, value in change.items():
        object.__setattr__(config, name, value)
    with pytest.raises(PolicyError, match=message):
        Rotary.of(config)
