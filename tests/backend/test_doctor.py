import json
import subprocess
import sys

import pytest
import torch

from backend_manager import BackendManager
from docs import make_quantization
from finetune.backend import doctor
from finetune.torch_engine import device_facts
from quantization_wrapper import METHODS, pairs
from tests.support import emulated_device, ranks, wrapper_cases
from tests.support.commands import ROOT


@pytest.fixture(scope="module")
def found():
    return doctor.examine(BackendManager("cpu", verbose=False), lambda: device_facts.examine(torch.device("cpu")))


def test_the_doctor_has_a_row_with_numbers_for_every_pair(found):
    rows = doctor.rows(found["quantization"])
    assert [(r[0], int(r[1])) for r in rows] == pairs()
    assert all(r[2] == "yes" and "%" in r[4] and r[6].endswith(" x") for r in rows)
    assert json.loads(doctor.as_json(found))["quantization"]["nf4/4"]["error"] is None
    text = doctor.lines(BackendManager("cpu", verbose=False), found)
    assert any("mlx     6     yes" in line for line in text)


def test_a_pair_that_fails_is_a_row_and_a_reason():
    results = {"hqq/4": {"error": "hqq is not installed: pip install hqq"}}
    assert doctor.rows(results) == [("hqq", "4", "no", "-", "-", "-", "-")]
    text = doctor.lines(BackendManager("cpu", verbose=False), {"quantization": results, "device": []})
    assert text[-1] == "  hqq/4 fails here: hqq is not installed: pip install hqq"


def test_the_command_line_prints_it_as_json():
    run = [sys.executable, "train.py", "--backend", "cpu", "--doctor"]
    data = json.loads(
        subprocess.run([*run, "json", "--recommend"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )
    assert data["recommend"][0].startswith("NVIDIA")
    assert set(data["quantization"]) == {f"{name}/{bits}" for name, bits in pairs()}


def test_the_page_has_the_table_of_methods_and_a_probed_row_for_every_pair():
    page = make_quantization.PAGE.read_text()
    assert make_quantization.between(page, "methods", make_quantization.methods()) == page
    assert all(f"| {name} | {bits} | yes |" in page for name in METHODS for bits in METHODS[name].bits)


def test_every_fact_of_the_device_has_its_row_and_its_reason(found):
    facts = {f["what"]: f for f in found["device"]}
    assert list(facts) == list(device_facts.PROBES) and all(f["why"] for f in facts.values())
    assert facts["collectives"]["works"] and facts["collectives"]["why"].startswith("gloo: known answers right")
    rows = [
        line for line in doctor.lines(BackendManager("cpu", verbose=False), found) if line.startswith("collectives")
    ]
    assert len(rows) == 1 and "yes" in rows[0]


@pytest.mark.slow
@pytest.mark.skipif(emulated_device.missing() is not None, reason=str(emulated_device.missing()))
def test_facts_of_a_device_without_collectives_say_what_was_supplied(tmp_path):
    (found,) = ranks.run(1, wrapper_cases.facts, tmp_path, device=emulated_device.NAME)
    facts = {f["what"]: f for f in found}
    assert facts["collectives"]["why"].startswith("staged_gloo") and "let go of" in facts["FSDP2 resizes"]["why"]
    assert not facts["bf16 products"]["works"] and "BFloat16 is not supported" in facts["bf16 products"]["why"]
    assert {what for what, f in facts.items() if not f["works"]} <= {"bf16 products", "fused AdamW"}
