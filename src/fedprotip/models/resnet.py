"""ResNet-18 with torchvision's parameter names, so that its checkpoints load unchanged.

Stems: `imagenet` (7×7, stride 2, max-pooling), `cifar` (3×3, stride 1, no pooling), and `stride1`, which keeps
the pretrained 7×7 kernel at stride 1 and the max-pooling: for 32-pixel images with ImageNet weights.
With the `cifar` stem a checkpoint's 7×7 kernel has no place: conv1 keeps its random 3×3 kernel, bn1 is loaded.
"""

from torch import Tensor, nn

from fedprotip.models.heads import register
from fedprotip.models.steps import Step
from fedprotip.settings import ModelSettings


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(x + shortcut)


class ResNet18(nn.Module):
    """Images (n, 3, h, w) → features (n, 512·pool²)."""

    def __init__(self, stem: str, pool: int, channels: int) -> None:
        super().__init__()
        size, stride = (3, 1) if stem == "cifar" else (7, 2 if stem == "imagenet" else 1)
        self.conv1 = nn.Conv2d(channels, 64, size, stride, padding=size // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, stride=1), BasicBlock(64, 64, stride=1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, stride=2), BasicBlock(128, 128, stride=1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, stride=2), BasicBlock(256, 256, stride=1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, stride=2), BasicBlock(512, 512, stride=1))
        self.avgpool = nn.AdaptiveAvgPool2d(pool)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self._pooled(self.layer4(self.layer3(self.layer2(self.layer1(self._stem(x))))))

    def steps(self) -> list[Step]:
        """The stem, each block, the pooling."""
        layers = {f"layer{stage}": self.get_submodule(f"layer{stage}") for stage in range(1, 5)}
        blocks = [
            Step((f"{name}.{index}.",), (block,), block)
            for name, layer in layers.items()
            for index, block in layer.named_children()
        ]
        return [
            Step(("conv1.", "bn1."), (self.conv1, self.bn1), self._stem),
            *blocks,
            Step((), (self.avgpool,), self._pooled),
        ]

    def _stem(self, images: Tensor) -> Tensor:
        return self.maxpool(self.relu(self.bn1(self.conv1(images))))

    def _pooled(self, x: Tensor) -> Tensor:
        return self.avgpool(x).flatten(1)

    def adapted(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of a file; its conv1 gives way to the random one where the kernels differ in size."""
        own = self.conv1.weight.detach()
        return found if found["conv1.weight"].shape[2:] == own.shape[2:] else found | {"conv1.weight": own}


STAGES = {"stem": ("conv1.", "bn1."), **{f"layer{stage}": (f"layer{stage}.",) for stage in range(1, 5)}}


@register("resnet18", STAGES, plain=True)
def resnet18(settings: ModelSettings, image_shape: tuple[int, int, int]) -> nn.Module:
    return ResNet18(settings.stem, settings.pool, image_shape[0])
