"""The lines through measurements: a link's latency and bandwidth, a kernel's speed over the size of its blocks.

A link is fitted as seconds = messages x latency + bytes / bandwidth over messages of several sizes; every point's
relative error weighs the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Point(NamedTuple):
    """Seconds (median of the slowest rank) to send `num_bytes` in all, in `messages` messages."""

    messages: int
    num_bytes: int
    seconds: float


class Kernel(NamedTuple):
    """An attention kernel's speed: on blocks of b tokens it reaches b / (b + half_efficiency_tokens) of `tflops`."""

    tflops: float
    half_efficiency_tokens: float


def fit_kernel(rates: Sequence[tuple[float, float]]) -> Kernel:
    """The kernel through two points (block in tokens, TFLOP/s).

    1 / rate = 1 / tflops + (half_efficiency_tokens / tflops) / block is a line in 1 / block. If the shorter block is
    not slower, blocks do not matter.

    >>> fit_kernel([(1000.0, 10.0), (250.0, 5.0)])
    Kernel(tflops=15.0, half_efficiency_tokens=500.0)
    """
    (block, rate), (short_block, short_rate) = rates
    slope = (1 / short_rate - 1 / rate) / (1 / short_block - 1 / block)
    if slope <= 0:
        return Kernel(rate, 0.0)
    start = 1 / rate - slope / block
    # noise may put the line's start below zero: then no long block is far from the end of the line
    start = max(start, 0.5 / rate)
    return Kernel(round(1 / start, 9), round(slope / start, 9))


def fit(points: Sequence[Point]) -> tuple[float, float, float]:
    """(latency, bytes per second, residual) of seconds = messages x latency + bytes / bandwidth.

    Least squares of relative errors. Neither may be negative: where the free optimum is, the best latency is 0.

    >>> latency, rate, residual = fit([Point(1, n, 1e-5 + n / 2e9) for n in (1000, 10**6, 10**8)])
    >>> f"{latency:.1e} s, {rate / 1e9:.2f} GB/s, error {residual:.1%}"
    '1.0e-05 s, 2.00 GB/s, error 0.0%'
    """
    seconds = np.array([point.seconds for point in points])
    counts = np.array([(point.messages, point.num_bytes) for point in points]) / seconds[:, None]
    scale = counts.max(axis=0)  # latency and seconds per byte are many powers of ten apart
    latency, per_byte = np.linalg.lstsq(counts / scale, np.ones(len(points)), rcond=None)[0] / scale
    if latency < 0 or per_byte <= 0:
        bytes_only = counts[:, 1]
        latency, per_byte = 0.0, bytes_only.sum() / (bytes_only @ bytes_only)
    residual = float(np.sqrt(np.mean((counts @ (latency, per_byte) - 1) ** 2)))
    return float(latency), float(1 / per_byte), residual
