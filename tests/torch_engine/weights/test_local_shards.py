"""Ranks that read their own rows: bit for bit those of the model loaded in full, in real Gloo ranks."""

import pytest
from safetensors.torch import load_file, save_file

from tests.support import cases, ranks, sharded_loading_cases, tiny
from tests.support.stored_quantized import BNB, stored_folder


def check(layout: str, wanted: list, folder):
    """Runs the cases of (case, model folder) on the layout's ranks, and asserts that all is equal on each of them."""
    size, wanted = cases.LAYOUTS[layout].world_size, [(layout, *case) for case in wanted]
    for rank, results in enumerate(ranks.run(size, sharded_loading_cases.loading, folder, wanted=wanted)):
        for result in results:
            said = f"rank {rank}: {result}"
            assert result["on_meta"], said
            assert result["names"] and result["different"] == [] and result["tied"] and result["buffers"], said
            assert result["bytes"], said
            assert result["losses"] and result["norms"] and result["gradients"], said


@pytest.mark.slow
def test_two_ranks_that_read_their_rows_hold_the_shards_of_a_full_load(bf16_folders, tmp_path):
    wanted = [(kind, bf16_folders["llama"]) for kind in ("full", "nf4", "dora", "hqq")]
    check("FSDP2 2", [*wanted, ("lora", bf16_folders["llama_tied"])], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 2", "FSDP2 3", "HSDP 2x2"])
def test_weights_kept_in_host_memory_train_bitwise_as_those_on_the_device(layout, bf16_folders, tmp_path):
    few = ("full offloaded", "nf4 offloaded")
    kinds = few if layout == "FSDP2 2" else sharded_loading_cases.OFFLOADED
    check(layout, [(kind, bf16_folders["llama"]) for kind in kinds], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", cases.EXPERT_LAYOUTS)
def test_ranks_that_hold_different_experts_read_only_theirs(layout, bf16_folders, tmp_path):
    kinds = ("full", "lora", "nf4", "mlx", "bnb 8")
    check(layout, [(kind, bf16_folders[name]) for name in ("mixtral", "gpt_oss") for kind in kinds], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 2", "FSDP2 3", "HSDP 2x2"])
def test_every_kind_of_training_loads_its_rows(layout, bf16_folders, tmp_path):
    check(layout, [(kind, bf16_folders["llama"]) for kind in sharded_loading_cases.CASES], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 2", "FSDP2 3"])
def test_every_architecture_loads_its_rows(layout, bf16_folders, tmp_path):
    """Fused experts made by conversions; Conv1D; tied weights; biases; more ranks than rows of some tensors."""
    wanted = [(kind, folder) for folder in bf16_folders.values() for kind in ("full", "nf4", "hqq", "dora")]
    check(layout, [(kind, folder) for kind, folder in wanted if not (kind == "dora" and "falcon" in folder)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 2", "FSDP2 3"])
def test_folders_stored_quantized_load_their_rows(layout, dense_folder, tmp_path):
    kinds = [*BNB, "mlx 4", "mlx 3", "mlx 8"]
    stored = [str(stored_folder(kind, dense_folder, tmp_path / kind)) for kind in kinds]
    check(layout, [("stored", folder) for folder in stored], tmp_path / "ranks")


@pytest.mark.slow
def test_weights_that_files_hold_twice_are_tied_if_they_are_the_same(tmp_path):
    """A rank sees its rows alone: a difference in the last row must untie them on all ranks."""
    for name in ("same", "apart"):
        folder = tmp_path / name
        tiny.build("llama_tied").save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += name == "apart"
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    wanted = [(kind, str(tmp_path / name)) for kind in ("full", "nf4") for name in ("same", "apart")]
    check("FSDP2 2", wanted, tmp_path / "ranks")
