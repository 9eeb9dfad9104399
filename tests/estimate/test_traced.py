"""What layers keep, traced on tensors without values: as the formulas say where there are some, and as a real step."""

import dataclasses
import json
import re
import shutil

import pytest

from finetune.estimate import memory
from finetune.estimate.model_cost import MicrobatchShape, ModelCost
from finetune.estimate.model_shape import BY_FORMULA, ModelShape
from finetune.estimate.traced import Failed, Trace, Tracer, between, kept_bytes, layer_bytes, peaks, traceable_shape
from finetune.model_files.files import find_model
from finetune.parts.parts import Parts
from finetune.torch_engine import trace
from tests.support import architectures, tiny, vision
from tests.support.build import load_model, torch_engine
from tests.support.engines import CPU
from tests.support.planned import dry_run, settings_of
from train import fine_tune

LENGTHS = (40, 37, 12, 30, 44, 9)
LLAMA = dict(hidden_size=96, intermediate_size=160, num_hidden_layers=4, num_attention_heads=6, vocab_size=512)
# Layers of several kinds, with sizes at which what they keep outweighs what a block is rounded to.
ODD = {
    "mamba2": dict(hidden_size=128, num_heads=8, head_dim=32, state_size=32, chunk_size=32, num_hidden_layers=3),
    "qwen3_next": dict(hidden_size=128),
    "deepseek_v3": dict(hidden_size=128, num_hidden_layers=3),
    "bloom": dict(hidden_size=128, n_layer=3),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def traced_shape(folder) -> ModelShape:
    """The shape of a folder whose layers are traced, whatever they are."""
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()))
    return dataclasses.replace(shape, tracer=Tracer(str(folder)))


class InProcess:
    """The program that traces, without a process of its own."""

    def request(self, question: bytes) -> list[bytes]:
        return [json.dumps(trace.answer(json.loads(question))).encode()]

    def close(self) -> None:
        trace.session.cache_clear()


# Sizes at which what is per row or per block counts little, and a config class's own of GPT-2.
WIDE = dict(hidden_size=256, intermediate_size=640, vocab_size=2000)
WIDE |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048)
OF_GPT2 = dict(n_embd=256, n_layer=2, n_head=4, n_inner=None, vocab_size=2000, attn_pdrop=0.1, resid_pdrop=0.1)


def off_by_formula(kind: str, folder, train_type: str, precision: str) -> float:
    """Bytes that the formulas say layers of a model type keep, divided by those traced, minus 1."""
    kind = {"gemma3": "gemma3_text"}.get(kind, kind)  # whose own config is of two models
    architectures.tiny_config(kind, **(OF_GPT2 if kind == "gpt2" else WIDE)).save_pretrained(folder)
    shape = dataclasses.replace(traced_shape(folder), tracer=Tracer(str(folder), child=InProcess()))
    formula = dataclasses.replace(shape, tracer=None)
    assert formula.unlike is None
    plan, batch = Parts(settings_of(train_type, precision)), MicrobatchShape((160, 150, 130, 100), 540)
    kept, said = (memory.activation_bytes(ModelCost(one.known, plan), batch) for one in (shape, formula))
    shape.tracer.close()
    return said / kept - 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_FORMULA)
def test_formulas_agree_with_traces_for_every_model_type_that_is_not_traced(kind, tmp_path):
    for train_type, precision, limit in (("lora", "fp32", 0.06), ("full", "fp32", 0.06), ("lora", "bf16", 0.1)):
        off = off_by_formula(kind, tmp_path, train_type, precision)
        assert abs(off) <= limit, (train_type, precision, off)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_formulas_agree_with_traces(kind, tmp_path):
    assert abs(off_by_formula(kind, tmp_path, "full", "fp32")) <= 0.06


@pytest.mark.parametrize(("kind", "reason"), [("apertus", "model_type apertus"), ("deepseek_v3", "kv_lora_rank")])
def test_a_model_that_no_formula_was_compared_for_is_traced(kind, reason, tmp_path):
    """Its seconds are predicted where its layers are attention and an MLP."""
    architectures.build(kind).save_pretrained(tmp_path)
    shape = traceable_shape(find_model(str(tmp_path), None), None)
    assert shape.tracer is not None and shape.unlike == reason and shape.is_timed == (kind == "apertus")
    known = dataclasses.replace(shape, tracer=Tracer(str(tmp_path), child=InProcess())).known
    assert known.is_timed == shape.is_timed
    architectures.build("llama").save_pretrained(tmp_path)
    assert traceable_shape(find_model(str(tmp_path), None), None).tracer is None


