"""Tiny random image-text models of many classes with their own processors, saved as the folders people download."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tests.support.tiny import train_tokenizer

TEXT = dict(
    vocab_size=512,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
CLIP = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
)
MROPE = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4)
DEEP = dict(depth=2, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32, patch_size=14)  # a tower
MEAN = dict(image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5])


def parts_template(image: str) -> str:
    """A chat template of a vision model: contents are texts, or lists of parts."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
        "{% if part['type'] == 'image' %}{{ '" + image + "' }}{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


@dataclass(frozen=True)
class Family:
    """A class of image-text models: its config's class and values, its processor, and the tokens that it needs.

    `named`: special tokens by the names that the tokenizer gives them; `image`: what a template writes for an image.
    """

    config: str
    values: Callable[[Callable[[str], int]], dict]
    image_processor: str
    image_settings: dict
    processor: str
    image: str
    named: dict = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    settings: dict = field(default_factory=dict)


def qwen2_5(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT | dict(rope_parameters=MROPE),
        vision_config=DEEP | dict(window_size=56, fullatt_block_indexes=[1]),
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )


def qwen3(token: Callable[[str], int]) -> dict:
    text = TEXT | dict(head_dim=8, rope_parameters=MROPE)
    tower = DEEP | dict(num_position_embeddings=64, deepstack_visual_indexes=[0])
    return qwen2_5(token) | dict(text_config=text, vision_config=tower)


def gemma3(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT | dict(head_dim=8, sliding_window=16, layer_types=["sliding_attention", "full_attention"]),
        vision_config=CLIP,
        mm_tokens_per_image=4,
        image_token_index=token("<image_soft_token>"),
        boi_token_index=token("<start_of_image>"),
        eoi_token_index=token("<end_of_image>"),
    )


def llava(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT | dict(model_type="llama"),
        vision_config=CLIP | dict(model_type="clip_vision_model"),
        image_token_index=token("<image>"),
        image_seq_length=4,
    )


def llava_next(token: Callable[[str], int]) -> dict:
    return llava(token) | dict(image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]])


def llava_onevision(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT | dict(model_type="qwen2"),
        vision_config=CLIP | dict(model_type="siglip_vision_model"),
        image_token_index=token("<image>"),
        video_token_index=token("<video>"),
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )


def idefics3(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT | dict(model_type="llama"),
        vision_config=CLIP | dict(image_size=56),
        image_token_id=token("<image>"),
        scale_factor=2,
    )


def paligemma(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT | dict(model_type="gemma2", head_dim=8, num_image_tokens=4),
        vision_config=CLIP | dict(model_type="siglip_vision_model", projection_dim=32),
        image_token_index=token("<image>"),
        projection_dim=32,
    )


def internvl(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT | dict(model_type="qwen2"),
        vision_config=CLIP | dict(image_size=[28, 28], patch_size=[14, 14]),
        image_token_id=token("<IMG_CONTEXT>"),
        image_seq_length=1,
    )


