"""Sharded weights: quantized ones in a forward, and weights kept in host memory."""

import shutil

import pytest

from finetune.checkpoint.store import newest_checkpoint, steps_of
from tests.support import cases, ranks
from tests.support.commands import command, finish
from tests.support.runs import losses, same_files


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4 bf16", "nf4 as bf16", "mlx"])
def test_a_forward_over_ranks_sees_the_full_models_codes_and_scales_bit_for_bit(kind, tmp_path):
    for found in ranks.run(2, cases.packed_in_forward, tmp_path, kind=kind):
        assert found == {"layers": 14, "different": []}


@pytest.mark.slow
def test_a_run_with_its_weights_in_host_memory_is_bitwise_the_same_and_resumes_bitwise(base, tmp_path):
    flags = "--world_size 2 --batch_size 2 --save_every 5 --keep_last 9 --use_cpu_offload"
    for name, offload in (("device", "false"), ("host", "true")):
        code, _, err = finish(command(base, f"{flags} {offload}", output_dir=tmp_path / name))
        assert code == 0, err
    assert losses(tmp_path / "host") == losses(tmp_path / "device")
    for later in steps_of(tmp_path / "host")[:-1]:
        shutil.rmtree(later)
    (tmp_path / "host" / "train_state.json").unlink()
    code, out, err = finish(command(base, f"{flags} true --resume auto", output_dir=tmp_path / "host"))
    assert code == 0 and "at step 5 of 12" in out, err
    one, two = (newest_checkpoint(tmp_path / name)[0].folder for name in ("device", "host"))
    same_files(one, two, ["adapter_model.safetensors", "optimizer.safetensors"])
