"""Makes a task of images that needs no download, and a small model for it: coloured shapes on a grid.

python examples/shapes/make_shapes.py outputs/shapes        rows with their images, and the folder of the model
python train.py --model_name outputs/shapes/model --dataset outputs/shapes/train.jsonl --train_vision full \
    --score_dataset outputs/shapes/test.jsonl --output_dir outputs/shapes-run

The model is the first layers of the demo's language model with a tower for images of random weights, in the form of
LLaVA.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CELL = 16  # pixels; a patch of the tower
GRID = 2
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 205, 40)}
SHAPES = ("circle", "square", "triangle")
PLACES = {
    (row, column): f"{down} {across}"
    for row, down in enumerate(("top", "bottom"))
    for column, across in enumerate(("left", "right"))
}
NUMBERS = ("zero", "one", "two", "three", "four")
TRAIN_ROWS = 8000
QUESTIONS = 5  # of a row that is trained on; one that is held out asks one
DESCRIBED = 3  # one image of so many is described whole instead
LAYERS = 6  # of the language model, the first ones
TEST_ROWS = 200
IMAGE = "<image>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ------ rows


def drawn(shape: str, colour: tuple[int, int, int], background: np.ndarray) -> np.ndarray:
    """A cell [CELL, CELL, 3] with a shape on its background."""
    y, x = (np.mgrid[:CELL, :CELL] + 0.5) / CELL - 0.5
    masks = {
        "circle": x**2 + y**2 < 0.16,
        "square": (abs(x) < 0.36) & (abs(y) < 0.36),
        "triangle": (y < 0.38) & (2 * abs(x) < 0.55 * (y + 0.42) * 2),
    }
    return np.where(masks[shape][:, :, None], np.array(colour), background)


def picture(draw: random.Random, things: dict[tuple[int, int], tuple[str, str]]) -> np.ndarray:
    """The image [H, W, 3] of {(row, column): (colour, shape)}, with noise."""
    noise = np.random.default_rng(draw.randrange(2**32))
    image = np.full((GRID * CELL, GRID * CELL, 3), 235.0)
    for (row, column), (colour, shape) in things.items():
        part = image[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
        part[:] = drawn(shape, COLOURS[colour], part)
    return np.clip(image + noise.normal(0, 8, image.shape), 0, 255).astype(np.uint8)


def drawn_things(draw: random.Random) -> dict[tuple[int, int], tuple[str, str]]:
    """{(row, column): (colour, shape)} of an image, no two of one colour."""
    cells = draw.sample(sorted(PLACES), draw.randint(1, len(PLACES)))
    colours = draw.sample(sorted(COLOURS), len(cells))
    return {cell: (colour, draw.choice(SHAPES)) for cell, colour in zip(cells, colours, strict=True)}


def described(draw: random.Random) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """(image, a question after all of it with its answer)."""
    things = drawn_things(draw)
    said = [" ".join(things.get(cell, ("nothing",))) for cell in sorted(PLACES)]
    return picture(draw, things), [("What is there, from top left to bottom right?", ", ".join(said))]


def drawn_row(draw: random.Random) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """(image, questions with their answers): how many shapes there are, what is somewhere, where something is. No
    question tells the answer to another.
    """
    things = drawn_things(draw)
    asked = [("How many shapes are there?", NUMBERS[len(things)])]
    for cell, (colour, shape) in things.items():
        what = f"What is at the {PLACES[cell]}?", f"a {colour} {shape}"
        where = f"Where is the {colour} {shape}?", PLACES[cell]
        asked.append(draw.choice((what, where)))
    draw.shuffle(asked)
    return picture(draw, things), asked


def write_rows(folder: Path, name: str, count: int, seed: int, most_questions: int) -> None:
    """Writes NAME.jsonl and its images. A row asks about one image, at most so many questions."""
    from PIL import Image

    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        if most_questions > 1 and number % DESCRIBED == 0:
            image, asked = described(draw)
        else:
            image, asked = drawn_row(draw)
        file = f"images/{name}_{number}.png"
        Image.fromarray(image).save(folder / file)
        turns: list[dict] = []
        for question, answer in asked[:most_questions]:
            parts = [{"type": "text", "text": question}]
            if not turns:
                parts.insert(0, {"type": "image", "image": file})
            turns += [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


# ------ the model


def write_model(folder: Path) -> None:
    """Writes the demo's language model with a small tower of random weights, and its processor."""
    import torch
    import transformers

    from finetune.model_files.demo_model import demo_model_folder

    transformers.utils.logging.set_verbosity_error()  # which lists the layers that are left out
    base = demo_model_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.chat_template = TEMPLATE
    language = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, num_hidden_layers=LAYERS)
    language.resize_token_embeddings(len(tokenizer))
    size = GRID * CELL
    tower = transformers.SiglipVisionConfig(
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=size,
        patch_size=CELL,
        vision_use_head=False,
    )
    config = transformers.LlavaConfig(
        vision_config=tower,
        text_config=language.config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_seq_length=GRID * GRID,
        tie_word_embeddings=language.config.tie_word_embeddings,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.lm_head.load_state_dict(language.lm_head.state_dict())
    model.tie_weights()
    widen(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    flat = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, size={"height": size, "width": size})
    transformers.SiglipImageProcessorPil(**flat).save_pretrained(folder)
    settings = {
        "processor_class": "LlavaProcessor",
        "patch_size": CELL,
        "vision_feature_select_strategy": "full",
        "num_additional_image_tokens": 0,
    }
    (folder / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def widen(model: Any) -> None:
    """Makes places count as much as shapes, and what an image gives the language model as wide as embeddings, with a
    mean of zero: as of a trained tower. Random weights begin narrower.
    """
    import torch

    draw = random.Random(0)
    pixels_NHWC = np.stack([picture(draw, drawn_things(draw)) for _ in range(64)]) / 127.5 - 1
    pixels_NCHW = torch.tensor(pixels_NHWC, dtype=torch.float32).movedim(-1, 1)
    with torch.no_grad():
        model.model.vision_tower.embeddings.position_embedding.weight.mul_(6)
        seen = torch.cat(list(model.model.get_image_features(pixel_values=pixels_NCHW).pooler_output))
        last = model.model.multi_modal_projector.linear_2
        last.bias.sub_(seen.mean(0))
        factor = model.get_input_embeddings().weight.std() / (seen - seen.mean(0)).std()
        last.weight.mul_(factor)
        last.bias.mul_(factor)


def main(folder: Path) -> None:
    write_rows(folder, "train", TRAIN_ROWS, seed=1, most_questions=QUESTIONS)
    write_rows(folder, "test", TEST_ROWS, seed=2, most_questions=1)
    write_model(folder / "model")
    print(f"{TRAIN_ROWS:,} rows, {TEST_ROWS} held out, and a model in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
