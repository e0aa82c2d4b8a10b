"""Small backbones for small images: a multilayer perceptron and a plain convolutional network."""

from torch import nn

from fedprotip.models.freeze import Stages
from fedprotip.models.heads import register
from fedprotip.settings import ModelSettings


def _mlp_stages(settings: ModelSettings) -> Stages:
    return {f"layer{layer + 1}": (f"{2 * layer + 1}.",) for layer in range(settings.depth)}


def _cnn_stages(settings: ModelSettings) -> Stages:
    return {f"layer{stage + 1}": (f"{4 * stage}.", f"{4 * stage + 1}.") for stage in range(settings.depth)}


@register("mlp", _mlp_stages, plain=True)
def mlp(settings: ModelSettings, image_shape: tuple[int, int, int]) -> nn.Module:
    """`depth` hidden layers of `width` units with ReLU; the last one is the feature."""
    channels, height, width = image_shape
    layers: list[nn.Module] = [nn.Flatten()]
    size = channels * height * width
    for _ in range(settings.depth):
        layers += [nn.Linear(size, settings.width), nn.ReLU()]
        size = settings.width
    return nn.Sequential(*layers)


@register("small_cnn", _cnn_stages, plain=True)
def small_cnn(settings: ModelSettings, image_shape: tuple[int, int, int]) -> nn.Module:
    """`depth` stages of 3×3 convolution, batch norm, ReLU and pooling; the mean over positions is the feature."""
    layers: list[nn.Module] = []
    size, side = image_shape[0], min(image_shape[1:])
    for stage in range(settings.depth):
        channels = max(settings.width >> (settings.depth - 1 - stage), 1)
        layers += [nn.Conv2d(size, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        layers.append(nn.MaxPool2d(2) if side >= 4 else nn.Identity())
        size, side = channels, side // 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
