"""Small pictures of images for a run's page: PNG as data: URIs, written without an image library."""

import base64
import struct
import zlib

import numpy as np

LONGEST = 160  # pixels of a side


def thumbnail(image: np.ndarray) -> str:
    """A data: URI of an image [H, W, 3] of 8 bits, every n-th pixel of it so that no side has over LONGEST."""
    every = -(-max(image.shape[:2]) // LONGEST)
    return "data:image/png;base64," + base64.b64encode(_png(image[::every, ::every])).decode()


def _png(image: np.ndarray) -> bytes:
    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)  # a filter byte each
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
