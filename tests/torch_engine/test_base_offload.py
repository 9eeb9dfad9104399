"""A base outside its device: bit for bit the numbers of one that is there in full, whatever is done with it."""

import gc
import json
import os
import resource
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import generate
import score
from finetune.backend import machine
from finetune.data.collate import microbatches
from finetune.errors import CheckpointDamagedError, OutOfMemoryError, PlanError, StorageError
from finetune.model_files.files import find_model
from finetune.parts.parts import Parts
from finetune.system import threads
from finetune.torch_engine import base_offload
from finetune.torch_engine.lora.layers import adapter_parameters
from finetune.torch_engine.weights import packed_base, packing
from finetune.torch_engine.weights.load import load_trained
from tests.support import architectures, tiny
from tests.support.build import load_model, torch_engine
from tests.support.cells import but_slow
from tests.support.engines import CPU
from tests.support.planned import settings_of
from train import fine_tune

ROWS = tiny.dataset((40, 37, 12, 30, 44, 9))
MIXTRAL = dict(num_local_experts=4, num_experts_per_tok=2)
METHODS = {
    "nf4": ("qlora", dict(quantization_backend="nf4", quant_type="nf4")),
    "nf4 double": ("qlora", dict(quantization_backend="nf4", quant_type="nf4", double_quant=True)),
    "bnb fp4": ("qlora", dict(quantization_backend="bnb", quant_type="fp4")),
    "bnb int8": ("qlora", dict(quantization_backend="bnb", n_bits=8, quant_type=None)),
    "hqq 3": ("qlora", dict(quantization_backend="hqq", n_bits=3, quant_type="affine", group_size=32)),
    "quanto 4": ("qlora", dict(quantization_backend="quanto", quant_type="affine", group_size=32)),
    "mlx 4": ("qlora", dict(quantization_backend="mlx", quant_type="affine", group_size=32)),
    "dense": ("lora", {}),
}
VARIANTS = {
    "plain": {},
    "recomputed": dict(use_gradient_checkpointing="true"),
    "reentrant": dict(use_gradient_checkpointing="true", reentrant_checkpointing=True),
    "dora": dict(use_dora=True),
    "dora, dropout": dict(use_dora=True, lora_dropout=0.1),
    "some targets": dict(lora_target_modules="q_proj", lora_dropout=0.1),
    "in full": dict(modules_to_save="down_proj,input_layernorm,layers.3"),
}
CELLS = (
    [("llama", method, "plain", word) for method in METHODS for word in ("fp32", "bf16")]
    + [("llama", method, variant, "fp32") for method in ("nf4", "dense") for variant in list(VARIANTS)[1:]]
    + [("mixtral", method, "recomputed", "fp32") for method in ("nf4", "dense")]
    + [("gpt2", "nf4", "plain", "fp32"), ("gemma3", "nf4", "plain", "bf16")]
)
FAST = (("llama", "nf4", "plain", "fp32"), ("llama", "dense", "plain", "bf16"), ("llama", "nf4", "in full", "fp32"))


def model_in(folder, architecture="llama", **changes):
    sizes = MIXTRAL if architecture == "mixtral" else {}
    layers = dict(n_layer=5) if architecture == "gpt2" else dict(num_hidden_layers=5)
    tiny.build(architecture, **sizes, **layers, **changes).save_pretrained(folder)
    return folder


def engine_in(folder, cache, kind, word, device=CPU, **changes):
    settings = settings_of(kind, word, packed_cache=str(cache), **changes)
    model = load_model(folder, settings, device, say=lambda line: None, files=find_model(str(folder)))
    engine = torch_engine(model, settings, device)
    engine.verify("auto")
    return engine


def trained(engine, steps: int = 3):
    """([loss, norm] of each step and of an evaluation, the adapters)."""
    found = []
    batches = microbatches(ROWS, range(len(ROWS)), engine.layout, 6, 90, 0)
    for _ in range(steps):
        result = engine.train_step(batches, 1e-2)
        found.append((result.nll, result.grad_norm))
    found.append(engine.evaluate(batches).nll)
    return found, {n: p.detach().cpu().clone() for n, p in adapter_parameters(engine.model).items()}


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    assert all(torch.equal(value, theirs[1][name]) for name, value in ours[1].items()) and ours[1]


