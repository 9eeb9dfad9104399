"""Settings, shapes and dry runs for tests of predicted memory."""

import json
from dataclasses import replace

from backend_manager import Backend
from finetune.config import TrainConfig
from finetune.data.collate import microbatches
from finetune.estimate import memory
from finetune.estimate.model_cost import MicrobatchShape
from finetune.estimate.model_shape import ModelShape, read_headers
from finetune.parts.parts import Parts
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from tests.support import tiny
from tests.support.build import load_model, torch_engine
from tests.support.commands import ROOT, Finished, command, finish
from tests.support.engines import CPU
from tests.support.plans import NOW, capabilities

GIB = 2**30
LENGTHS = (40, 37, 12, 30, 44, 9)
MIXED = dict(hidden_size=96, intermediate_size=160, num_hidden_layers=3)


def settings_of(kind, precision="fp32", **changes):
    quantized = (
        dict(quantization_backend="nf4", quant_type="nf4") if kind == "qlora" else dict(quantization_backend="none")
    )
    values = dict(use_gradient_checkpointing="false", cache_dequantized="false", lr=1e-4, microbatch_tokens=4096)
    return replace(TrainConfig(), train_type=kind, precision=precision, **{**quantized, **values, **changes})


def plan_of_kind(kind, precision="fp32", **changes) -> Parts:
    return Parts(settings_of(kind, precision, **changes))


def engine_of(architecture, settings, folder, **sizes):
    tiny.build(architecture, **sizes).save_pretrained(folder)
    engine = torch_engine(load_model(folder, settings, CPU), settings, CPU)
    layout = engine.verify(settings.batch_layout)["batch_layout"][0]
    return engine, layout


def counted(architecture, settings, folder, lengths=LENGTHS, **sizes):
    """(predicted, measured) items of one real step."""
    engine, layout = engine_of(architecture, settings, folder, **sizes)
    rows = tiny.dataset(lengths)
    batch = microbatches(rows, range(len(lengths)), layout, len(lengths), 4096, 0)[0]
    engine.begin_memory(0)
    engine.train_step([batch], 1e-4)
    measured = engine.memory().items
    shape = ModelShape.from_config(
        json.loads((folder / "config.json").read_text()), read_headers(folder.glob("*.safetensors"))
    )
    load = MicrobatchShape(tuple(int(rows.lengths[r]) for r in batch.rows), batch.num_targets, layout)
    return memory.estimate(Parts(settings), shape, load)["items"], measured


def shape_of(name) -> ModelShape:
    return ModelShape.from_config(json.loads((ROOT / "examples/configs" / name / "config.json").read_text()))


SMALL = ModelShape.from_config(
    dict(
        model_type="llama",
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
)


def planned(gib, **overrides):
    caps = capabilities(memory_bytes=int(gib * GIB))
    return resolve_plan({"output_dir": "o", **overrides}, Facts(Backend.CPU, caps, SMALL), NOW)


def why(settled, setting) -> str:
    return next(a.reason for a in settled.adjustments if a.setting == setting)


def dry_run(*flags, **values) -> Finished:
    """A dry run; that it imports no framework is shown by tests/promises/test_dry_run.py."""
    return finish(command("--dry_run", *flags, **values))
