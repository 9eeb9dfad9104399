"""Logits of mlx-lm's models against transformers', on folders as transformers 5 writes them."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

import generate
from finetune.data.collate import microbatches
from finetune.errors import PlanError
from finetune.mlx_engine import logit_check
from finetune.mlx_engine import model as models
from finetune.mlx_engine.config import translated, unread_fields
from finetune.mlx_options import MLXOptions
from finetune.model_files.files import find_model
from finetune.torch_engine import transformers_logits
from tests.support import tiny
from tests.support.mlx_engines import config_of, mlx_engine, save, torch_engine_of

LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
MIXED_LAYERS = dict(layer_types=["sliding_attention", "full_attention"])
SHAPES = {
    "llama": ("llama", {}),
    "llama, another theta": ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=5e5))),
    "llama3": ("llama", dict(rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32})),
    "tied": ("llama_tied", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", MIXED_LAYERS),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "cohere": ("cohere", {}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_gives_transformers_logits_and_trains_the_tensors_torch_trains(tmp_path, name):
    architecture, changes = SHAPES[name]
    folder = save(tmp_path / "model", architecture, **changes)
    # fp32 products of two libraries.
    assert logit_check.check(find_model(str(folder)), MLXOptions(), 512, transformers_logits.logits) < 2e-6
    mlx, torch = mlx_engine(folder), torch_engine_of(folder)
    assert mlx.head is not None
    assert mlx.parameter_counts() == torch.parameter_counts()
    mine, theirs = mlx.trainable_state(), torch.trainable_state()
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[key], theirs[key]) for key in mine)  # the same random starts
    ours, wanted = (e.describe_weights("base", "digest")["adapter_config.json"] for e in (mlx, torch))
    assert ours == wanted


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
def test_a_model_that_another_thread_has_loaded_runs_in_this_one(tmp_path, kind):
    """Frequencies that mlx-lm computes of such a config are lazy, and belonged to the thread that a run loads in."""
    ropes = {
        "llama3": LLAMA3 | {"original_max_position_embeddings": 32},
        "yarn": dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32),
        "longrope": dict(
            rope_type="longrope",
            rope_theta=1e4,
            short_factor=[1.0] * 8,
            long_factor=[2.0] * 8,
            original_max_position_embeddings=32,
        ),
    }
    folder = save(tmp_path / "model", rope_parameters=ropes[kind])

    def loaded_in_thread():
        found = models.load(folder, config_of(folder), mx.float32, True)
        mx.eval(found.model.parameters())
        return found

    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(loaded_in_thread).result()
    assert np.isfinite(np.array(loaded.model(mx.array([[3, 4, 5]])))).all()


def test_without_the_translation_of_rope_parameters_the_logits_are_others(tmp_path):
    """What mlx-lm's own loader does with such a folder, in silence."""
    folder = save(tmp_path / "model", **SHAPES["llama, another theta"][1])
    config, ids = config_of(folder), np.arange(3, 27)
    theirs = transformers_logits.logits(folder, ids)
    off = {
        untouched: np.abs(logit_check.logits(folder, used, ids) - theirs).max() / np.abs(theirs).max()
        for untouched, used in ((False, config), (True, {**config, "rope_parameters": None}))
    }
    assert off[False] < 2e-6 and off[True] > 1e-3


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_window_that_mlx_lm_does_not_have_is_refused(tmp_path, name):
    folder = save(tmp_path / "model", name)
    with pytest.raises(PlanError, match="gives other logits than transformers on 24 tokens .off by"):
        logit_check.check(find_model(str(folder)), MLXOptions(), 512, transformers_logits.logits)
    # In rows that the window does not cut, it is the same model.
    logit_check.check(find_model(str(folder)), MLXOptions(), 8, transformers_logits.logits)


def test_a_window_longer_than_the_usual_tokens_is_seen_too(tmp_path):
    folder = save(tmp_path / "model", "mistral", sliding_window=40)
    with pytest.raises(PlanError, match="on 48 tokens"):
        logit_check.check(find_model(str(folder)), MLXOptions(), 128, transformers_logits.logits)
    logit_check.check(find_model(str(folder)), MLXOptions(), 40, transformers_logits.logits)


@pytest.mark.parametrize(("name", "layers"), [("llama", 2), ("gemma3", 6), ("mixtral", 2)])
def test_the_first_layers_of_a_large_model_stand_for_it(tmp_path, name, layers):
    folder = save(tmp_path / "model", name, num_hidden_layers=8)
    files = find_model(str(folder))
    (tmp_path / "part").mkdir()
    config = logit_check.first_layers(files, tmp_path / "part")
    assert config["num_hidden_layers"] == layers
    ids = np.arange(3, 27)
    theirs = transformers_logits.logits(tmp_path / "part", ids)
    assert np.abs(logit_check.logits(tmp_path / "part", config, ids) - theirs).max() < 2e-6 * np.abs(theirs).max()


def test_fields_that_a_model_file_does_not_read_are_named():
    assert unread_fields({"rope_theta": 1.0, "logit_scale": 2.0, "hidden_size": 3}, {"rope_theta"}) == ["logit_scale"]
    nested = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "chunked_attention": {"rope_theta": 1e4}}}
    with pytest.raises(PlanError, match="rope_parameters are for chunked_attention, full_attention"):
        translated(nested)


def test_a_model_that_mlx_lm_computes_otherwise_does_not_answer(tmp_path, make_tokenizer, monkeypatch, capsys):
    """Gemma 2 without its window; what passed once is not compared again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    argv = ["--prompt", "Item", "--raw", "--max_new_tokens", "2", "--precision", "fp32", "--device", "mlx"]
    for window, right in ((4096, True), (16, False)):
        folder = save(tmp_path / str(window), "gemma2", sliding_window=window)
        make_tokenizer(folder)
        if right:
            assert generate.main(["--checkpoint", str(folder), *argv]) == 0
        else:
            with pytest.raises(PlanError, match="--checkpoint .*: .* so another model would answer. Use --device cpu"):
                generate.main(["--checkpoint", str(folder), *argv])
    assert len(list((tmp_path / "cache" / "finetune" / "logits").iterdir())) == 1
    files = find_model(str(tmp_path / "4096"))
    logit_check.check_opened(files, None)  # the reference is not asked


@pytest.mark.parametrize("together", [True, False])
def test_prompts_are_answered_together_only_where_each_is_answered_as_alone(tmp_path, together):
    """mlx-lm's Gemma 2 takes the mask of two rows for that of its two key heads."""
    folder = save(tmp_path / "model", "llama" if together else "gemma2", num_key_value_heads=2, num_attention_heads=4)
    engine, prompts = mlx_engine(folder), [[3, 4, 5, 6, 7, 8, 9, 10, 11], [8, 9]]
    assert engine._answers_together is together
    assert engine.generate(prompts, 6, set()) == [engine.generate([p], 6, set())[0] for p in prompts]


def test_blocks_that_run_with_a_cache_only_train_and_answer(tmp_path):
    folder = save(tmp_path / "model", "stablelm")
    mlx, torch = mlx_engine(folder), torch_engine_of(folder)
    assert mlx.head is None
    assert mlx.generate([[3, 4, 5]], 3, set()) == torch.generate([[3, 4, 5]], 3, set())
    rows = tiny.dataset((9, 30))
    losses = [e.evaluate(microbatches(rows, range(2), "padded", 2, 512, 0)).loss for e in (mlx, torch)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