@pytest.mark.parametrize(
    "architecture, method, variant, word", but_slow(CELLS, FAST), ids=lambda value: str(value).replace(" ", "-")
)
def test_numbers_are_those_of_a_base_on_the_device(architecture, method, variant, word, tmp_path):
    kind, changes = METHODS[method]
    changes = changes | VARIANTS[variant]
    if architecture == "gpt2":
        changes = changes | dict(lora_target_modules="c_attn,c_fc")
    folder = model_in(tmp_path / "model", architecture)
    resident = trained(engine_in(folder, "none", kind, word, **changes))
    for source in ("disk", "host"):
        engine = engine_in(folder, tmp_path / "cache", kind, word, base_offload=source, **changes)
        assert_same(trained(engine), resident)
        counted = base_offload.of_model(engine.model).counters
        assert counted.reads > 5 and counted.read_bytes > 0
    again = engine_in(folder, tmp_path / "cache", kind, word, **changes)
    assert_same(trained(again), resident)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("word", ("fp32", "bf16"))
def test_twenty_steps_are_those_of_a_base_on_the_device(method, word, tmp_path):
    folder = model_in(tmp_path / "model")
    kind, changes = METHODS[method]
    resident = trained(engine_in(folder, "none", kind, word, **changes), 20)
    assert_same(
        trained(engine_in(folder, tmp_path / "cache", kind, word, base_offload="disk", **changes), 20), resident
    )


@pytest.mark.parametrize("source", ("disk", "host"))
@pytest.mark.parametrize("variant", ("plain", "recomputed"))
def test_numbers_on_a_device_are_those_of_a_base_on_it(source, variant, device, tmp_path):
    folder = model_in(tmp_path / "model")
    changes = VARIANTS[variant]
    resident = trained(engine_in(folder, "none", "qlora", "fp32", device, **changes))
    offloaded = engine_in(folder, tmp_path / "cache", "qlora", "fp32", device, base_offload=source, **changes)
    assert_same(trained(offloaded), resident)


def test_two_layers_are_in_memory_and_each_pass_reads_a_layer_once(tmp_path):
    folder = model_in(tmp_path / "model")
    engine = engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")
    offload = base_offload.of_model(engine.model)
    inside = [p for n, p in engine.model.named_parameters() if ".layers." in n and not p.requires_grad]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in inside}
    assert len(inside) > 40 and len(storages) == 2
    whole = engine_in(folder, "none", "qlora", "fp32")
    assert engine.parameter_counts() == whole.parameter_counts()
    vocab = whole.model.get_input_embeddings().weight.shape
    assert not any(p.shape == vocab for p in engine.model.parameters())
    assert sum(storages.values()) < 2.1 * max(layer.num_bytes for layer in offload.layers)
    batches = microbatches(ROWS, range(len(ROWS)), engine.layout, 6, 4096, 0)
    engine.train_step(batches, 1e-2)
    before = offload.counters.reads
    engine.train_step(batches, 1e-2)
    # Five layers forward and five backward: each once, as the head takes the place of the last two in between, and the
    # next forward finds the first two.
    assert len(batches) == 1 and offload.counters.reads - before == 2 * 5 - 2
    peaks = [b.content.untyped_storage().nbytes() for b in offload.buffers]
    offload.make_room()
    assert sum(peaks) > 0 and all(b.holds is None for b in offload.buffers)


def test_a_stack_of_bare_linears_stays_outside():
    model = tiny.build("llama", num_hidden_layers=3)
    model.model.projections = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    assert packing.layer_names(model) == [f"model.layers.{i}" for i in range(3)]


