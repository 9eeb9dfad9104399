"""A model's own processor of images: transformers' class for the model, on the settings of its folder, never its code.

Pillow's implementation of each is taken where there is one, so that an image is the same numbers on every machine.
"""

import copy
import importlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import PlanError
from finetune.model_files.tokenizer import FullTokenizer
from finetune.system.json_files import read_json
from finetune.system.untrusted import untrusted

SETTINGS = "processor_config.json"
IMAGE_SETTINGS = "preprocessor_config.json"
# What a processor returns beside what it makes of images.
OF_TEXT = ("input_ids", "attention_mask", "labels", "text_replacement_offsets")
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
CONFIG_TOKENS = ("image_token_id", "image_token_index")  # of a model's config
TRIAL_PIXELS = 64
REMEDY = "Give a folder with the model's own processor."


def sees_images(folder: Path, config: dict) -> bool:
    """True if a model's config has a tower for images, and its folder the settings of its processor."""
    has_settings = any((folder / name).is_file() for name in (SETTINGS, IMAGE_SETTINGS))
    return has_settings and isinstance(config.get("vision_config"), dict)


class ImageProcessor:
    """A model's own processor of images: makes text for their places, and the arrays that the model takes.

    `token`: a chat template writes it for an image. `token_types`: names of the arrays of one number a token that the
    model takes to see where images are. `settings`: those of its folder, in JSON: with others images are other numbers.
    `of_config`: the tokens that the model's config names.
    """

    def __init__(self, own: Any, name: str, settings: str = "", of_config: frozenset[int] = frozenset()):
        self.own = own
        self.name = name
        self.of_config = of_config
        self.settings = settings
        self.token: str = own.image_token
        trial = np.zeros((TRIAL_PIXELS, TRIAL_PIXELS, 3), np.uint8)
        found = self._processed([self.token], [[trial]])
        self.token_types = tuple(name for name in TOKEN_TYPES if name in found)

    @classmethod
    def open(cls, folder: Path, config: dict, tokenizer: FullTokenizer) -> "ImageProcessor":
        """The processor of a model's folder, around the run's tokenizer. Raises PlanError."""
        with untrusted(f"{folder}: its processor of images does not load", REMEDY):
            settings = [_settings(folder / name) for name in (SETTINGS, IMAGE_SETTINGS)]
            own = _built(folder, _class_of(config, *settings), tokenizer, settings[0])
            named = (config.get(key) for key in CONFIG_TOKENS)
            of_config = frozenset(number for number in named if type(number) is int)
            return cls(own, str(folder), settings=json.dumps(settings, sort_keys=True), of_config=of_config)

    def of_text(self, text: str, images: Sequence[np.ndarray], from_template: bool) -> tuple[list[str], np.ndarray]:
        """(the text for the place of each image, the tokens of the whole) of a text with a `token` for each image.
        `images`: [H, W, 3] of 8 bits. Raises PlanError.
        """
        with untrusted(f"{self.name}: its processor does not take these images", "Use other images."):
            found = self._processed([text], [list(images)], add_special_tokens=not from_template)
        (offsets,) = found["text_replacement_offsets"]
        return [part["replacement"] for part in offsets], np.asarray(found["input_ids"][0], np.int32)

    def inputs(self, images: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """{name: array} that the model takes for the images of several documents, none of which has none."""
        texts = [self.token * len(of_document) for of_document in images]
        with untrusted(f"{self.name}: its processor does not take these images together", "Use other images."):
            found = self._processed(texts, [list(of_document) for of_document in images])
        return {name: np.asarray(values) for name, values in found.items() if name not in (*OF_TEXT, *self.token_types)}

    def types_of(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """{name: array} that say of each token whether it stands for a part of an image."""
        if not self.token_types:
            return {}
        (types,) = self.own.create_mm_token_type_ids([ids.tolist()])
        return {name: np.asarray(types, np.int64) for name in self.token_types}

    @cached_property
    def image_ids(self) -> frozenset[int]:
        """The tokens that stand for parts of images, to the processor or to the model."""
        return self.of_config | {int(number) for number in self.own.image_token_ids if number is not None}

    def _processed(self, texts: list[str], images: list[list[np.ndarray]], **text: Any) -> dict:
        given = {"return_text_replacement_offsets": True, "padding": True, "return_tensors": "np", **text}
        return dict(self.own(images=images, text=list(texts), **given))


def _built(folder: Path, known: Any, tokenizer: FullTokenizer, settings: dict) -> Any:
    """A processor of this class, with these settings."""
    from transformers import AutoImageProcessor

    class OfImages(known):
        """The same without a part for video or sound."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    OfImages.__name__ = known.__name__
    images = AutoImageProcessor.from_pretrained(
        str(folder), backend="pil", trust_remote_code=False, local_files_only=True
    )
    padding: Any = tokenizer
    if tokenizer.pad_token_id is None:  # texts beside images are padded, and their tokens then left out
        padding = copy.deepcopy(tokenizer)
        padding.pad_token = tokenizer.eos_token
    parts = {"tokenizer": padding, "image_processor": images}
    settings = {name: value for name, value in settings.items() if name != "chat_template"}
    return OfImages.from_args_and_dict([parts.get(name) for name in known.get_attributes()], settings)


def _settings(file: Path) -> dict:
    if file.is_file():
        return read_json(file, {})
    return {}


def _class_of(config: dict, *settings: dict) -> Any:
    """The class that a folder's settings name, if it is one of transformers', else that of the model's type."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    names: dict[str, str] = {}
    for known, named in PROCESSOR_MAPPING_NAMES.items():
        for name in (named,) if isinstance(named, str) else named:
            names.setdefault(name, known)
    model_type = config.get("model_type")
    asked = [str(found.get("processor_class")) for found in settings]
    name = next((name for name in (*asked, *(n for n in names if names[n] == model_type)) if name in names), "")
    if not name:
        raise PlanError(f"transformers has no processor for models of type {model_type}. {REMEDY}")
    module = re.sub(r"[^a-z0-9]", "_", names[name])
    return getattr(importlib.import_module(f"transformers.models.{module}.processing_{module}"), name)
