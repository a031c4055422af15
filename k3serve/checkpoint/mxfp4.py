"""MXFP4 on the host: the numpy twin of model/mxfp4.py, and the check that a scale byte is a usable
factor.

Rule: low nibble first; the weight is the code's value times 2^(scale-127). Scale bytes 0 and 255 do
not occur.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from k3serve.errors import CheckpointError
from k3serve.model.mxfp4 import GROUP, VALUES

_TABLE = np.array(VALUES, np.float32)


def dequantise(codes: np.ndarray, scales: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """codes [..., n/2] u8, scales [..., n/32] u8 -> [..., n] dtype; exact in float32 and
    bfloat16.
    """
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1)
    values = _TABLE[nibbles].reshape(*scales.shape, GROUP)
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return (values * factors[..., None]).reshape(*codes.shape[:-1], -1).astype(dtype)


def check_scales(name: str, scales: np.ndarray) -> None:
    """Raises CheckpointError if a scale byte is 0 or 255, which no quantiser writes."""
    bad = (scales == 0) | (scales == 255)
    if bad.any():
        place = [int(i) for i in np.argwhere(bad)[0]]
        byte = int(scales[tuple(place)])
        raise CheckpointError(
            f"{name}: scale byte {byte} found at {place}, expected 1..254; "
            "the file is damaged or not MXFP4"
        )
