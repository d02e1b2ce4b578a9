"""The textbook's reward model, five pairs of four features, computed as its C program does: to the last digit."""

from __future__ import annotations

import math

import numpy as np

from tether.algorithms.linear_reward import Epoch, LinearReward

TEXTBOOK_NAMES = ("helpfulness", "accuracy", "conciseness", "safety")
TEXTBOOK_PAIRS = (  # (chosen, rejected)
    ((0.9, 0.8, 0.7, 1.0), (0.3, 0.2, 0.5, 0.8)),
    ((0.7, 0.9, 0.6, 1.0), (0.8, 0.1, 0.9, 0.3)),
    ((0.8, 0.7, 0.8, 0.9), (0.2, 0.6, 0.3, 1.0)),
    ((0.6, 0.8, 0.5, 1.0), (0.9, 0.7, 0.8, 0.1)),
    ((0.8, 0.9, 0.7, 0.9), (0.4, 0.3, 0.6, 0.7)),
)


def textbook(epochs: int = 200, learning_rate: float = 0.1) -> tuple[LinearReward, list[Epoch]]:
    """The five textbook pairs in single precision, one update per pair, every operation rounded in the order of the C program.

    `fit` with batch_size 1 gives the same to six digits; this gives the same to the last one. The score starts from the bias and
    adds w_k f_k in order; the update is (lr (p - 1)) (f_w - f_l); the loss is -log(p + 1e-8). C's expf and logf are the
    double-precision functions rounded once.

    >>> model, epochs = textbook()
    >>> [f"{w:+.3f}" for w in model.weights], [f"{epochs[n - 1].loss:.3f}" for n in (50, 100, 150, 200)]
    (['+2.760', '+3.339', '+1.144', '+3.755'], ['0.142', '0.081', '0.057', '0.044'])
    """
    f32 = np.float32
    one, rate, tiny = f32(1), f32(learning_rate), f32(1e-8)
    pairs = np.array(TEXTBOOK_PAIRS, dtype=f32)  # (5, 2, 4)
    weights, bias = np.zeros(4, dtype=f32), f32(0)

    def score(features: np.ndarray) -> np.float32:
        total = bias
        for w, f in zip(weights, features, strict=True):
            total = f32(total + w * f)
        return total

    history = []
    for epoch in range(epochs):
        summed = f32(0)
        for chosen, rejected in pairs:
            gap = f32(score(chosen) - score(rejected))
            p = f32(one / f32(one + f32(math.exp(-float(gap)))))
            summed = f32(summed + f32(-math.log(float(f32(p + tiny)))))
            weights = weights - f32(rate * f32(p - one)) * (chosen - rejected)
        gaps = [f32(score(chosen) - score(rejected)) for chosen, rejected in pairs]
        right = sum(score(chosen) > score(rejected) for chosen, rejected in pairs)
        history.append(Epoch(epoch + 1, float(f32(summed / f32(len(pairs)))), float(right) / len(pairs), float(np.mean(gaps))))
    return LinearReward(TEXTBOOK_NAMES, weights.astype(float), float(bias)), history
