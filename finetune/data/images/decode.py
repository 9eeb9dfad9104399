"""Decoding of images in one limited child process, and the decoded ones that are kept."""

import hashlib
import json
import signal
import subprocess
import threading
from collections import OrderedDict
from types import TracebackType

import numpy as np

from finetune.data.images.decode_process import HEADER, PIXELS, WHOLE
from finetune.data.images.references import ImageReference
from finetune.errors import PlanError
from finetune.system.child import Child, ChildEnded

MODULE = "finetune.data.images.decode_process"
CACHE_BYTES = 2**28
NO_PILLOW = "images: reading them needs the package pillow, which is not installed. pip install pillow"
BROKEN_PILLOW = "images: the package pillow {fact}. pip install --force-reinstall pillow"


class ImageReader:
    """Decodes images to RGB arrays. A context: the child process ends with it.

    The child starts with the first image. What an image does to it beyond the limits of decode_process.py costs a child
    and is a PlanError; the next image gets another. `max_pixels`: larger images are shrunk to it, their sides' ratio
    kept. `cache_bytes`: of the arrays that are kept, the least recently used go first. Threads may share a reader.
    """

    def __init__(self, max_pixels: int | None = None, cache_bytes: int = CACHE_BYTES):
        self.start = json.dumps({"max_pixels": max_pixels}).encode()
        self.cache_bytes = cache_bytes
        self.kept: OrderedDict[str, np.ndarray] = OrderedDict()
        self.kept_bytes = 0
        self.sizes: dict[str, tuple[int, int]] = {}
        self.whole: dict[str, tuple[int, int]] = {}  # of those that were decoded to their end
        self.child: Child | None = None
        self.lock = threading.RLock()

    def __enter__(self):
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def read(self, reference: ImageReference) -> np.ndarray:
        """The image, [H, W, 3] uint8, not to be written to. Raises PlanError naming its row."""
        with self.lock:
            found = self.kept.get(reference.digest)
            if found is not None:
                self.kept.move_to_end(reference.digest)
                return found
            facts, pixels = self._asked(reference, wanted=PIXELS)
            found = np.frombuffer(pixels, np.uint8).reshape(facts["height"], facts["width"], 3)
            self._keep(reference.digest, found)
            return found

    def size(self, reference: ImageReference, whole: bool = False) -> tuple[int, int]:
        """(height, width) of what `read` returns, by the image's header: damage behind it is not seen, unless `whole`
        has all of it decoded. Raises PlanError.
        """
        with self.lock:
            if reference.digest in self.kept:
                height, width, _ = self.kept[reference.digest].shape
                return height, width
            known = self.whole if whole else self.sizes
            if reference.digest not in known:
                facts, _ = self._asked(reference, wanted=WHOLE if whole else HEADER)
                known[reference.digest] = self.sizes[reference.digest] = (facts["height"], facts["width"])
            return known[reference.digest]

    def close(self) -> None:
        with self.lock:
            if self.child is not None:
                self.child.close()
                self.child = None

    def _asked(self, reference: ImageReference, wanted: str) -> tuple[dict, bytes]:
        data = reference.read_bytes()
        if reference.data is None and hashlib.sha256(data).hexdigest() != reference.digest:
            raise PlanError(f"{reference.source}: the image has changed since it was read. Start again.")
        is_new = self.child is None
        try:
            header, pixels = self._exchange(data, wanted)
        except ChildEnded as ended:
            self.close()
            if not is_new:  # what ended it may have been another program: a child of its own judges an image
                return self._asked(reference, wanted)
            raise PlanError(f"{reference.source}: {end_of_decoder(ended)}. Save the image again.") from None
        facts = json.loads(header)
        if facts.get("missing"):
            self.close()
            raise PlanError(BROKEN_PILLOW.format(fact=facts["missing"]) if facts["is_there"] else NO_PILLOW)
        if "error" in facts:
            raise PlanError(f"{reference.source}: {facts['error']}")
        return facts, pixels

    def _exchange(self, data: bytes, wanted: str) -> list[bytes]:
        if self.child is None:
            self.child = Child(MODULE, self.start, stderr=subprocess.DEVNULL)
        return self.child.request(wanted.encode(), data)

    def _keep(self, digest: str, image: np.ndarray) -> None:
        if image.nbytes > self.cache_bytes:
            return
        self.kept[digest] = image
        self.kept_bytes += image.nbytes
        while self.kept_bytes > self.cache_bytes:
            _, oldest = self.kept.popitem(last=False)
            self.kept_bytes -= oldest.nbytes


def end_of_decoder(ended: ChildEnded) -> str:
    """The fact on an image whose decoder ended."""
    if ended.status == -signal.SIGPROF:
        return "is not decoded within its limit of processor time"
    return f"ends the process that decodes it ({ended})"
