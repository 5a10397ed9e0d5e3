"""Overrides that break a run on purpose."""

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward


class FaultyFeedForward(FeedForward):
    """Answers NaN once it has been called a number of times."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        good_calls: int = 4

    def __init__(self, config: Config):
        super().__init__(config)
        self._left = config.good_calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        out = super().forward(x)
        return out * float("nan") if self._left < 0 else out


class InfiniteInOneElement(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad[0, 0] = float("inf")
        return grad


class InfiniteGradientFeedForward(FeedForward):
    """The right output; one element of the gradient of ``w2.weight`` is infinite, and no activation is."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0 * InfiniteInOneElement.apply(self.w2.weight).sum()


@override(target=FeedForward.Config, fqns=["*layers.2.feed_forward"])
def nan_after_some_calls(config: FeedForward.Config, good_calls: int = 4) -> FaultyFeedForward.Config:
    return derive(config, FaultyFeedForward.Config, good_calls=good_calls)


@override(target=FeedForward.Config, fqns=["*layers.1.feed_forward"])
def infinite_gradient(config: FeedForward.Config) -> InfiniteGradientFeedForward.Config:
    return derive(config, InfiniteGradientFeedForward.Config)
