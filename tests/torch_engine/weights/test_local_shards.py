"""Ranks that read their own part: bit for bit that of the model loaded in full, in real Gloo ranks."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import cases, ranks, sharded_loading_cases, tiny
from tests.support.stored_quantized import BNB, stored_folder


def check(layout: str, wanted: list, folder):
    """Runs the cases of (case, model folder) on the layout's ranks, and asserts that all is equal on each of them."""
    check_all([(layout, *case) for case in wanted], folder)


def check_all(wanted: list, folder):
    """The same of cases of (layout, case, model folder) on as many ranks."""
    size = cases.LAYOUTS[wanted[0][0]].world_size
    for rank, results in enumerate(ranks.run(size, sharded_loading_cases.loading, folder, wanted=wanted)):
        for result in results:
            said = f"rank {rank}: {result}"
            assert result["on_meta"], said
            assert result["names"] and result["different"] == [] and result["tied"] and result["buffers"], said
            assert result["bytes"], said
            assert result["losses"] and result["norms"] and result["gradients"], said


@pytest.fixture(scope="module")
def wide_folders(tmp_path_factory):
    """{architecture: a folder of its tiny model, in bf16}, whose slices are wide enough for groups of 32 weights."""
    found = {}
    for name in ("llama", "llama_tied", "qwen2", "gemma3", "mixtral", "gpt_oss", "phi3"):
        found[name] = str(tmp_path_factory.mktemp("wide") / name)
        model = tiny.build(name, intermediate_size=128).to(torch.bfloat16)
        model.save_pretrained(found[name], max_shard_size="50KB")
    return found


def test_ranks_that_read_their_slices_or_layers_hold_those_of_a_full_load(wide_folders, tmp_path):
    check_all([(layout, kind, wide_folders["llama"]) for layout, kind in (("TP 2", "nf4"), ("PP 2", "hqq"))], tmp_path)


REFUSED_BY_TP = "bnb across rows"  # blocks of scales that two slices would share


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP 2", "PP 2"])
def test_every_kind_of_training_loads_its_slices_or_layers(layout, wide_folders, tmp_path):
    kinds = [kind for kind in sharded_loading_cases.CASES if not (REFUSED_BY_TP in kind and layout == "TP 2")]
    check(layout, [(kind, wide_folders["llama"]) for kind in kinds], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 2", "TP 2", "PP 2"])
def test_adapters_that_start_from_the_base_start_as_in_one_process(layout, wide_folders, tmp_path):
    wanted = [(kind, wide_folders["llama"]) for kind in sharded_loading_cases.RESIDUAL]
    check(layout, [*wanted, ("lora pissa", wide_folders["mixtral"])], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP 2", "PP 2"])
def test_every_architecture_with_a_plan_loads_its_slices_or_layers(layout, wide_folders, tmp_path):
    """Fused experts, biases, tied weights, gathered outputs."""
    names = ["llama_tied", "qwen2", "gemma3", "mixtral", *(["gpt_oss", "phi3"] if layout == "TP 2" else [])]
    wanted = [(kind, wide_folders[name]) for name in names for kind in ("full", "nf4", "hqq")]
    check(layout, wanted, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 2 x TP 2", "PP 2 x TP 2", "PP 2 x FSDP2 2", "CP 2 x TP 2", "DDP 2 x TP 2"])
def test_products_of_degrees_load_their_part(layout, wide_folders, tmp_path):
    check(layout, [(kind, wide_folders["llama"]) for kind in ("full", "dora", "nf4", "hqq", "nf4 pissa")], tmp_path)


@pytest.mark.slow
def test_stored_codes_are_sliced_as_the_files_hold_them(dense_folder, tmp_path):
    stored = [str(stored_folder(kind, dense_folder, tmp_path / kind)) for kind in ("mlx 4", "mlx 8")]
    check_all([(layout, "stored", folder) for layout in ("TP 2", "PP 2") for folder in stored], tmp_path / "ranks")


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
    kinds = ("full", "lora", "nf4", "mlx", "bnb 8", "hqq", "bnb double")
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
