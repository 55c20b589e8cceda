"""The demo's model: a small residual convolutional network for 8x8 pictures of digits."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn


@final
class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut around them; height and width do not change.

    Args:
        channels_in: the channels of the input, shape `(batch, channels_in, height, width)`.
        channels_out: the channels of the output; where they differ, the shortcut is a 1x1
            convolution, and the identity otherwise.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv1: nn.Module = nn.Conv2d(
            channels_in, channels_out, kernel_size=3, padding=1, bias=False
        )
        self.norm1: nn.Module = nn.BatchNorm2d(channels_out)
        self.relu1: nn.Module = nn.ReLU()
        self.conv2: nn.Module = nn.Conv2d(
            channels_out, channels_out, kernel_size=3, padding=1, bias=False
        )
        self.norm2: nn.Module = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = (
            nn.Identity()
            if channels_in == channels_out
            else nn.Conv2d(channels_in, channels_out, kernel_size=1, bias=False)
        )
        # In place, as in many published networks: it overwrites the sum of norm2 and the shortcut.
        # The demo shows how hookline handles that.
        self.relu2: nn.Module = nn.ReLU(inplace=True)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Run the block: `relu2(norm2(conv2(relu1(norm1(conv1(x))))) + shortcut(x))`."""
        y = self.relu1(self.norm1(self.conv1(x_BCHW)))
        y = self.norm2(self.conv2(y))
        return self.relu2(y + self.shortcut(x_BCHW))  # type: ignore[no-any-return]


@final
class DigitsNet(nn.Module):
    """A classifier with ten scores for each 8x8 picture of a digit.

    >>> DigitsNet()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])

    Args:
        width: the channels of the stem; the second and third block have twice as many.
    """

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.stem: nn.Sequential = nn.Sequential()
        self.stem.add_module("conv", nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False))
        self.stem.add_module("norm", nn.BatchNorm2d(width))
        self.stem.add_module("relu", nn.ReLU(inplace=True))
        self.block1: ResidualBlock = ResidualBlock(width, width)
        self.pool1: nn.Module = nn.MaxPool2d(2)
        self.block2: ResidualBlock = ResidualBlock(width, 2 * width)
        self.block3: ResidualBlock = ResidualBlock(2 * width, 2 * width)
        self.pool2: nn.Module = nn.AdaptiveAvgPool2d(1)
        self.flatten: nn.Module = nn.Flatten()
        self.dropout: nn.Module = nn.Dropout(0.1)
        self.head: nn.Linear = nn.Linear(2 * width, 10)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Score pictures of shape `(batch, 1, 8, 8)`, 0 dark and 1 light: shape `(batch, 10)`."""
        y = self.block1(self.stem(x_BCHW))
        y = self.block3(self.block2(self.pool1(y)))
        return self.head(self.dropout(self.flatten(self.pool2(y))))  # type: ignore[no-any-return]
