"""Rows with images as a model of tests/support/vision.py sees them, and as transformers' own processor makes them."""

from torch.nn import functional

from finetune.data.collate import microbatches, showing_images
from finetune.data.columns import RowOptions
from finetune.data.images.decode import ImageReader
from finetune.data.images.inputs import ImageInputs
from finetune.data.images.references import ImageOptions
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.tokenize import tokenize
from finetune.model_files.files import find_model
from finetune.model_files.processor import ImageProcessor
from finetune.model_files.tokenizer import load_tokenizer
from tests.support import vision
from tests.support.build import load_model, torch_engine
from tests.support.engines import CPU
from tests.support.planned import settings_of

# Of the rest PaliGemma's prompts are of another form, and the processors of Pixtral's need torchvision.
SEEN = [name for name in vision.FAMILIES if name not in ("paligemma", "pixtral", "mistral3")]
NO_PROJECTOR = [("ovis2", "projector")]  # what joins its tower and its language model is no module of its own
LR = 1e-3


class Seen:
    """The rows of a file as a model's folder makes them, and the same by transformers alone."""

    def __init__(self, folder, rows):
        self.folder = folder
        self.files = find_model(str(folder))
        self.tokenizer = load_tokenizer(folder)
        self.processor = ImageProcessor.open(folder, self.files.config, self.tokenizer)
        self.inputs = ImageInputs(self.processor, ImageReader())
        self.raw = read_rows(str(rows), samples=-1)
        self.options = RowOptions(images=ImageOptions(rows.parent))
        self.dataset = tokenize(self.raw, self.options, self.tokenizer, 1024, images=self.inputs)

    def engine(self, kind, layout="padded", **changes):
        settings = settings_of(
            kind, "fp32", images="true", lora_dropout=0.0, lora_rank=4, lr=LR, adam_beta2=0.95, **changes
        )
        model = load_model(str(self.folder), settings, CPU, files=self.files, say=lambda line: None)
        engine = torch_engine(model, settings, CPU)
        assert self.verify(engine, layout)[0] == layout
        return engine, settings

    def verify(self, engine, layout):
        """(layout, why) after the engine's checks with the rows' images."""
        return engine.verify(layout, showing_images(self.dataset, engine.pad_id))["batch_layout"]

    def batches(self, engine, size=2, tokens=4096):
        numbers = range(self.dataset.num_rows)
        return microbatches(self.dataset, numbers, engine.layout, size, tokens, engine.pad_id)

    def theirs(self, row):
        """(transformers' inputs of a row alone, the place of its first target)."""
        messages = row["messages"]
        images = [
            vision.Image.open(self.raw_folder / part["image"]).convert("RGB")
            for part in messages[0]["content"]
            if part["type"] == "image"
        ]
        texts = [
            self.tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=prompt)
            for some, prompt in ((messages[:1], True), (messages, False))
        ]
        end = texts[1].rindex("<|im_end|>") + len("<|im_end|>")
        given = {"images": [images]} if images else {}
        made = [
            self.processor.own(text=[text], add_special_tokens=False, return_tensors="pt", **given)
            for text in (texts[0], texts[1][:end])
        ]
        return made[1], made[0]["input_ids"].shape[1]

    @property
    def raw_folder(self):
        return self.options.images.root

    def their_loss(self, model):
        """The mean over all targets of the rows, one by one."""
        total = 0
        count = 0
        for row in self.raw.rows:
            inputs, start = self.theirs(row)
            logits = model(**inputs).logits[0, start - 1 : -1].float()
            labels = inputs["input_ids"][0, start:]
            total = total + functional.cross_entropy(logits, labels, reduction="sum")
            count += len(labels)
        return total / count
