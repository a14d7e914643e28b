"""What is computed: encoders of text and images, and a decoder, all with random weights.

Time and memory do not depend on the weights, and a bare machine has none to load.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.cuda.sizes import Sizes

VOCABULARY = 30_522
HIDDEN = 384  # of all-MiniLM-L6-v2
TEMPERATURE = 0.05

Shard = dict[str, Tensor]


class TextEncoder(nn.Module):
    """all-MiniLM-L6-v2's architecture with mean pooling, dropout on: (B, T) to (B, 384)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=12,
            intermediate_size=4 * HIDDEN,
            max_position_embeddings=512,
        )
        self.model = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        pooled: Tensor = self.model(input_ids=input_ids).last_hidden_state.mean(1)
        return pooled


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut (He et al. 2016, figure 5)."""

    def __init__(self, width: int, inner: int, *, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.body = nn.Sequential(
            *_convolution(width, inner, 1, 1), nn.ReLU(inplace=True),
            *_convolution(inner, inner, 3, stride), nn.ReLU(inplace=True),
            *_convolution(inner, out, 1, 1),
        )  # fmt: skip
        same = stride == 1 and width == out
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_convolution(width, out, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class ImageEncoder(nn.Module):
    """ResNet-50's layout (He et al. 2016, table 1): images to (B, 128)."""

    def __init__(self, blocks: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = [
            *_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        ]  # fmt: skip
        width = 64
        for stage, num_blocks in enumerate(blocks):
            for block in range(num_blocks):
                inner = 64 * 2**stage
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(width, inner, stride=stride))
                width = 4 * inner
        self.layers = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 128)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        z: Tensor = self.layers(pixels)
        return z


def _convolution(width: int, out: int, size: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(width, out, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(out)]


def decoder(sizes: Sizes) -> nn.Module:
    """Return a GPT-2 of 1.3 billion parameters (24 layers, width 2048), or a small one."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50_257 if sizes.decoder_width > 1000 else 500,
        n_positions=sizes.decoder_tokens,
        n_embd=sizes.decoder_width,
        n_layer=sizes.decoder_layers,
        n_head=max(1, sizes.decoder_width // 64),
        use_cache=False,
    )
    model: nn.Module = GPT2Model(config)
    return model


def texts(num_shards: int, shard: int, sizes: Sizes, device: torch.device) -> list[Shard]:
    """Return shards of tokens on the device."""
    draw = torch.Generator().manual_seed(1)
    size = (shard, sizes.num_tokens)
    return [
        {"input_ids": torch.randint(VOCABULARY, size, generator=draw).to(device)}
        for _ in range(num_shards)
    ]


def images(num_shards: int, sizes: Sizes, device: torch.device) -> list[Shard]:
    """Return shards of images on the device."""
    draw = torch.Generator().manual_seed(1)
    size = (sizes.image_shard, 3, sizes.image_side, sizes.image_side)
    return [{"pixels": torch.randn(size, generator=draw).to(device)} for _ in range(num_shards)]


def info_nce(z: Tensor) -> Tensor:
    """Contrast the first half of the samples with the second: entry i of one belongs to i."""
    half = z.shape[0] // 2
    first, second = F.normalize(z[:half], dim=-1), F.normalize(z[half : 2 * half], dim=-1)
    scores = first @ second.T / TEMPERATURE
    return F.cross_entropy(scores, torch.arange(half, device=z.device))
