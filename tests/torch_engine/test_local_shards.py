"""Ranks that read their own rows: bit for bit those of the model loaded whole, in real Gloo ranks."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import cases as cells
from tests.support import ranks, tiny
from tests.support import sharded_loading_cases as share_cells
from tests.torch_engine.test_weights import BNB, dense_folder, stored_folder  # noqa: F401  a fixture

ARCHITECTURES = ("llama", "llama_tied", "qwen2", "gpt2", "gemma3", "mixtral", "gpt_oss", "phi3", "falcon")


def check(found):
    """Every rank's cells: all equal."""
    for rank, results in enumerate(found):
        for result in results:
            said = f"rank {rank}: {result}"
            assert result.pop("different") == [], said
            assert all(result.values()), said


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{architecture: a folder of its tiny model, in bf16}."""
    found = {}
    for name in ARCHITECTURES:
        found[name] = str(tmp_path_factory.mktemp("sharded") / name)
        tiny.build(name).to(torch.bfloat16).save_pretrained(found[name], max_shard_size="50KB")
    return found


def test_two_ranks_that_read_their_rows_hold_what_a_whole_load_is_cut_to(folders, tmp_path):
    wanted = [("FSDP2 2", kind, folders["llama"]) for kind in ("full", "nf4", "dora", "hqq")]
    wanted.append(("FSDP2 2", "lora", folders["llama_tied"]))
    check(ranks.run(2, "tests.support.sharded_loading_cases:loading", {"wanted": wanted}, tmp_path))


@pytest.mark.parametrize(
    "layout", ["FSDP2 2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("FSDP2 3", "HSDP 2x2"))]
)
def test_weights_kept_in_host_memory_train_bitwise_as_those_on_the_device(layout, folders, tmp_path):
    few = ("full offloaded", "nf4 offloaded")
    kinds = few if layout == "FSDP2 2" else share_cells.OFFLOADED
    wanted = [(layout, kind, folders["llama"]) for kind in kinds]
    size = cells.LAYOUTS[layout].world_size
    check(ranks.run(size, "tests.support.sharded_loading_cases:loading", {"wanted": wanted}, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 2", "FSDP2 3", "HSDP 2x2"])
def test_every_kind_of_training_loads_its_rows(layout, folders, tmp_path):
    wanted = [(layout, kind, folders["llama"]) for kind in share_cells.KINDS]
    check(
        ranks.run(
            cells.LAYOUTS[layout].world_size,
            "tests.support.sharded_loading_cases:loading",
            {"wanted": wanted},
            tmp_path,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 2", "FSDP2 3"])
def test_every_architecture_loads_its_rows(layout, folders, tmp_path):
    """Experts of one parameter, made by conversions; Conv1D; weights tied; biases; more ranks than rows of some tensors."""
    wanted = [(layout, kind, f) for f in folders.values() for kind in ("full", "nf4", "hqq", "dora")]
    wanted = [w for w in wanted if not (w[1] == "dora" and "falcon" in w[2])]
    check(
        ranks.run(
            cells.LAYOUTS[layout].world_size,
            "tests.support.sharded_loading_cases:loading",
            {"wanted": wanted},
            tmp_path,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 2", "FSDP2 3"])
def test_folders_stored_quantized_load_their_rows(layout, dense_folder, tmp_path):  # noqa: F811
    kinds = [*BNB, "mlx 4", "mlx 3", "mlx 8"]
    stored = [str(stored_folder(kind, dense_folder, tmp_path / kind)) for kind in kinds]
    wanted = [(layout, "stored", folder) for folder in stored]
    size = cells.LAYOUTS[layout].world_size
    check(ranks.run(size, "tests.support.sharded_loading_cases:loading", {"wanted": wanted}, tmp_path / "ranks"))


@pytest.mark.slow
def test_weights_that_files_hold_twice_are_tied_where_they_are_the_same(tmp_path):
    """A rank sees its rows alone: a difference in the last row must untie them on all ranks."""
    for name in ("same", "apart"):
        folder = tmp_path / name
        tiny.build("llama_tied").save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += name == "apart"
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    wanted = [("FSDP2 2", kind, str(tmp_path / n)) for kind in ("full", "nf4") for n in ("same", "apart")]
    check(ranks.run(2, "tests.support.sharded_loading_cases:loading", {"wanted": wanted}, tmp_path / "ranks"))


@pytest.mark.parametrize("layout", ["FSDP2 2", pytest.param("FSDP2 3", marks=pytest.mark.slow)])
def test_a_ranks_own_bytes_are_predicted_to_the_byte(layout, folders, tmp_path):
    """The first rank has ceil(rows / N) of everything; the last ones less where N does not divide rows."""
    size = cells.LAYOUTS[layout].world_size
    kinds = [k for k in share_cells.KINDS if size == 3 or k in ("full", "nf4 double")]
    wanted = [(layout, kind, folders["llama"]) for kind in kinds]
    if size == 3:
        names = ("llama_tied", "qwen2", "gpt2", "gemma3", "mixtral")
        wanted += [(layout, kind, folders[n]) for n in names for kind in ("full", "lora", "nf4", "hqq")]
    found = ranks.run(size, "tests.support.sharded_loading_cases:own_bytes", {"wanted": wanted}, tmp_path)
    different = [r for r in found[0] if r["predicted"] != r["measured"]]
    assert not different, different
    for results in found[1:]:
        for result in results:
            for name, size_bytes in result["measured"].items():
                assert size_bytes <= result["predicted"][name], result
