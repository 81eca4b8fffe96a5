"""The frames of a video that a model sees, by the rules of transformers' processors."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.model_config.preprocessing.videos import DynamicSampling, FrameSampling, TimedSampling


def chosen_frames(count: int, rate: float, sampling: FrameSampling | TimedSampling | DynamicSampling) -> np.ndarray:
    """Return the numbers of the frames that the model sees, int64 (frames,), of `count`, `rate` in a second."""
    match sampling:
        case FrameSampling():
            return _at_even_distances(count, rate, sampling)
        case TimedSampling():
            return _in_pairs(_at_times(count, rate, sampling))
        case DynamicSampling():
            return _in_pairs(_at_a_rate(count, rate, sampling))


def _at_even_distances(count: int, rate: float, sampling: FrameSampling) -> np.ndarray:
    wanted = sampling.num_frames
    if wanted is None:
        wanted = min(max(int(count / rate * sampling.fps), sampling.min_frames), sampling.max_frames)
    wanted = min(wanted, count)
    wanted = max(wanted - wanted % sampling.multiple, 1)
    if sampling.has_last:
        return np.linspace(0, count - 1, wanted).round().astype(np.int64)
    parts = np.arange(wanted, dtype=np.int64)
    if sampling.is_centered:
        return (2 * parts + 1) * count // (2 * wanted)
    return parts * count // wanted


def _at_times(count: int, rate: float, sampling: TimedSampling) -> np.ndarray:
    seconds, wanted = count / rate, int(sampling.max_seconds * sampling.fps)
    if seconds <= sampling.max_seconds:
        found = np.ceil(np.arange(max(math.floor(seconds * sampling.fps), 1)) * rate / sampling.fps)
    elif wanted >= count:
        return np.arange(count)
    else:
        found = np.ceil(np.linspace(0, seconds, wanted) * rate)
    numbers: np.ndarray = np.minimum(found.astype(np.int64), count - 1)
    return numbers


def _at_a_rate(count: int, rate: float, sampling: DynamicSampling) -> np.ndarray:
    longest = sampling.rates[-1][0]
    seconds = count / rate
    fps = next(fps for most, fps in sampling.rates if min(seconds, longest) <= most)
    wanted = max(min(int(min(seconds, longest) * fps * sampling.group), sampling.max_frames), 1)
    if count < wanted:
        return np.linspace(0, count - 1, wanted, dtype=np.int64)
    found, next_s = list[int](), 0.0
    for number in range(count):
        if number * (1 / rate) >= next_s:
            next_s += 1 / (sampling.group * fps)
            found.append(number)
            if next_s >= int(seconds):
                break
    if len(found) < wanted:
        return np.linspace(found[0], found[-1], wanted, dtype=np.int64)
    return np.asarray(found) if len(found) == wanted else np.linspace(0, count - 1, wanted, dtype=np.int64)


def _in_pairs(numbers: np.ndarray) -> np.ndarray:
    """Return different numbers, with the last one twice if there is an odd number of them."""
    found = np.unique(numbers).astype(np.int64)
    return np.append(found, found[-1:]) if len(found) % 2 else found