def mistral3(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT | dict(model_type="mistral", head_dim=8),
        vision_config=CLIP | dict(model_type="pixtral", image_size=112, head_dim=8),
        image_token_index=token("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )


def pixtral(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT | dict(model_type="mistral", head_dim=8),
        vision_config=CLIP | dict(model_type="pixtral", image_size=112, head_dim=8),
        image_token_index=token("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=1,
    )


def glm4v(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT
        | dict(
            rope_parameters=dict(
                rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4, partial_rotary_factor=1.0
            )
        ),
        vision_config=DEEP | dict(image_size=56),
        image_token_id=token("<|image|>"),
        video_token_id=token("<|video|>"),
        image_start_token_id=token("<|begin_of_image|>"),
        image_end_token_id=token("<|end_of_image|>"),
        video_start_token_id=token("<|begin_of_video|>"),
        video_end_token_id=token("<|end_of_video|>"),
    )


def gemma4(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT
        | dict(
            head_dim=8,
            global_head_dim=8,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=512,
        ),
        vision_config=dict(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            patch_size=16,
            pooling_kernel_size=2,
            position_embedding_size=256,
        ),
        audio_config=None,
        image_token_id=token("<|image|>"),
        boi_token_id=token("<|image>"),
        eoi_token_id=token("<image|>"),
        video_token_id=token("<|video|>"),
    )


def gemma4_vision(token: Callable[[str], int]) -> dict:
    """Stand-in for the larger of Gemma 4, whose images attend to all of themselves."""
    found = gemma4(token)
    return found | dict(text_config=found["text_config"] | dict(use_bidirectional_attention="vision"))


def aya_vision(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT | dict(model_type="cohere2", layer_types=["sliding_attention", "full_attention"]),
        vision_config=CLIP | dict(model_type="siglip_vision_model", image_size=56),
        image_token_index=token("<|IMG_PATCH|>"),
    )


def ovis2(token: Callable[[str], int]) -> dict:
    return dict(
        text_config=TEXT | dict(model_type="qwen2"),
        vision_config=CLIP | dict(hidden_stride=1, vocab_size=32, num_visual_indicator_tokens=5),
        image_token_id=token("<IMG_ATOM>"),
        visual_indicators_token_ids=[
            token(word) for word in ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
        ],
        vocab_size=512,
        hidden_size=32,
    )


QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
QWEN = dict(
    image_processor="Qwen2VLImageProcessorPil",
    image_settings=MEAN | dict(size=dict(shortest_edge=56 * 56, longest_edge=112 * 112), patch_size=14, merge_size=2),
    image="<|vision_start|><|image_pad|><|vision_end|>",
    tokens=QWEN_TOKENS,
)
ROWS = tuple(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5))
IDEFICS = dict(
    config="Idefics3Config",
    values=idefics3,
    image_processor="Idefics3ImageProcessorPil",
    image_settings=MEAN | dict(size=dict(longest_edge=112), max_image_size=dict(longest_edge=56)),
    processor="Idefics3Processor",
    image="<image>",
    tokens=("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *ROWS),
    settings=dict(image_seq_len=4),
)
LLAVA = dict(
    values=llava,
    image_processor="CLIPImageProcessorPil",
    image_settings=MEAN | dict(size=dict(shortest_edge=28), crop_size=dict(height=28, width=28)),
    image="<image>\n",
    tokens=("<image>", "<video>"),
    settings=dict(patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1),
)
PINPOINTS = dict(image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]])
PIXTRAL = dict(
    image_processor="PixtralImageProcessorPil",
    image_settings=MEAN | dict(size=dict(longest_edge=112), patch_size=dict(height=14, width=14)),
    processor="PixtralProcessor",
    image="[IMG]",
    tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
)
GEMMA4 = dict(
    config="Gemma4Config",
    image_processor="Gemma4ImageProcessorPil",
    image_settings=MEAN | dict(patch_size=16, pooling_kernel_size=2, max_soft_tokens=70),
    processor="Gemma4Processor",
    image="<|image|>",
    named=dict(
        **dict(image_token="<|image|>", boi_token="<|image>", eoi_token="<image|>"),
        **dict(audio_token="<|audio|>", boa_token="<|audio>", eoa_token="<audio|>"),
    ),
    tokens=("<|video|>",),
)
FAMILIES = {
    "qwen2_5_vl": Family("Qwen2_5_VLConfig", qwen2_5, processor="Qwen2_5_VLProcessor", **QWEN),
    "qwen3_vl": Family("Qwen3VLConfig", qwen3, processor="Qwen3VLProcessor", **QWEN),
    "gemma3": Family(
        "Gemma3Config",
        gemma3,
        "Gemma3ImageProcessorPil",
        MEAN | dict(size=dict(height=28, width=28)),
        "Gemma3Processor",
        "<start_of_image>",
        named=dict(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"),
        settings=dict(image_seq_length=4),
    ),
    "llava": Family("LlavaConfig", processor="LlavaProcessor", **LLAVA),
    "llava_next": Family(
        "LlavaNextConfig",
        processor="LlavaNextProcessor",
        **LLAVA
        | dict(
            values=llava_next,
            image_processor="LlavaNextImageProcessorPil",
            image_settings=LLAVA["image_settings"] | PINPOINTS,
        ),
    ),
    "llava_onevision": Family(
        "LlavaOnevisionConfig",
        llava_onevision,
        "LlavaOnevisionImageProcessorPil",
        MEAN | dict(size=dict(height=28, width=28)) | PINPOINTS,
        "LlavaOnevisionProcessor",
        "<image>",
        tokens=("<image>", "<video>"),
        settings=dict(num_image_tokens=4, vision_feature_select_strategy="full"),
    ),
    "idefics3": Family(**IDEFICS),
    "smolvlm": Family(
        **IDEFICS
        | dict(config="SmolVLMConfig", image_processor="SmolVLMImageProcessorPil", processor="SmolVLMProcessor")
    ),
    "paligemma": Family(
        "PaliGemmaConfig",
        paligemma,
        "SiglipImageProcessorPil",
        MEAN | dict(size=dict(height=28, width=28), image_seq_length=4),
        "PaliGemmaProcessor",
        "<image>",
        tokens=("<image>",),
    ),
    "internvl": Family(
        "InternVLConfig",
        internvl,
        "GotOcr2ImageProcessorPil",
        MEAN | dict(size=dict(height=28, width=28), crop_to_patches=True, min_patches=1, max_patches=4),
        "InternVLProcessor",
        "<IMG_CONTEXT>",
        named=dict(
            start_image_token="<img>",
            end_image_token="</img>",
            context_image_token="<IMG_CONTEXT>",
            video_token="<video>",
        ),
        settings=dict(image_seq_length=1),
    ),
    "gemma4": Family(values=gemma4, **GEMMA4),
    "gemma4_vision": Family(values=gemma4_vision, **GEMMA4),
    "aya_vision": Family(
        "AyaVisionConfig",
        aya_vision,
        "GotOcr2ImageProcessorPil",
        MEAN | dict(size=dict(height=56, width=56), crop_to_patches=True, min_patches=1, max_patches=4),
        "AyaVisionProcessor",
        "<image>",
        tokens=(
            *("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"),
            *("TILE", "TILE_GLOBAL"),
        ),
        settings=dict(patch_size=14, img_size=56, downsample_factor=2),
    ),
    "ovis2": Family(
        "Ovis2Config",
        ovis2,
        "Ovis2ImageProcessorPil",
        MEAN | dict(size=dict(height=28, width=28), crop_to_patches=True, min_patches=1, max_patches=4),
        "Ovis2Processor",
        "<image>",
        tokens=("<image>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<IMG_ATOM>"),
        settings=dict(image_seq_length=4),
    ),
    "mistral3": Family("Mistral3Config", mistral3, settings=dict(patch_size=14, spatial_merge_size=2), **PIXTRAL),
    "pixtral": Family("LlavaConfig", pixtral, settings=dict(patch_size=14), **PIXTRAL),
    "glm4v": Family(
        "Glm4vConfig",
        glm4v,
        "Glm4vImageProcessorPil",
        MEAN | dict(size=dict(shortest_edge=56 * 56, longest_edge=112 * 112), patch_size=14, merge_size=2),
        "Glm4vProcessor",
        "<|begin_of_image|><|image|><|end_of_image|>",
        tokens=(
            *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
            *("<|begin_of_video|>", "<|end_of_video|>"),
        ),
    ),
}


def save_model(name: str, folder: Path, seed: int = 0, tower: dict | None = None, **text: Any) -> Path:
    """Saves the tiny model of a family with its tokenizer and processor. `text`, `tower`: more of the configs of its
    language model and its tower.
    """
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    extra = dict(extra_special_tokens=family.named) if family.named else {}
    template = parts_template(family.image.replace("\n", "\\n"))
    tokenizer = train_tokenizer(folder, bos=False, chat_template=template)
    tokenizer.add_tokens([*family.tokens, *family.named.values()], special_tokens=True)
    if extra:
        tokenizer.save_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **extra)
    tokenizer.save_pretrained(folder)
    values = family.values(tokenizer.convert_tokens_to_ids)
    values["text_config"] = values["text_config"] | text
    values["vision_config"] = values["vision_config"] | (tower or {})
    config = getattr(transformers, family.config)(**values)
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder)
    images = getattr(transformers, family.image_processor)(**family.image_settings)
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": family.processor, **family.settings}))
    return folder


COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "grey": (128, 128, 128)}
ANSWERS = ("a dog", "two cats on it", "no", "The capital of France is Paris.", "naïve", "It is 5.")


def picture(number: int) -> np.ndarray:
    """An image [H, W, 3] of noise around a colour; its size is of its number."""
    rng = np.random.default_rng(number)
    height, width = 40 + 10 * (number % 4), 30 + 17 * (number % 3)
    base = list(COLOURS.values())[number % len(COLOURS)]
    return np.clip(rng.normal(base, 30, (height, width, 3)), 0, 255).astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    """The image as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def chats(folder: Path, counts: tuple[int, ...]) -> list[dict]:
    """Chats whose questions show so many images, which are written to `folder`."""
    found = []
    for row, count in enumerate(counts):
        parts: list[dict] = []
        for k in range(count):
            file = f"{row}_{k}.png"
            (folder / file).write_bytes(png(picture(7 * row + k)))
            parts.append({"type": "image", "image": file})
        asked = [*parts, {"type": "text", "text": f"What is {row}?"}]
        answer = {"role": "assistant", "content": ANSWERS[row % len(ANSWERS)]}
        found.append({"messages": [{"role": "user", "content": asked}, answer]})
    return found


def write_chats(folder: Path, counts: tuple[int, ...] = (1, 2, 0, 1, 1, 1)) -> Path:
    """A file of `chats`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in chats(folder, counts)))
    return file
