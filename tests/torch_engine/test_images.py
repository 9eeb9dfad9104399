"""Models that see images, against loops of transformers' own model and processor alone, and PEFT."""

import numpy as np
import peft
import pytest
import torch
import transformers
from torch.nn import functional

from finetune.data.collate import microbatches
from finetune.data.columns import RowOptions
from finetune.data.images.decode import ImageReader
from finetune.data.images.inputs import ImageInputs
from finetune.data.images.references import ImageOptions
from finetune.data.reading.sources import read_rows
from finetune.data.tokens.tokenize import generation_examples, tokenize
from finetune.errors import PlanError
from finetune.model_files.files import find_model
from finetune.model_files.processor import ImageProcessor
from finetune.model_files.tokenizer import load_tokenizer
from finetune.run.scoring import log_prob_of_ids
from finetune.torch_engine.weights.modalities import vision_names, vision_prefixes
from tests.support import vision
from tests.support.build import load_model, torch_engine
from tests.support.cells import but_slow, slow
from tests.support.engines import CPU
from tests.support.planned import settings_of

# Of the rest PaliGemma's prompts are of another form, and the processors of Pixtral's need torchvision.
SEEN = [name for name in vision.FAMILIES if name not in ("paligemma", "pixtral", "mistral3")]
QUICK = ("qwen2_5_vl", "gemma3", "llava")
LR = 1e-3
STEPS = 3
# Sums of fp32 in another order: a padded batch against rows alone.
LOSS_TOLERANCE = 1e-5
# Adam moves a weight by at most the rate a step, and by the sign of a gradient that is nothing but rounding.
WEIGHT_TOLERANCE = 1e-5


def of_each(quick, words):
    """A test of each class and word; slow beyond the quick classes."""
    cells = [(name, *word) for name in SEEN for word in words]
    return but_slow(cells, [cell for cell in cells if cell[0] in quick])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a class, made when it is first asked for."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = vision.save_model(name, tmp_path_factory.mktemp("models") / name)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return vision.write_chats(tmp_path_factory.mktemp("rows"))


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

    def engine(self, kind, **changes):
        settings = settings_of(
            kind, "fp32", images="true", lora_dropout=0.0, lora_rank=4, lr=LR, adam_beta2=0.95, **changes
        )
        model = load_model(str(self.folder), settings, CPU, files=self.files, say=lambda line: None)
        engine = torch_engine(model, settings, CPU)
        assert engine.verify("padded")["batch_layout"][0] == "padded"
        return engine, settings

    def batches(self, engine, size=2):
        numbers = range(self.dataset.num_rows)
        return microbatches(self.dataset, numbers, "padded", size, 4096, engine.pad_id)

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


def plain(name):
    """PEFT's name of a parameter as ours."""
    for word in ("base_model.model.", ".modules_to_save", ".default"):
        name = name.replace(word, "")
    return name.removesuffix(".weight") if "lora_" in name else name


def with_adapter(model, own, settings):
    """PEFT's model with the adapters and saved modules of `own`, and with its values."""
    trained = {name: p for name, p in own.named_parameters() if p.requires_grad}
    targets = sorted({name.partition(".lora_")[0] for name in trained if ".lora_" in name})
    saved = vision_names(own, settings.train_vision) if settings.train_vision in ("projector", "full") else None
    config = peft.LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=targets, modules_to_save=saved
    )
    theirs = peft.get_peft_model(model.requires_grad_(False), config)
    found = {plain(name): p for name, p in theirs.named_parameters() if p.requires_grad}
    assert found.keys() == trained.keys()
    with torch.no_grad():
        for name, parameter in found.items():
            if "lora_B" in name:
                trained[name].normal_(0, 0.05)
            parameter.copy_(trained[name])
    return theirs, found


@pytest.mark.parametrize(
    "name, kind, word",
    of_each(QUICK, [("lora", "none"), ("full", "none")])
    + slow(*((name, "lora", word) for name in SEEN for word in ("projector", "lora", "full")))
    + [pytest.param("llava", "full", word) for word in ("projector", "full")]
    + [pytest.param("qwen3_vl", "lora", "projector")],
)
def test_loss_and_weights_are_those_of_transformers(folders, rows, name, kind, word):
    if (name, word) == ("ovis2", "projector"):
        pytest.skip("what joins its tower and its language model is no module of its own")
    seen = Seen(folders(name), rows)
    engine, settings = seen.engine(kind, train_vision=word)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(seen.folder, dtype=torch.float32)
    if kind == "lora":
        theirs, trained = with_adapter(theirs, engine.model, settings)
    else:
        own = {n for n, p in engine.model.named_parameters() if p.requires_grad}
        sees = {n for n in own if n.startswith(vision_prefixes(engine.model))}
        assert bool(sees) == (word != "none")
        trained = {n: p.requires_grad_(n in own) for n, p in theirs.named_parameters() if n in own}
        for n, p in theirs.named_parameters():
            p.requires_grad_(n in own)
    theirs.train()
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    ours = dict(engine.model.named_parameters())
    for _ in range(STEPS):
        result = engine.train_step(seen.batches(engine), LR)
        optimizer.zero_grad()
        loss = seen.their_loss(theirs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), settings.grad_norm)
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), abs=LOSS_TOLERANCE)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    differences = torch.cat([(ours[n] - p).abs().flatten() for n, p in trained.items()])
    assert (differences > WEIGHT_TOLERANCE).float().mean() < 1e-3 and differences.max() < STEPS * LR