@pytest.mark.slow
def test_a_run_of_a_traced_transformer_predicts_its_bytes_and_seconds(flags, tiny_model, tmp_path, capsys):
    shutil.copytree(tiny_model, tmp_path / "apertus")
    architectures.build("apertus", vocab_size=400).save_pretrained(tmp_path / "apertus")
    fine_tune(**flags | {"model_name": str(tmp_path / "apertus"), "max_steps": 4})
    out = capsys.readouterr().out
    assert "(model_type apertus in its config.json); their activations were traced" in out
    assert re.search(r"time of a step: .* predicted", out), out


@pytest.mark.slow
def test_what_layers_of_a_dense_model_keep_is_what_the_formulas_say(tmp_path):
    """Within 3 % at these sizes, at which what is per row or per block counts."""
    tiny.build(**LLAMA).config.save_pretrained(tmp_path)
    shape = traced_shape(tmp_path)
    known = shape.known
    formula = dataclasses.replace(shape, tracer=None).known
    batch = MicrobatchShape((160, 150, 130, 100), 540)
    for kind, precision, device in (
        ("lora", "fp32", "cpu"),
        ("qlora", "bf16", "cuda"),
        ("full", "fp32", "cpu"),
        ("lora", "bf16", "cuda"),
    ):
        plan = Parts(settings_of(kind, precision))
        costs = [ModelCost(s, plan, device) for s in (known, formula)]
        kept, said = (memory.activation_bytes(m, batch) for m in costs)
        assert kept == pytest.approx(said, rel=0.03), (kind, precision, device)
        one, of_formula = (memory.layer_activation_bytes(m, batch) for m in costs)
        assert one == pytest.approx(of_formula, rel=0.05), (kind, precision, device)  # blocks of 512 bytes
        assert memory.base_bytes(costs[0]) == memory.base_bytes(costs[1])
        assert memory.trainable_weights(costs[0]) == memory.trainable_weights(costs[1])
    shape.tracer.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_what_odd_layers_keep_is_what_a_real_step_saves(name, tmp_path):
    """Activations within 3 % of those that autograd saved, weights, gradients and moments to the byte."""
    architectures.build(name, **ODD[name]).save_pretrained(tmp_path)
    architectures.tiny_config(name, **ODD[name]).save_pretrained(tmp_path)
    settings = settings_of("lora", lora_rank=4)
    engine = torch_engine(load_model(tmp_path, settings, CPU, say=lambda line: None), settings, CPU)
    layout = engine.verify("auto")["batch_layout"][0]
    rows = tiny.dataset(LENGTHS)
    batch = architectures.microbatches(rows, range(len(LENGTHS)), layout, len(LENGTHS), 4096, 0)[0]
    engine.begin_memory(0)
    engine.train_step([batch], 1e-4)
    measured = engine.memory().items
    shape = traced_shape(tmp_path)
    lengths = tuple(int(rows.lengths[r]) for r in batch.rows)
    known = shape.known
    found = memory.estimate(Parts(settings), known, MicrobatchShape(lengths, batch.num_targets, layout))["items"]
    shape.tracer.close()
    for item in ("base", "trainable", "gradients", "optimizer"):
        assert found[item] == pytest.approx(measured[item], rel=3e-3), item  # Adam counts steps
    assert found["activations"] == pytest.approx(measured["activations"], rel=0.03)


@pytest.mark.slow
def test_rows_and_recomputation_are_read_from_the_same_trace(tmp_path):
    """Bytes of 6 rows, from those of 1 and 2, are those of 6 traced; a recomputed layer needs what it kept before."""
    architectures.tiny_config("mamba2", **ODD["mamba2"]).save_pretrained(tmp_path)
    shape = traced_shape(tmp_path)
    known, tracer = shape.known, shape.tracer
    plan = Parts(settings_of("lora"))
    m = ModelCost(known, plan)
    six = MicrobatchShape.full_rows(6, 64, "padded")
    question = dict(settings=dict(train_type="lora", precision="fp32", use_gradient_checkpointing="false"))
    whole = Trace.of(tracer.ask(**question | {"device": "cpu", "layout": "padded"}, lengths=[64] * 6))
    kept = sum(whole.layers("kept")) + whole.values["outside"] + whole.values["after"]
    assert kept_bytes(m, six) == pytest.approx(kept, rel=0.002)  # of even and odd counts, blocks of 512 bytes
    again = dataclasses.replace(m, plan=plan.with_settings(use_gradient_checkpointing="true"))
    assert kept_bytes(again, six) < 0.1 * kept_bytes(m, six)
    least = peaks(again, six, lambda batch: 0, 0, 0, 0).layers
    assert least > layer_bytes(m, six)
    tracer.close()


