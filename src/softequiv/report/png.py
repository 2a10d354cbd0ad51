"""How does a tensor become a picture in a page? PNG by hand: 8 bits, one diverging palette that colour-blind readers
can tell apart (purple, white, orange), and nothing to install.
"""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor

# ColorBrewer's PuOr, from -1 (purple) over 0 (near white) to 1 (brown)
ANCHORS = (
    (45, 0, 75), (84, 39, 136), (128, 115, 172), (178, 171, 210), (216, 218, 235), (247, 247, 247),
    (254, 224, 182), (253, 184, 99), (224, 130, 20), (179, 88, 6), (127, 59, 8),
)  # fmt: skip
SHADES = 255  # an odd number, so that zero has a shade of its own; the index after the last is transparent
LARGEST_PICTURE = 192  # pixels a side of a photograph in the page


def palette() -> Tensor:
    """The shades, (SHADES, 3) uint8."""
    anchors = torch.tensor(ANCHORS, dtype=torch.float64)
    place = torch.linspace(0, len(ANCHORS) - 1, SHADES, dtype=torch.float64)
    low = place.floor().long().clamp(max=len(ANCHORS) - 2)
    mix = (place - low)[:, None]
    return (anchors[low] * (1 - mix) + anchors[low + 1] * mix).round().to(torch.uint8)


def shaded(values: Tensor, limit: float) -> str:
    """A picture (H, W) with values from -limit to limit as a data URI; NaN is transparent.

    >>> shaded(torch.eye(2), 1.0).startswith("data:image/png;base64,")
    True
    """
    scaled = (values.double() / limit if limit else values.double()).clamp(-1, 1)
    index = ((scaled + 1) / 2 * (SHADES - 1)).round()
    index = torch.where(values.isnan(), float(SHADES), index).to(torch.uint8)
    clear = bytes([255] * SHADES + [0])
    return data_uri(index, 3, [(b"PLTE", palette().numpy().tobytes() + bytes(3)), (b"tRNS", clear)])


def photograph(x: Tensor, black: float, white: float) -> str:
    """An input (C, H, W) as a data URI, with the values that are drawn black and white; three channels are RGB."""
    x = shrunk(x.detach().double().cpu(), LARGEST_PICTURE)
    x = x[:3] if len(x) >= 3 else x[:1]
    shade = ((x - black) / (white - black or 1)).clamp(0, 1)
    pixels = (shade * 255).round().to(torch.uint8).permute(1, 2, 0)
    return data_uri(pixels, 2 if len(x) == 3 else 0, [])


def shrunk(maps: Tensor, largest: int) -> Tensor:
    """Pictures (N, H, W) averaged down until no side is larger."""
    height, width = maps.shape[-2:]
    factor = min(1.0, largest / max(height, width))
    size = (max(1, round(height * factor)), max(1, round(width * factor)))
    return maps if factor == 1 else torch.nn.functional.adaptive_avg_pool2d(maps, size)


def data_uri(pixels: Tensor, colour_type: int, chunks: list[tuple[bytes, bytes]]) -> str:
    """uint8 pixels (H, W) or (H, W, channels) as PNG, in a data URI."""
    height, width = pixels.shape[:2]
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels.reshape(height, -1)], 1)  # filter 0 each
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)),
        *chunks,
        (b"IDAT", zlib.compress(rows.numpy().tobytes(), 9)),
        (b"IEND", b""),
    ]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()
