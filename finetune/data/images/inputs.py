"""Images of a run's rows as its model takes them: text in their places, and the arrays of a microbatch."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from finetune.arrays import Named, Per
from finetune.data.formats import Document, Span
from finetune.data.images.decode import ImageReader
from finetune.data.images.marks import IMAGE_MARK
from finetune.data.images.references import ImageReference
from finetune.data.images.thumbnails import thumbnail
from finetune.errors import PlanError
from finetune.generation import Prompt
from finetune.model_files.processor import ImageProcessor

IMAGES = "images"  # the array of a dataset that names the images of its documents, by their digests
DIGEST = "S64"


class ImageInputs:
    """The images of a run, by what their bytes are. `reader` decodes them, `processor` is the model's own.

    Only where an image is stays in memory; it is decoded again for each microbatch that shows it.
    """

    def __init__(self, processor: ImageProcessor, reader: ImageReader):
        self.processor = processor
        self.reader = reader
        self.references: dict[bytes, ImageReference] = {}

    def expanded(self, document: Document, source: str) -> tuple[Document, np.ndarray | None]:
        """(the document with the model's text in the places of its images, the tokens that the model's own processor
        makes of it; None without an image). Raises PlanError.
        """
        pattern = re.compile(f"{IMAGE_MARK}|{re.escape(self.processor.token)}")
        places = sum(len(pattern.findall(span.text)) for span in document.spans)
        images = document.images
        if places != len(images):
            raise PlanError(
                f"{source}: shows {len(images)} image{'s' * (len(images) != 1)}, and the chat template renders "
                f"{places}. Use a model whose template renders images, or another --chat_template."
            )
        if not images:
            return document, None
        if any(span.is_target and pattern.search(span.text) for span in document.spans):
            raise PlanError(f"{source}: an answer shows an image, and only text is learned. Remove it from the answer.")
        text = "".join(pattern.sub(self.processor.token, span.text) for span in document.spans)
        decoded = [self.reader.read(image) for image in images]
        found, ids = self.processor.of_text(text, decoded, document.from_template)
        left = iter(found)
        spans = tuple(part for span in document.spans for part in _with_texts(span, pattern, left))
        for image in images:
            self.references.setdefault(image.digest.encode(), image)
        return replace(document, spans=spans), ids

    def close(self) -> None:
        """Ends the process that decodes."""
        self.reader.close()

    def beside(self, tokens: np.ndarray, images: Sequence[Sequence[bytes]]) -> dict[str, Named]:
        """The arrays of a dataset whose documents have these tokens, end to end, and these images."""
        counts_D = np.array([len(of_document) for of_document in images], np.int64)
        values = np.array([digest for of_document in images for digest in of_document], DIGEST)
        found = {IMAGES: Named(values, Per.IMAGE, counts_D)}
        for name, types in self.processor.types_of(tokens).items():
            found[name] = Named(types, Per.POSITION, is_input=True)
        return found

    def shortened(self, ids: np.ndarray) -> np.ndarray:
        """Tokens with one in the place of each run of tokens that stand for parts of images."""
        is_part = np.isin(ids, list(self.processor.image_ids))
        again = is_part & np.r_[False, (ids[1:] == ids[:-1])]
        return ids[~again]

    def prompt(self, ids: list[int], images: Sequence[bytes]) -> list[int]:
        """The tokens of a prompt, with the images that it shows, if there are some."""
        if len(images):
            return Prompt(ids, images, self)
        return ids

    def pictures(self, images: Sequence[bytes]) -> list[str]:
        """Small pictures of the images, as data: URIs."""
        return [thumbnail(self.reader.read(self.references[digest])) for digest in images]

    def of_prompt(self, prompt: Prompt) -> dict[str, np.ndarray]:
        """{name: array} that the model takes beside the tokens of a prompt."""
        named = Named(np.array(prompt.images, DIGEST), Per.IMAGE, np.array([len(prompt.images)]))
        pixels = {name: array.values for name, array in self.inputs(named).items()}
        types = self.processor.types_of(np.array(prompt, np.int64))
        return pixels | {name: values[None] for name, values in types.items()}

    def inputs(self, images: Named) -> dict[str, Named]:
        """The arrays that the model takes for the images of a microbatch; none where its documents have none."""
        assert images.counts_D is not None, "images need the number of each document's"
        if not len(images.values):
            return {}
        decoded = [self.reader.read(self.references[bytes(digest)]) for digest in images.values]
        ends = np.cumsum(images.counts_D)
        each = [decoded[end - count : end] for end, count in zip(ends, images.counts_D, strict=True) if count]
        found = self.processor.inputs(each)
        return {
            name: Named(values, Per.IMAGE, images.counts_D, is_input=True, is_data=False)
            for name, values in found.items()
        }


def _with_texts(span: Span, pattern: re.Pattern, texts: Iterator[str]) -> Iterator[Span]:
    """The span with a text in the place of each image, as a span of its own."""
    at = 0
    for match in pattern.finditer(span.text):
        yield replace(span, text=span.text[at : match.start()])
        yield replace(span, text=next(texts), is_image=True)
        at = match.end()
    yield replace(span, text=span.text[at:])
