"""A decoder of a few lines, as checks need one on machines without transformers; and how a rank joins its group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from hybrid.doctor.check import Setting

GROUP_TIMEOUT_S = 600
"""One rank may wait for another that starts an engine; a check's own deadline comes first."""


class Layer(nn.Module):
    """Attention and a gated MLP, each behind an RMS norm."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 6 * hidden, bias=False), nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x_BTH.shape
        qkv = self.qkv(self.norms[0](x_BTH)).view(batch, tokens, 3, self.heads, hidden // self.heads)
        attended = scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x_BTH = x_BTH + self.out(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        gate, up = self.up(self.norms[1](x_BTH)).chunk(2, dim=-1)
        return x_BTH + self.down(silu(gate) * up)


class Decoder(nn.Module):
    """B x T token ids to B x T x V logits. Positions are not told apart, which no check needs."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList([Layer(hidden, heads) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x_BTH = self.embedding(ids_BT)
        for layer in self.layers:
            x_BTH = layer(x_BTH)
        return self.head(self.norm(x_BTH))


def make_decoder(setting: Setting, dtype: torch.dtype) -> Decoder:
    """About 330 million parameters (0.2 million in small), the same on every rank and device."""
    sizes = setting.size((32_000, 1536, 8, 12), (256, 64, 2, 2))
    torch.manual_seed(0)
    return Decoder(*sizes).to(setting.torch_device, dtype)


def share_of_loss(setting: Setting, step: int) -> Callable[[nn.Module], torch.Tensor]:
    """This rank's share of the mean loss over tokens that all ranks draw alike."""
    shape, vocabulary = setting.size((4, 512), (2, 16)), setting.size(32_000, 256)
    generator = torch.Generator().manual_seed(100 * step + setting.rank)
    ids = torch.randint(0, vocabulary, shape, generator=generator).to(setting.torch_device)

    def loss(model: nn.Module) -> torch.Tensor:
        logits = model(ids)[:, :-1].float()
        return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / setting.world

    return loss


def join(setting: Setting) -> None:
    """Form the group of this role's processes, as a run's roles do: gloo, and nccl for tensors on a GPU."""
    os.environ.update(RANK=str(setting.rank), WORLD_SIZE=str(setting.world), LOCAL_RANK="0", LOCAL_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # DeepSpeed wants them set; the group is there already
    if setting.device == "cuda":
        torch.cuda.set_device(setting.torch_device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if setting.device == "cuda" else "gloo",
        init_method=f"file://{setting.folder}/group-{setting.role}",
        rank=setting.rank,
        world_size=setting.world,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