@pytest.mark.slow
def test_a_plan_traces_once_and_then_reads_what_it_kept(tmp_path):
    architectures.tiny_config("mamba2", **ODD["mamba2"]).save_pretrained(tmp_path / "model")
    flags = ["--model_name", str(tmp_path / "model"), "--train_type", "lora", "--context_length", "64"]
    flags += ["--batch_size", "8", "--output_dir", str(tmp_path / "out")]
    first, second = dry_run(*flags), dry_run(*flags)
    for code, out, _ in (first, second):
        assert code == 0 and "their activations were traced" in out and "largest batch that fits" in out
    said = "tracing them (imports torch"
    assert said in first[1] and said not in second[1]
    assert first[1].partition("memory of this run")[2] == second[1].partition("memory of this run")[2]
    assert len(list((tmp_path / "cache/finetune/traces").iterdir())) == 1


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_is_not_predicted_and_the_plan_says_why(tmp_path):
    config = architectures.tiny_config("mamba2", **ODD["mamba2"]).to_dict() | {"head_dim": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = dry_run("--model_name", str(tmp_path), "--train_type", "lora", "--output_dir", str(tmp_path / "o"))
    assert code == 0 and "they cannot be traced: " in out and "memory: not predicted" in out
    shape = traced_shape(tmp_path)
    assert shape.known is None and shape.tracer.error


@pytest.mark.slow
def test_a_tracer_whose_process_starts_again_says_that_it_traces_once(tmp_path, capsys):
    architectures.tiny_config("mamba2", **ODD["mamba2"]).save_pretrained(tmp_path)
    tracer = Tracer(str(tmp_path))
    for _ in range(2):
        tracer.known.clear()
        assert tracer.ask()["layout"] == "padded"
        tracer.close()
    assert capsys.readouterr().out.count("tracing them (imports torch") == 1


@pytest.mark.slow
def test_damage_to_what_was_kept_costs_another_trace(tmp_path):
    architectures.tiny_config("mamba2", **ODD["mamba2"]).save_pretrained(tmp_path)
    tracer = Tracer(str(tmp_path))
    tracer.file.parent.mkdir(parents=True)
    tracer.file.write_text('{"{}": 3')
    again = Tracer(str(tmp_path))
    assert again.ask()["layout"] == "padded"
    again.close()
    assert json.loads(again.file.read_text())
    shutil.rmtree(tracer.file.parent)


def test_a_kept_answer_that_was_changed_is_asked_for_again(tmp_path, monkeypatch):
    """A number of it was predicted from, and a missing one was a traceback at every later start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    tracer = Tracer(str(tmp_path))
    tracer.known = {"{}": {"num_weights": 1234, "layers": {}}}
    tracer._keep()
    assert Tracer(str(tmp_path)).known == tracer.known
    kept = tracer.file.read_text()
    for changed in (kept.replace("1234", "9234"), kept.replace("num_weights", "num_heights"), '{"{}": {}}'):
        tracer.file.write_text(changed)
        assert Tracer(str(tmp_path)).known == {}


def test_a_polynomial_goes_through_its_points_and_is_never_negative_between_sizes():
    points = [(x, Trace((0,), {"a": 3.0 * x * x - x, "b": 5.0})) for x in (1, 2, 4)]
    assert between(points, 10).values == pytest.approx({"a": 290.0, "b": 5.0})
    falling = [(x, Trace((0,), {"a": 10.0 - 4 * x})) for x in (1, 2)]
    assert between(falling, 9).values == {"a": 0.0}


@pytest.mark.slow
def test_no_answer_is_an_error_with_the_childs_reason(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no such type"}')
    tracer = Tracer(str(tmp_path))
    with pytest.raises(Failed, match="no such type|not that of a causal"):
        tracer.ask()
    tracer.close()


@pytest.mark.slow
def test_what_failed_for_want_of_memory_is_asked_again_by_the_next_plan(tmp_path):
    """A router of 17 TB, which transformers fills with zeros."""
    router = {"n_routed_experts": 1 << 32, "hidden_size": 1024}
    config = architectures.tiny_config("deepseek_v3", **ODD["deepseek_v3"]).to_dict() | router
    (tmp_path / "config.json").write_text(json.dumps(config))
    tracer = Tracer(str(tmp_path))
    with pytest.raises(Failed, match="allocate"):
        tracer.ask()
    tracer.close()
    assert not Tracer(str(tmp_path)).known


def test_a_model_without_heads_is_traced(tmp_path):
    architectures.build("rwkv").save_pretrained(tmp_path)
    assert traceable_shape(find_model(str(tmp_path), None), None).tracer is not None


@pytest.mark.slow
@pytest.mark.parametrize("name, layout", [("llava", "padding_free"), ("gemma3", "padded")])
def test_rows_with_images_are_planned_in_the_layout_that_the_checks_choose(tmp_path, name, layout):
    tracer = Tracer(str(vision.save_model(name, tmp_path / "model")))
    question = {"settings": {"train_type": "lora", "precision": "fp32"}, "device": "cpu"}
    microbatch = MicrobatchShape.full_rows(2, 64)
    assert tracer.layout(microbatch, question, images=True) == layout
    assert tracer.layout(microbatch, question, images=False) == "padding_free"
    tracer.close()
