"""A training step reads from the device once, after its last backward, and waits for nothing in a microbatch.

Counted on the device `emulated`: a GPU's host would wait for the same operations.
"""

import json
import subprocess
import sys

import pytest
import torch

from finetune.torch_engine.experts import fused, grouped
from finetune.torch_engine.lora.layers import adapter_parameters
from tests.support import cases, emulated_device
from tests.support.cases import Case
from tests.support.host_wait_cases import PREFERENCES, STEPS

needs_compiler = pytest.mark.skipif(bool(emulated_device.missing()), reason=str(emulated_device.missing()))


@pytest.fixture(scope="module")
def steps() -> dict:
    command = [sys.executable, "-m", "tests.support.host_wait_cases"]
    done = subprocess.run(command, env=emulated_device.environment(), capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", [*STEPS, *PREFERENCES])
def test_a_step_of_several_microbatches_reads_once_and_uploads_without_waiting(steps, name):
    waits = steps[name]
    assert waits["microbatches"] > 1
    assert len(waits["reads"]) == 1 and not waits["uploads"], waits


@pytest.mark.slow
@needs_compiler
def test_a_base_that_streams_makes_the_host_wait_for_no_layer(tmp_path):
    command = [sys.executable, "-m", "tests.support.streamed_base_cases", str(tmp_path)]
    done = subprocess.run(command, env=emulated_device.environment(), capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    for source in ("host", "disk"):
        for layers in (3, 6):
            resident = found[f"none {layers}"]
            streamed = found[f"{source} {layers}"]
            assert streamed["losses"] == resident["losses"] and streamed["adapters"] == resident["adapters"]
            # Of a layer the last of a forward and the one before are still there in its backward.
            assert streamed["layers_read"] == 2 * (2 * layers - 2)
            # Its copy waits on the device for the last use of its buffer, and its first product for the copy.
            assert streamed["device_waits"] == 2 * streamed["layers_read"] and not streamed["host_waits"]
            assert streamed["thread_waits"] == (streamed["layers_read"] if source == "disk" else 0)
        few = found[f"{source} 3"]
        many = found[f"{source} 6"]
        assert (few["reads"], few["uploads"]) == (many["reads"], many["uploads"])


@needs_compiler
@pytest.mark.slow
def test_grouped_products_are_tried_on_the_device_before_they_are_used(steps):
    assert steps["groups"] and not grouped.works(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("case", [Case("lora"), Case(method="nf4")], ids=lambda case: case.id)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_experts_in_groups_give_the_gradients_of_one_at_a_time(monkeypatch, architecture, case):
    found = {}
    for way in (False, True):
        monkeypatch.setattr(grouped, "works", lambda device, dtype, way=way: way)
        engine = cases.build(case, architecture=architecture)
        layer = next(iter(fused.reachable(engine.model).values()))
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(19, 64, generator=generator, requires_grad=True)
        scores = torch.rand(19, 4, generator=generator)
        weights, chosen = scores.where(torch.arange(4) != 2, 0).topk(2)  # nobody chooses the third expert
        out = layer(hidden, chosen, weights)
        out.square().sum().backward()
        of_layer = {name: p.grad for name, p in adapter_parameters(layer).items()}
        found[way] = {"out": out.detach(), "hidden": hidden.grad} | of_layer
    assert len(found[True]) == 6
    for name, wanted in found[False].items():
        # fp32 sums in another order
        assert (found[True][name] - wanted).abs().max() <= 2e-6 * wanted.abs().max(), name