def test_a_second_start_quantizes_nothing(tmp_path, monkeypatch):
    folder = model_in(tmp_path / "model")
    first = trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32"))
    monkeypatch.setattr(packed_base.quantization_wrapper, "quantized_linear", None)
    assert_same(trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32")), first)
    other = tiny.build("llama", seed=1, num_hidden_layers=5)
    other.save_pretrained(folder)
    with pytest.raises(TypeError):  # another base has no entry, and is quantized
        engine_in(folder, tmp_path / "cache", "qlora", "fp32")


def damaged(cache, how):
    (entry,) = [f for f in cache.iterdir() if f.is_dir()]
    file = entry / "layer-00002.safetensors"
    content = bytearray(file.read_bytes())
    if how == "flipped":
        content[-5] ^= 1
        file.write_bytes(content)
    elif how == "cut":
        file.write_bytes(content[:-7])
    elif how == "longer":
        file.write_bytes(content + b"0")
    elif how == "gone":
        file.unlink()
    elif how == "a folder":
        file.unlink()
        file.mkdir()
    elif how == "meta":
        meta = json.loads((entry / "packed.json").read_text())
        meta["layers"].pop()
        (entry / "packed.json").write_text(json.dumps(meta))
    return file


@pytest.mark.parametrize("how", ("flipped", "cut", "longer", "gone", "a folder", "meta"))
def test_a_damaged_entry_is_made_again(how, tmp_path, capsys):
    folder = model_in(tmp_path / "model")
    first = trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32"))
    damaged(tmp_path / "cache", how)
    capsys.readouterr()
    assert_same(trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32")), first)
    assert "is not as it was written" in capsys.readouterr().out
    damaged_again = tmp_path / "other"
    shutil.copytree(tmp_path / "cache", damaged_again) if (tmp_path / "cache").exists() else None
    assert_same(trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32")), first)


@pytest.mark.parametrize(
    ("end", "how"),
    but_slow(
        [(end, how) for end in ("embedding", "head") for how in ("flipped", "cut", "longer", "gone")],
        [("embedding", "flipped"), ("head", "gone")],
    ),
)
def test_a_damaged_file_of_an_end_is_written_again(how, end, tmp_path):
    folder = model_in(tmp_path / "model")
    first = trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk"))
    (file,) = (tmp_path / "cache").glob(f"*/{end}.safetensors")
    before = file.read_bytes()
    content = {"flipped": before[:-1] + bytes([before[-1] ^ 1]), "cut": before[:-9], "longer": before + b"0"}
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(content[how])
    assert_same(trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")), first)
    assert file.read_bytes() == before


@pytest.mark.parametrize("end", ("embedding", "head"))
def test_an_end_that_changes_while_a_run_reads_it_ends_the_run(end, tmp_path):
    folder = model_in(tmp_path / "model")
    engine = engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")
    trained(engine, 1)
    (file,) = (tmp_path / "cache").glob(f"*/{end}.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointDamagedError, match=str(file)):
        trained(engine, 1)


def test_a_file_that_cannot_be_read_in_the_checks_is_not_taken_for_the_models_fault(tmp_path):
    folder = model_in(tmp_path / "model")
    settings = settings_of("qlora", "fp32", packed_cache=str(tmp_path / "cache"), base_offload="disk")
    model = load_model(folder, settings, CPU, say=lambda line: None, files=find_model(str(folder)))
    (file,) = (tmp_path / "cache").glob("*/head.safetensors")
    file.unlink()
    with pytest.raises(CheckpointDamagedError, match=str(file)):
        torch_engine(model, settings, CPU).verify("auto")


def test_a_disk_that_fills_while_the_base_is_packed_ends_the_run(tmp_path):
    folder = model_in(tmp_path / "model")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(StorageError, match="the packed base cannot be written.*--packed_cache"):
            engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "cache").glob("*/*"))
    engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")


ENDS = {  # settings of the model, of the run, and the files of the ends
    "apart": ({}, {}, {"embedding", "head"}),
    "tied": (dict(tie_word_embeddings=True), {}, {"embedding"}),
    "head adapted": ({}, dict(lora_target_modules="q_proj,lm_head"), {"embedding"}),
    "embedding adapted": ({}, dict(lora_target_modules="q_proj,embed_tokens"), {"head"}),
    "head in full": ({}, dict(modules_to_save="lm_head"), {"embedding"}),
    "tied, adapted": (dict(tie_word_embeddings=True), dict(lora_target_modules="q_proj,lm_head"), set()),
    "tied, in full": (dict(tie_word_embeddings=True), dict(modules_to_save="embed_tokens"), set()),
}


@pytest.mark.parametrize("ends", [e if e == "tied" else pytest.param(e, marks=pytest.mark.slow) for e in ENDS])
def test_ends_are_in_files_if_they_are_frozen(ends, tmp_path):
    of_model, of_run, files = ENDS[ends]
    folder = model_in(tmp_path / "model", **of_model)
    resident = engine_in(folder, "none", "qlora", "fp32", **of_run)
    offloaded = engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk", **of_run)
    assert offloaded.parameter_counts() == resident.parameter_counts()
    assert_same(trained(offloaded), trained(resident))
    assert {file.stem for file in (tmp_path / "cache").glob("*/*.safetensors") if "layer" not in file.stem} == files
    again = engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk", **of_run)
    assert_same(trained(again), trained(engine_in(folder, "none", "qlora", "fp32", **of_run)))


def test_a_head_with_a_bias_that_shares_the_embedding_stays(tmp_path):
    architectures.build("modernbert-decoder").save_pretrained(tmp_path / "model")
    architectures.tiny_config("modernbert-decoder").save_pretrained(tmp_path / "model")
    resident = trained(engine_in(tmp_path / "model", "none", "lora", "fp32"), 1)
    offloaded = engine_in(tmp_path / "model", tmp_path / "cache", "lora", "fp32", base_offload="disk")
    assert_same(trained(offloaded, 1), resident)


def test_ends_that_the_files_hold_twice_are_compared_as_without_offload(tmp_path):
    folder = model_in(tmp_path / "model", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 1.5}, file, {"format": "pt"})
    resident = trained(engine_in(folder, "none", "qlora", "fp32"))
    assert_same(trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")), resident)


@pytest.mark.parametrize("how", ("flipped", "cut", "gone", "a folder"))
def test_a_file_that_changes_while_a_run_reads_it_ends_the_run(how, tmp_path):
    folder = model_in(tmp_path / "model")
    engine = engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")
    trained(engine, 1)
    file = damaged(tmp_path / "cache", how)
    with pytest.raises(CheckpointDamagedError, match=str(file)):
        trained(engine, 1)
    assert engine.model.base_offload.counters.reads > 0


@pytest.mark.parametrize("how", ("flipped", "cut"))
def test_a_start_after_one_that_met_a_damaged_layer_makes_the_entry_again(how, tmp_path, capsys):
    folder = model_in(tmp_path / "model")
    first = trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk"))
    file = damaged(tmp_path / "cache", how)
    if how == "flipped":
        with pytest.raises(CheckpointDamagedError, match=f"{file}.*Start again"):
            engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")
    assert_same(trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")), first)
    assert "it is made again" in capsys.readouterr().out


def test_an_entry_that_another_process_made_meanwhile_is_taken(tmp_path, monkeypatch):
    """The file system keeps no locks here."""
    folder = model_in(tmp_path / "model")
    expected = trained(engine_in(folder, tmp_path / "one", "qlora", "fp32", base_offload="disk"))
    (entry,) = (meta.parent for meta in (tmp_path / "one").glob("*/packed.json"))
    sync = os.fsync

    def meanwhile(handle):
        if not (tmp_path / "two" / entry.name).exists():
            shutil.copytree(entry, tmp_path / "two" / entry.name)
        sync(handle)

    monkeypatch.setattr(os, "fsync", meanwhile)
    assert_same(trained(engine_in(folder, tmp_path / "two", "qlora", "fp32", base_offload="disk")), expected)
    assert [file.name for file in (tmp_path / "two").iterdir() if file.is_dir()] == [entry.name]


@pytest.mark.parametrize("damaged", [False, True])
def test_another_user_s_entry_stays_and_this_user_makes_one_beside_it(damaged, tmp_path, monkeypatch):
    folder = model_in(tmp_path / "model")
    expected = trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk"))
    (meta,) = (tmp_path / "cache").glob("*/packed.json")
    if damaged:
        meta.unlink()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != meta.parent and access(path, mode))
    found = trained(engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk"))
    assert_same(found, expected)
    assert (tmp_path / "cache" / f"{meta.parent.name}-{os.getuid()}" / "packed.json").is_file() and meta.parent.is_dir()


def test_a_file_that_is_only_touched_goes_on(tmp_path):
    folder = model_in(tmp_path / "model")
    engine = engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")
    found = trained(engine, 2)
    other = engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")
    one = trained(other, 1)
    for file in (tmp_path / "cache").glob("*/layer-*"):
        file.touch()
    assert trained(other, 1)[0][0] == found[0][1] and one[0][0] == found[0][0]


def test_a_run_goes_on_wherever_its_base_is(tmp_path, rows_file):
    folder = model_in(tmp_path / "model", vocab_size=512)
    tiny.train_tokenizer(folder)
    how = dict(model_name=str(folder), dataset=str(rows_file), train_type="qlora", backend="cpu", precision="fp32")
    how |= dict(context_length=64, batch_size=2, save_every=2, packed_cache=str(tmp_path / "cache"))
    how |= dict(quantization_backend="nf4", lora_dropout=0.1, lr=1e-3, lr_scheduler="constant")
    whole = fine_tune(**how, output_dir=str(tmp_path / "whole"), max_steps=6)
    for steps, word in ((2, "disk"), (4, "none"), (6, "disk")):
        found = fine_tune(**how, output_dir=str(tmp_path / "parts"), max_steps=steps, base_offload=word, resume="auto")
    assert found.step == whole.step == 6
    one, two = (tmp_path / name / "adapter_model.safetensors" for name in ("whole", "parts"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("bits", but_slow(["as trained", "16"], []))
def test_an_adapter_is_scored_and_asked_on_a_base_outside_the_device(bits, tmp_path, rows_file, capsys, monkeypatch):
    folder = model_in(tmp_path / "model", vocab_size=512)
    tiny.train_tokenizer(folder)
    how = dict(model_name=str(folder), dataset=str(rows_file), train_type="qlora", backend="cpu", precision="fp32")
    how |= dict(context_length=64, batch_size=2, packed_cache=str(tmp_path / "cache"), quantization_backend="nf4")
    fine_tune(**how, output_dir=str(tmp_path / "run"), max_steps=2, base_offload="disk", lr=1e-2)
    assert "GiB of layers read in" in capsys.readouterr().out
    of_run = ["--checkpoint", str(tmp_path / "run"), "--device", "cpu"] + (["--n_bits", "16"] if bits == "16" else [])
    scored = [*of_run, "--dataset", str(rows_file), "--split", "train", "--max_new_tokens", "4", "--json"]
    asked = [*of_run, "--prompt", "hello", "--max_new_tokens", "6"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    capsys.readouterr()
    found = {}
    for word in ("auto", "none"):
        assert score.main([*scored, "--base_offload", word]) == 0
        printed = capsys.readouterr()
        assert ("base_offload disk: all layers are read" in printed.err) == (word == "auto")
        result = json.loads(printed.out)
        found[word] = {name: result[name] for name in ("loss", "exact_match", "rows")}
        assert generate.main([*asked, "--base_offload", word]) == 0
        found[word]["answer"] = capsys.readouterr().out
    assert found["auto"] == found["none"]


OPENED = {
    "dora": dict(use_dora=True),
    "head": dict(lora_target_modules="q_proj,lm_head"),
    "embedding": dict(lora_target_modules="q_proj,embed_tokens"),
    "ends, dora": dict(lora_target_modules="q_proj,embed_tokens,lm_head", use_dora=True),
}


@pytest.mark.parametrize("of_run", but_slow(OPENED, ["head"]))
def test_an_adapter_of_any_layers_is_opened_on_a_base_outside_the_device(of_run, tmp_path, rows_file, capsys):
    """Scores of the run's own end open it on the dense base too."""
    folder = model_in(tmp_path / "model", vocab_size=len(tiny.train_tokenizer(tmp_path / "model")))
    how = dict(model_name=str(folder), dataset=str(rows_file), train_type="qlora", backend="cpu", precision="fp32")
    how |= dict(context_length=64, batch_size=2, packed_cache=str(tmp_path / "cache"), quantization_backend="nf4")
    how |= dict(score_dataset=str(rows_file), score_samples=2, score_max_new_tokens=2, max_steps=1, lr=1e-2)
    fine_tune(**how, **OPENED[of_run], output_dir=str(tmp_path / "run"), base_offload="disk")
    found = []
    for word in ("disk", "none"):
        capsys.readouterr()
        argv = ["--checkpoint", str(tmp_path / "run"), "--dataset", str(rows_file), "--max_new_tokens", "2", "--json"]
        assert score.main([*argv, "--samples", "4", "--base_offload", word]) == 0
        found.append(json.loads(capsys.readouterr().out)["loss"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("flags", "fact"),
    (
        (["--device", "cpu", "--base_offload", "host"], "cpu and its host have one memory"),
        (["--device", "cpu", "--base_offload", "disk", "--world_size", "2"], "ranks divide the weights"),
    ),
)
def test_a_place_that_a_base_cannot_have_is_refused(flags, fact, tmp_path):
    folder = model_in(tmp_path / "model", vocab_size=512)
    tiny.train_tokenizer(folder)
    with pytest.raises(PlanError, match=fact):
        generate.main(["--checkpoint", str(folder), "--prompt", "hello", *flags])


@pytest.mark.parametrize("number", range(1, 5))
def test_a_thread_that_does_not_start_leaves_no_layer_in_the_place_of_another(number, tmp_path, monkeypatch):
    folder = model_in(tmp_path / "model")
    engine = engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")
    batches = microbatches(ROWS, range(len(ROWS)), engine.layout, 6, 90, 0)
    expected = engine.evaluate(batches).nll
    start = threads._thread.start_new_thread
    started = []

    def refused_once(*args):
        started.append(args)
        if len(started) == number:
            raise RuntimeError("can't start new thread")
        return start(*args)

    monkeypatch.setattr(threads._thread, "start_new_thread", refused_once)
    with pytest.raises(OutOfMemoryError):  # after which a start tries fewer tokens
        engine.evaluate(batches)
    assert engine.evaluate(batches).nll == expected


class Copies(TorchDispatchMode):
    """Whether each copy between tensors returned before it had ended."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.found.append(bool((*args[2:], (kwargs or {}).get("non_blocking", False))[0]))
        return func(*args, **(kwargs or {}))


def test_a_device_without_a_stream_for_copies_has_copied_a_layer_before_the_next_is_read(tmp_path):
    folder = model_in(tmp_path / "model")
    engine = engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="host")
    with Copies() as copies:
        trained(engine, 1)
    assert len(copies.found) > 5 and not any(copies.found)


def test_modules_that_a_checkpoint_has_in_full_are_not_in_the_entry_of_a_base_that_has_them_quantized(
    tmp_path, rows_file
):
    folder = model_in(tmp_path / "model", vocab_size=512)
    tiny.train_tokenizer(folder)
    how = dict(model_name=str(folder), dataset=str(rows_file), train_type="qlora", backend="cpu", precision="fp32")
    how |= dict(context_length=64, batch_size=2, packed_cache="none", quantization_backend="nf4", max_steps=1)
    out = tmp_path / "out"
    fine_tune(**how, output_dir=str(out), modules_to_save="down_proj", lora_target_modules="q_proj")
    ids = torch.arange(3, 20)[None]
    files = find_model(str(folder))

    def logits(cache):
        plan = Parts(settings_of("qlora", packed_cache=str(cache)))
        return load_trained(out, files, CPU, plan)(input_ids=ids).logits

    expected = logits("none")
    plain = trained(engine_in(folder, "none", "qlora", "fp32"), 1)
    assert_same(trained(engine_in(folder, tmp_path / "one", "qlora", "fp32"), 1), plain)
    assert torch.equal(logits(tmp_path / "one"), expected)
    assert torch.equal(logits(tmp_path / "two"), expected)
    assert_same(trained(engine_in(folder, tmp_path / "two", "qlora", "fp32"), 1), plain)


def test_a_full_disk_costs_no_run_its_base(tmp_path):
    folder = model_in(tmp_path / "model")
    engine = engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")
    (entry,) = (f for f in (tmp_path / "cache").iterdir() if f.is_dir())
    idle = shutil.copytree(entry, tmp_path / "cache" / "idle")
    cache = packed_base.PackedCache(tmp_path / "cache", tmp_path / "cache" / "new")
    needed = packed_base.free_bytes(tmp_path) * 2
    assert "GiB free, it needs" in cache.why_not(needed)
    assert entry.exists() and not idle.exists()
    trained(engine, 1)


def test_a_model_whose_config_does_not_say_its_layers_is_loaded_without_an_entry(tmp_path):
    architectures.build("blt").save_pretrained(tmp_path / "model")
    architectures.tiny_config("blt").save_pretrained(tmp_path / "model")
    files = find_model(str(tmp_path / "model"))
    for cache in ("none", str(tmp_path / "cache")):
        load_model(files.folder, settings_of("qlora", packed_cache=cache), CPU, say=lambda line: None, files=files)
    settings = settings_of("qlora", packed_cache=str(tmp_path / "cache"), base_offload="disk")
    with pytest.raises(PlanError, match="--base_offload disk: BltForCausalLM has no stack of layers"):
        load_model(files.folder, settings, CPU, say=lambda line: None, files=files)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("package", ("torch", "transformers"))
def test_another_version_of_what_makes_the_layers_makes_an_entry_of_its_own(package, tmp_path, monkeypatch):
    folder = model_in(tmp_path / "model")
    engine_in(folder, tmp_path / "cache", "qlora", "fp32")
    monkeypatch.setitem(machine.VERSIONS, package, "0.0.1")
    engine_in(folder, tmp_path / "cache", "qlora", "fp32")
    assert len(list((tmp_path / "cache").glob("*/packed.json"))) == 2


def test_rows_of_tokens_in_any_order_of_memory_are_read_without_a_warning(tmp_path):
    folder = model_in(tmp_path / "model")
    engine = engine_in(folder, tmp_path / "cache", "qlora", "fp32", base_offload="disk")
    whole = engine_in(folder, "none", "qlora", "fp32")
    ids = torch.arange(6).view(2, 3).t()
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows = engine.model.get_input_embeddings()(ids)
    finally:
        torch.set_warn_always(before)
    assert torch.equal(rows, whole.model.get_input_embeddings()(ids))


@pytest.mark.parametrize("word", but_slow(["disk", "host"], []))
def test_a_run_in_a_program_that_goes_on_leaves_nothing_of_its_base(word, tmp_path, rows_file, tiny_model):
    """A forward that no backward follows has a graph, of which tensors must not be each other's."""
    how = dict(model_name=str(tiny_model), dataset=str(rows_file), train_type="lora", lora_rank=4, backend="cpu")
    how |= dict(batch_size=4, context_length=64, precision="fp32", max_steps=1, base_offload=word)
    fine_tune(**how, packed_cache=str(tmp_path / "packed"), output_dir=str(tmp_path / "out"))
    gc.collect()
    assert not [found for found in gc.get_objects() if isinstance(found, base_offload.BaseOffload)]


def test_a_model_whose_layers_are_a_buffer_s_is_not_given_away(tmp_path, rows_file, tiny_model):
    """Each of its layers had the weights of the one that came last."""
    how = dict(model_name=str(tiny_model), dataset=str(rows_file), train_type="lora", lora_rank=4, backend="cpu")
    how |= dict(batch_size=4, context_length=64, precision="fp32", max_steps=1, base_offload="disk")
    result = fine_tune(**how, packed_cache=str(tmp_path / "packed"), output_dir=str(tmp_path / "out"))
    with pytest.raises(PlanError, match=r"^result.model: the layers of its base pass through two buffers"):
        print(result.model)
    assert result.generate("What is", raw=True, max_new_tokens=2)