@pytest.mark.parametrize("name", but_slow(SEEN, QUICK[:1]))
def test_accumulated_microbatches_are_one_batch(folders, rows, name):
    seen = Seen(folders(name), rows)
    found = []
    for size in (1, 2, 6):
        engine, _ = seen.engine("lora")
        result = engine.train_step(seen.batches(engine, size), LR)
        found.append((result.loss, result.grad_norm))
    np.testing.assert_allclose(found[1:], found[:1] * 2, rtol=1e-5)


@pytest.mark.parametrize("name", but_slow(SEEN, QUICK[:2]))
def test_recomputed_layers_give_the_same_bits(folders, rows, name):
    seen = Seen(folders(name), rows)
    found = []
    for word in ("false", "true"):
        engine, _ = seen.engine("lora", use_gradient_checkpointing=word)
        result = engine.train_step(seen.batches(engine), LR)
        found.append((result.loss, result.grad_norm, *(p.sum().item() for p in engine.model.parameters())))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", but_slow(SEEN, QUICK))
def test_answers_are_those_of_transformers(folders, rows, name):
    seen = Seen(folders(name), rows)
    engine, _ = seen.engine("lora")
    examples = generation_examples(seen.raw, seen.options, seen.tokenizer, images=seen.inputs)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(seen.folder, dtype=torch.float32).eval()
    theirs.generation_config = transformers.GenerationConfig()
    new = engine.generate([prompt for prompt, _, _ in examples], 6, {2})
    for row, ids in zip(seen.raw.rows, new, strict=True):
        inputs, start = seen.theirs(row)
        inputs = {n: v[:, :start] if v.shape[:2] == inputs["input_ids"].shape else v for n, v in inputs.items()}
        inputs.pop("labels", None)
        made = theirs.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0)
        expected = [token for token in made[0, start:].tolist() if token not in (2, 0)]
        assert ids == expected


def test_a_model_without_a_module_between_has_no_projector(folders, rows):
    with pytest.raises(PlanError, match="--train_vision projector: no module of Ovis2"):
        Seen(folders("ovis2"), rows).engine("lora", train_vision="projector")


def test_rows_are_cut_before_an_image_or_dropped(folders, rows):
    seen = Seen(folders("llava"), rows)
    longest = int(seen.dataset.full_lengths.max())
    shorter = tokenize(seen.raw, seen.options, seen.tokenizer, longest - 1, images=seen.inputs)
    assert shorter.counts["dropped_long"] and not shorter.counts["prompt_truncated"]
    images = shorter.arrays["images"]
    per_image = 4
    is_part = np.isin(shorter.tokens, list(seen.processor.image_ids))
    ends = np.add.reduceat(is_part, shorter.offsets[:-1])
    assert ends.tolist() == (per_image * images.counts_D).tolist()


def test_a_damaged_image_is_named_with_its_row(folders, rows, tmp_path):
    file = vision.write_chats(tmp_path, (1, 1))
    (tmp_path / "1_0.png").write_bytes((tmp_path / "1_0.png").read_bytes()[:60])
    with pytest.raises(PlanError, match=r"chats.jsonl:2"):
        Seen(folders("llava"), file)


def test_a_template_without_places_for_images_is_refused(folders, rows, tmp_path):
    folder = tmp_path / "model"
    vision.save_model("llava", folder)
    tokenizer = load_tokenizer(folder)
    only_answers = "{% if m['role'] == 'assistant' %}{{ m['content'] }}{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}" + only_answers + "{% endfor %}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(PlanError, match="chat template"):
        Seen(folder, rows)


def test_digests_of_datasets_follow_their_images(folders, rows, tmp_path):
    seen = Seen(folders("llava"), rows)
    other = tmp_path / "rows"
    vision.write_chats(other)
    assert Seen(seen.folder, other / "chats.jsonl").dataset.digest() == seen.dataset.digest()
    (other / "0_0.png").write_bytes(vision.png(vision.picture(99)))
    assert Seen(seen.folder, other / "chats.jsonl").dataset.digest() != seen.dataset.digest()


def test_num_layers_counts_those_of_the_language_model(folders):
    settings = settings_of("lora", "fp32", images="true", train_vision="lora", num_layers=1)
    model = load_model(
        str(folders("qwen2_5_vl")), settings, CPU, files=find_model(str(folders("qwen2_5_vl"))), say=lambda line: None
    )
    adapted = {name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    assert {name.split(".layers.")[1][0] for name in adapted if ".layers." in name} == {"1"}
    linears = {
        name for name, module in model.get_submodule("model.visual").named_modules() if hasattr(module, "lora_A")
    }
    assert {name.split(".")[1] for name in linears if name.startswith("blocks.")} == {"0", "1"}
    assert {name for name in linears if name.startswith("merger.")} == {"merger.mlp.0", "merger.mlp.2"}


def test_the_log_probability_of_an_answer_is_that_of_its_row(folders, rows):
    seen = Seen(folders("llava"), rows)
    engine, _ = seen.engine("lora")
    examples = generation_examples(seen.raw, seen.options, seen.tokenizer, images=seen.inputs)
    for i, (prompt, _, _) in enumerate(examples):
        ids, is_target = seen.dataset.document(i)
        row = engine.next_token_loss(microbatches(seen.dataset, [i], "padded", 1, 4096, engine.pad_id))
        found = log_prob_of_ids(engine, prompt, ids[is_target].tolist())
        assert found == pytest.approx(-row.loss * row.num_targets, abs=LOSS_TOLERANCE)
