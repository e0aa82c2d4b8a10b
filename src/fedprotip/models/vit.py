"""Vision transformer with timm's parameter names, so that its augreg checkpoints load unchanged.

`vit_b16` is ViT-B/16: tokens of 768, 12 blocks, 12 heads, patches of 16 on images of 224 pixels. `vit` is the same
network of any size: tokens of `model.width`, `model.depth` blocks, a head for every 64 numbers of a token.
All matrices are plain Linear or Conv2d layers, qkv one of them, so that their inputs are captured and protected.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprotip.errors import UsageError
from fedprotip.models.freeze import Stages
from fedprotip.models.heads import register
from fedprotip.models.steps import Step
from fedprotip.settings import ModelSettings

HEAD = 64
"""Width of an attention head."""
GRID = 7
"""`vit` takes the largest patches of 16, 8, 4, 2 or 1 pixels that leave this many along the shorter side."""


class PatchEmbedding(nn.Module):
    """Images (n, c, h, w) → one token per patch (n, patches, d), row by row."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Every token looks at every token: (n, tokens, d) → (n, tokens, d)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        split = self.qkv(x).view(n, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (n, heads, tokens, d / heads)
        seen = F.scaled_dot_product_attention(query, key, value)
        return self.proj(seen.transpose(1, 2).reshape(n, tokens, width))


class Mlp(nn.Module):
    """Two layers with GELU between them, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Attention and MLP, each on normalised tokens and added to them: (n, tokens, d) → (n, tokens, d)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images (n, c, h, w) → the normalised class token (n, d). Images of another size are resized to `size`."""

    def __init__(self, channels: int, size: tuple[int, int], patch: int, width: int, depth: int) -> None:
        super().__init__()
        self.size = size
        self.grid = size[0] // patch, size[1] // patch
        self.patch_embed = PatchEmbedding(channels, patch, width)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 1e-6)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + self.grid[0] * self.grid[1], width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, max(width // HEAD, 1)) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self._class_token(self.blocks(self._tokens(images)))

    def steps(self) -> list[Step]:
        """The tokens, each block, the class token."""
        blocks = [Step((f"blocks.{index}.",), (block,), block) for index, block in self.blocks.named_children()]
        return [
            Step(("cls_token", "pos_embed", "patch_embed."), (self.patch_embed,), self._tokens),
            *blocks,
            Step(("norm.",), (self.norm,), self._class_token),
        ]

    def _tokens(self, images: Tensor) -> Tensor:
        if images.shape[2:] != self.size:
            images = F.interpolate(images, self.size, mode="bilinear", antialias=True)
        patches = self.patch_embed(images)
        return torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.pos_embed

    def _class_token(self, x: Tensor) -> Tensor:
        return self.norm(x)[:, 0]

    def adapted(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of a file; position embeddings of another square grid are resampled (bicubic) to this one."""
        positions = found["pos_embed"]
        side = math.isqrt(max(positions.shape[1] - 1, 0)) if positions.dim() == 3 else 0
        if positions.shape == self.pos_embed.shape or side == 0 or side**2 + 1 != positions.shape[1]:
            return found
        first, rest = positions[:, :1], positions[:, 1:].float()
        square = rest.transpose(1, 2).unflatten(2, (side, side))  # (1, d, side, side)
        resampled = F.interpolate(square, self.grid, mode="bicubic", antialias=True, align_corners=False)
        return found | {"pos_embed": torch.cat([first, resampled.flatten(2).transpose(1, 2)], dim=1)}


def _stages(depth: int) -> Stages:
    blocks = {f"block{block}": (f"blocks.{block}.",) for block in range(depth)}
    return {"stem": ("cls_token", "pos_embed", "patch_embed."), **blocks}


@register("vit", lambda settings: _stages(settings.depth), plain=True)
def vit(settings: ModelSettings, image_shape: tuple[int, int, int]) -> nn.Module:
    """A vision transformer of any size, for images of any size."""
    channels, *own = image_shape
    size = (settings.image_size,) * 2 if settings.image_size else (own[0], own[1])
    patch = next((patch for patch in (16, 8, 4, 2) if min(size) >= GRID * patch), 1)
    heads = max(settings.width // HEAD, 1)
    if settings.width % heads:
        raise UsageError(
            f"model.width = {settings.width} does not divide among {heads} heads; "
            f"the nearest valid value is {settings.width // HEAD * HEAD}."
        )
    return _transformer(channels, size, patch, settings.width, settings.depth)


@register("vit_b16", _stages(12), plain=True)
def vit_b16(settings: ModelSettings, image_shape: tuple[int, int, int]) -> nn.Module:
    """ViT-B/16, 86 million parameters, for images of 224 pixels unless `model.image_size` says otherwise."""
    return _transformer(image_shape[0], (settings.image_size or 224,) * 2, 16, width=768, depth=12)


def _transformer(channels: int, size: tuple[int, int], patch: int, width: int, depth: int) -> VisionTransformer:
    if any(side < patch or side % patch for side in size):
        raise UsageError(
            f"Images of {size[0]}×{size[1]} do not divide into patches of {patch}×{patch}; "
            f"the nearest valid model.image_size is {max(round(min(size) / patch), 1) * patch}."
        )
    return VisionTransformer(channels, size, patch, width, depth)
