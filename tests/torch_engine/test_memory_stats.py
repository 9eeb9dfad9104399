"""Bytes counted by item."""

from finetune.data.collate import microbatches
from tests.support import tiny
from tests.support.engine_access import counted_weights, trainable_params
from tests.support.engines import batches, engine
from tests.support.planned import engine_of, settings_of


def test_memory_is_counted_by_item():
    built = engine(train_type="full", optimizer="adamw")
    built.train_step(batches(), 1e-3)
    items = built.memory().items
    weights = sum(p.numel() for p in built.model.parameters()) * 4
    buffers = sum(b.nbytes for b in built.model.buffers())
    assert items["trainable"] == weights and items["base"] == buffers
    # AdamW holds two moments per weight and a step counter of 4 bytes per tensor.
    assert items["optimizer"] == 2 * weights + 4 * len(trainable_params(built))


def test_weights_are_counted_once_and_not_at_every_step(tmp_path):
    engine, layout = engine_of("llama", settings_of("lora"), tmp_path)
    rows = tiny.dataset()
    batches = microbatches(rows, range(4), layout, 4, 4096, 0)
    engine.train_step(batches, 1e-4)
    first, weights = engine.memory().items, counted_weights(engine)
    engine.train_step(batches, 1e-4)
    second = engine.memory().items
    assert counted_weights(engine) is weights
    names = ("base", "trainable", "gradients", "optimizer", "activations")
    assert [first[n] for n in names] == [second[n] for n in names]
