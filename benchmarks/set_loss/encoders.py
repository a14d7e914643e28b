"""The models that the replay benchmarks put samples through: MiniLM, a CNN, an LSTM.

Each takes its arguments by name and gives one embedding per sample, shape (B, D). What a peer may
want bare is its `model`; the names of gradients are those in `model`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradbox_worker.demo.task import mean_pooling, model_folder

DROPOUT = 0.2
CNN_WIDTH = 32
CNN_STAGES = 4
LSTM_WIDTH = 256
VOCABULARY = 1000


class Encoder(nn.Module):
    """MiniLM with mean pooling: tokens (B, T) to embeddings (B, 384), dropout on."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(model_folder(), use_safetensors=True)
        self.train()

    def forward(self, **tokens: Tensor) -> Tensor:
        return mean_pooling(self.model(**tokens).last_hidden_state, tokens)


class ConvEncoder(nn.Module):
    """A residual network of four stages with batch norm in train mode: (B, 3, H, W) to (B, 256).

    The layout is ResNet-18's (He et al. 2016, table 1) at half its width, with the first
    convolution of the small-image variant (section 4.2) and no max pooling.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [_convolution(3, CNN_WIDTH, stride=1), nn.ReLU()]
        width = CNN_WIDTH
        for stage in range(CNN_STAGES):
            out = CNN_WIDTH * 2**stage
            layers += [Residual(width, out, stride=1 if stage == 0 else 2), Residual(out, out)]
            width = out
        self.model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.train()

    def forward(self, pixels: Tensor) -> Tensor:
        embedding: Tensor = self.model(pixels)
        return embedding


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width: int, out: int, *, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _convolution(width, out, stride=stride), nn.ReLU(), _convolution(out, out, stride=1)
        )
        same = stride == 1 and width == out
        self.shortcut = nn.Identity() if same else _convolution(width, out, stride=stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class RecurrentEncoder(nn.Module):
    """An LSTM of two layers with dropout between them: tokens (B, T) to embeddings (B, 256)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(VOCABULARY, LSTM_WIDTH // 2),
                "lstm": nn.LSTM(
                    LSTM_WIDTH // 2, LSTM_WIDTH, num_layers=2, dropout=DROPOUT, batch_first=True
                ),
            }
        )
        self.train()

    def forward(self, tokens: Tensor) -> Tensor:
        states_BTD, _ = self.model["lstm"](self.model["embedding"](tokens))
        embedding: Tensor = states_BTD.mean(1)
        return embedding


def _convolution(width: int, out: int, *, stride: int, size: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, out, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(out)
    )
