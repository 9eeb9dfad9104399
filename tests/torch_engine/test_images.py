"""Models that see images, against loops of transformers' own model and processor alone, and PEFT."""

import json

import numpy as np
import peft
import pytest
import torch
import transformers

from finetune.data.collate import microbatches
from finetune.data.prepare import rows_digest
from finetune.data.tokens.tokenize import generation_examples, tokenize
from finetune.errors import PlanError
from finetune.model_files.files import find_model
from finetune.model_files.tokenizer import load_tokenizer
from finetune.run.scoring import log_prob_of_ids
from finetune.torch_engine.weights.modalities import vision_names, vision_prefixes
from tests.support import vision
from tests.support.build import load_model
from tests.support.cells import but_slow, slow
from tests.support.engines import CPU
from tests.support.planned import settings_of
from tests.support.seeing import LR, SEEN, Seen

QUICK = ("qwen2_5_vl", "gemma3", "llava")
UNPACKED = ("gemma3", "gemma4_vision")  # whose images attend to all of themselves
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
    slow = tuple(f"{n}." for n in vision_names(engine.model, word) if kind == "lora")
    groups = [
        dict(params=[p for n, p in trained.items() if not n.startswith(slow)]),
        dict(params=[p for n, p in trained.items() if n.startswith(slow)], lr=LR * 0.1),
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
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


@pytest.mark.parametrize("kind, ratio, expected", [("lora", None, 0.1), ("lora", 0.5, 0.5), ("full", None, 1.0)])
def test_what_sees_images_in_full_has_a_rate_of_its_own(folders, rows, kind, ratio, expected):
    """By a step of SGD, which moves a weight by its gradient times its rate."""
    moved = []
    for given in (ratio, 1.0):
        seen = Seen(folders("llava"), rows)
        settings = dict(optimizer="sgd", train_vision="projector", vision_lr_ratio=given, grad_norm=None)
        engine, _ = seen.engine(kind, **settings)
        before = {n: p.detach().clone() for n, p in engine.model.named_parameters() if p.requires_grad}
        engine.train_step(seen.batches(engine), 1e-3)
        sees = vision_prefixes(engine.model)
        after = dict(engine.model.named_parameters())
        moved.append({n.startswith(sees): 0.0 for n in before})
        for name, start in before.items():
            moved[-1][name.startswith(sees)] += (after[name] - start).norm().item()
    assert moved[0][False] == pytest.approx(moved[1][False], rel=1e-4) and moved[0][False]
    assert moved[0][True] == pytest.approx(expected * moved[1][True], rel=1e-3) and moved[0][True]


@pytest.mark.parametrize(
    "name, kind, word",
    but_slow(
        [
            (name, *cell)
            for name in SEEN
            for cell in (("lora", "none"), ("full", "none"), ("lora", "full"), ("full", "full"))
            if name not in UNPACKED
        ],
        [("qwen2_5_vl", "lora", "none"), ("llava", "full", "full")],
    ),
)
def test_packed_rows_train_as_padded_ones(folders, rows, name, kind, word):
    seen = Seen(folders(name), rows)
    found = []
    for layout in ("padded", "padding_free"):
        engine, _ = seen.engine(kind, layout, train_vision=word)
        batches = seen.batches(engine, 6, tokens=int(seen.dataset.lengths.sum() * 0.6))
        rows_of = [(len(batch.rows), len(batch.input_ids_BS)) for batch in batches]
        assert len(batches) > 1 and any(held > 1 for held, _ in rows_of)
        assert all(given == (held if layout == "padded" else 1) for held, given in rows_of)
        steps = [engine.train_step(batches, LR) for _ in range(STEPS)]
        weights = torch.cat([p.detach().flatten() for p in engine.model.parameters() if p.requires_grad])
        found.append((steps, weights))
    (padded, expected), (packed, weights) = found
    assert [step.loss for step in packed] == pytest.approx([step.loss for step in padded], abs=1e-6)
    assert [step.grad_norm for step in packed] == pytest.approx([step.grad_norm for step in padded], rel=1e-4)
    differences = (weights - expected).abs()
    assert (differences > WEIGHT_TOLERANCE).float().mean() < 1e-3 and differences.max() < STEPS * LR


@pytest.mark.parametrize("name", but_slow(SEEN, UNPACKED[:1]))
def test_rows_with_images_are_packed_where_that_is_proved(folders, rows, name):
    seen = Seen(folders(name), rows)
    engine, _ = seen.engine("lora")
    layout, why = seen.verify(engine, "auto")
    if name not in UNPACKED:
        assert layout == "padding_free" and "checked with images" in why
        return
    assert layout == "padded" and "tokens of an image see those after them" in why
    with pytest.raises(PlanError, match="--batch_layout padding_free: tokens of an image see those after them"):
        seen.verify(engine, "padding_free")


def test_rows_whose_images_would_mix_are_padded(folders, rows):
    seen = Seen(folders("llava"), rows)
    engine, _ = seen.engine("lora")
    assert engine.verify("auto")["batch_layout"][0] == "padded"  # without a row to check it by
    projector = engine.model.get_submodule("model.multi_modal_projector")
    hook = projector.register_forward_hook(lambda module, args, out: out + out.mean(0, keepdim=True))
    layout, why = seen.verify(engine, "auto")
    assert layout == "padded" and "other hidden states than separate ones" in why
    hook.remove()
    assert seen.verify(engine, "auto")[0] == "padding_free"


@pytest.mark.parametrize("name", but_slow(SEEN, ["ovis2"]))
def test_an_image_is_one_token_where_its_row_is_shown(folders, rows, name):
    seen = Seen(folders(name), rows)
    for i in range(seen.dataset.num_rows):
        ids, is_target = seen.dataset.document(i)
        ids = ids[~is_target]
        shown = seen.inputs.shortened(ids)
        assert (len(shown) < len(ids)) == bool(len(seen.dataset.images_of(i)))


def test_answers_between_steps_leave_packed_rows_as_they_were(folders, rows):
    seen = Seen(folders("llava"), rows)
    engine, _ = seen.engine("lora", "padding_free")
    examples = generation_examples(seen.raw, seen.options, seen.tokenizer, images=seen.inputs)
    before = engine.evaluate(seen.batches(engine, 6))
    engine.generate([prompt for prompt, _, _ in examples], 2, {2})
    assert engine.evaluate(seen.batches(engine, 6)) == before


def test_microbatch_tokens_binds_the_images_of_packed_rows(folders, rows):
    seen = Seen(folders("llava"), rows)
    limit = int(seen.dataset.lengths.max()) + 20
    batches = microbatches(seen.dataset, range(6), "padding_free", 6, limit, 0)
    assert len(batches) > 1 and sorted(row for batch in batches for row in batch.rows) == list(range(6))
    for batch in batches:
        assert batch.num_tokens <= limit
        shown = [digest for row in batch.rows for digest in seen.dataset.images_of(row)]
        pixels = seen.inputs.inputs(batch.arrays["images"])["pixel_values"].values
        assert batch.arrays["images"].values.tolist() == shown
        np.testing.assert_array_equal(batch.arrays["pixel_values"].values, pixels)
        assert len(pixels) == len(shown)


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


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_a_processor_of_another_model_is_one_line(tmp_path, rows, layout):
    folder = vision.save_model("llava", tmp_path)
    file = folder / "preprocessor_config.json"
    larger = dict(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    file.write_text(json.dumps(json.loads(file.read_text()) | larger))
    said = r"does not run on what the processor of its folder makes of an image \(Input image size \(56"
    with pytest.raises(PlanError, match=said):
        Seen(folder, rows).engine("lora", layout)


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


def test_scored_rows_of_other_images_are_other_rows(folders, rows, tmp_path):
    other = vision.write_chats(tmp_path / "rows")
    found = []
    for image in (vision.picture(0), vision.picture(99)):
        (other.parent / "0_0.png").write_bytes(vision.png(image))
        seen = Seen(folders("llava"), other)
        examples = generation_examples(seen.raw, seen.options, seen.tokenizer, images=seen.inputs)
        found.append(rows_digest(seen.raw.rows, [prompt for prompt, _, _ in examples]))
    assert found[0] != found[1]
    seen = Seen(folders("llava"), rows)
    examples = generation_examples(seen.raw, seen.options, seen.tokenizer, images=seen.inputs)
    assert rows_digest(seen.raw.rows, [prompt for prompt, _, _ in examples]) == found[0]


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
