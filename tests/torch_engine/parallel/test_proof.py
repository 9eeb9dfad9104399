"""The comparison with the full model's logits, which no rank holds: it passes, and finds every kind of wrong slice."""

import contextlib

import pytest
import torch

from tests.support import cases, proof_cases, ranks, tiny

SIZES = {
    "llama": ("llama", {}),
    "llama_deep": ("llama", dict(num_hidden_layers=4)),
    "qwen2_biased": ("qwen2", {}),
    "phi3": ("phi3", {}),
    "tied": ("llama_tied", {}),
    "uneven": ("llama_uneven_tied", {}),
    "mixtral": ("mixtral", {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{architecture: a folder of its tiny model, in fp32}."""
    found = {}
    for name, (architecture, sizes) in SIZES.items():
        found[name] = str(tmp_path_factory.mktemp("proof") / name)
        model = tiny.build(architecture, intermediate_size=128, **sizes)
        with torch.no_grad():  # biases are zero and norms one in a new model: no slice of them would show
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 4)
        model.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def compared(folders, tmp_path_factory):
    """{name of a fault or a control: by rank, what the comparison says}; cases of one world size in the same ranks."""
    found = {}

    def of(name: str) -> list[str | None]:
        if name not in found:
            every = proof_cases.FAULTS | proof_cases.CONTROLS
            size = cases.LAYOUTS[every[name].layout].world_size
            wanted = [n for n, fault in every.items() if cases.LAYOUTS[fault.layout].world_size == size]
            by_rank = ranks.run(
                size, proof_cases.compare, tmp_path_factory.mktemp("ranks"), wanted=wanted, folders=folders
            )
            found.update({n: [of_rank[n] for of_rank in by_rank] for n in wanted})
        return found[name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", proof_cases.CONTROLS)
def test_a_model_that_is_distributed_as_it_should_be_passes(name, compared):
    assert set(compared(name)) == {None}


@pytest.mark.slow
@pytest.mark.parametrize("name", proof_cases.FAULTS)
def test_every_fault_is_found_on_all_ranks(name, compared):
    for said in compared(name):
        # Some are found a step before: by a wrong slice, tokens see those after them.
        words = "logits of the full one", "sees", "see those after", "cannot be sharded"
        assert said is not None and any(word in said for word in words)


def test_every_fault_replaces_something_that_there_is():
    for fault in proof_cases.FAULTS.values():
        with fault.patch() if fault.patch else contextlib.nullcontext():
            pass


def test_a_few_of_them_in_the_default_suite(folders, tmp_path):
    few = ["lora_A of a row holds the other half", "packed columns are the other half", "the last layer is left out"]
    few += ["the loss's sums are not reduced"]
    controls = ["TP 2, llama, nf4", "PP 2, llama, lora"]
    for found in ranks.run(2, proof_cases.compare, tmp_path, wanted=[*few, *controls], folders=folders):
        assert [found[name] for name in controls] == [None, None]
        assert all("does not give the logits of the full one" in (found[name] or "") for name in few), found
