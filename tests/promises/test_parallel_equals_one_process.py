"""Several ranks train as one process does: every layout and kind of training, and the degrees of the command line."""

import pytest

from tests.support import cases, devices, ranks
from tests.support.commands import command, finish
from tests.support.rows import jsonl
from tests.support.runs import assert_same_run, losses, read_events


def check(found: list, device=cases.CPU):
    """All figures are within tolerance, and every rank holds its rows of every tensor, or all ranks refuse the case."""
    for i, figures in enumerate(found[0]):
        cases.check(figures, cases.LAYOUTS[figures["layout"]], device)
        assert all("refused" in rank[i] if "refused" in figures else rank[i]["bytes"] for rank in found), figures


@pytest.mark.promise("FT_07")
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(2, marks=pytest.mark.promise("Q_04", "FT_03", "FT_05", "FT_06")),
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_ranks_train_as_one_process_does(size, tmp_path, device):
    """One process on the CPU; the ranks on the device, by NCCL on CUDA."""
    if devices.num_devices(device) < size:
        pytest.skip(f"needs {size} devices: this machine has {devices.num_devices(device)} of {device.type}")
    layouts = [name for name, dims in cases.LAYOUTS.items() if dims.world_size == size]
    kinds = cases.MATRIX | cases.PREFERENCES
    wanted = [(name, kind, "llama") for name in layouts for kind in kinds if (name, kind) in cases.FAST]
    check(ranks.run(size, cases.matrix, tmp_path, device=device.type, wanted=wanted), device)


FAST_OF_EXPERTS = [("TP 2", "lora", "mixtral"), ("EP 2", "full", "qwen3_moe"), ("EP 2", "nf4", "gpt_oss")]


@pytest.mark.slow
def test_experts_over_two_ranks_train_as_in_one_process(tmp_path):
    found = ranks.run(2, cases.matrix, tmp_path, wanted=FAST_OF_EXPERTS)
    check(found)
    for figures in found[0][1:]:
        assert figures["share"] == pytest.approx(1 / 2, rel=0.01), figures  # experts by whole ones, the rest by rows


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["FSDP2 2", "TP 2", "FSDP2 2 x TP 2", "PP 2 x TP 2", *cases.EXPERT_LAYOUTS])
def test_mixtures_of_experts_over_ranks_train_as_in_one_process(layout, tmp_path):
    wanted = [(layout, kind, model) for model in ("mixtral", "qwen3_moe") for kind in ("full", "lora", "nf4")]
    if "PP" not in layout:  # transformers has no pipeline plan for it
        wanted += [(layout, kind, "gpt_oss") for kind in ("full", "lora", "nf4")]
    wanted += [(layout, "full", "qwen2_moe"), (layout, "nf4", "qwen2_moe")]  # shared experts
    wanted += [(layout, kind, "mixtral") for kind in ("bnb", "hqq", "mlx", "lora recomputed", "full no_sync")]
    check(ranks.run(cases.LAYOUTS[layout].world_size, cases.matrix, tmp_path, wanted=wanted))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["DDP 2", "FSDP2 2", "TP 2", "CP 2", "EP 2"])
def test_the_load_balancing_loss_does_not_depend_on_the_ranks(layout, tmp_path):
    wanted = [(layout, kind, "mixtral") for kind in cases.BALANCED]
    check(ranks.run(2, cases.matrix, tmp_path, wanted=wanted))


@pytest.mark.promise("FT_07")
@pytest.mark.slow
@pytest.mark.parametrize("layout", cases.DENSE_LAYOUTS)
def test_the_full_matrix(layout, tmp_path):
    wanted = [(layout, kind, "llama") for kind in cases.MATRIX]
    wanted += [(layout, "nf4", architecture) for architecture in ("qwen3", "gemma3", "mixtral")]
    check(ranks.run(cases.LAYOUTS[layout].world_size, cases.matrix, tmp_path, wanted=wanted))


@pytest.mark.slow
@pytest.mark.parametrize("layout", cases.DENSE_LAYOUTS)
def test_preferences_train_as_in_one_process(layout, tmp_path):
    dims = cases.LAYOUTS[layout]
    wanted = [(layout, kind, "llama") for kind, case in cases.PREFERENCES.items() if dims.tp > 1 or not case.split]
    wanted += [(layout, "lora dpo", model) for model in ("gemma3", "llama_uneven_tied", "mixtral")]
    check(ranks.run(dims.world_size, cases.matrix, tmp_path, wanted=wanted))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["PP 2", "PP 4", "PP 2 x TP 2", "CP 2 x PP 2", "PP 2 x FSDP2 2"])
def test_interleaved_stages_train_as_one_process_does(layout, tmp_path):
    wanted = [(layout, kind, "llama") for kind in cases.SCHEDULES]
    check(ranks.run(cases.LAYOUTS[layout].world_size, cases.matrix, tmp_path, wanted=wanted))


DEGREES = ("tp_degree", "cp_degree", "pp_degree")


@pytest.mark.promise("FT_02")
@pytest.mark.parametrize("flag", [pytest.param(f, marks=[] if f == "pp_degree" else pytest.mark.slow) for f in DEGREES])
def test_degrees_of_the_command_line_give_the_run_of_one_process(base, alone, tmp_path, flag):
    argv = command(base, f"--batch_size 4 --world_size 2 --{flag} 2", output_dir=tmp_path / "out")
    code, out, err = finish(argv)
    assert code == 0 and f"ranks: 2 ({flag} 2)" in out, err
    assert "Warning" not in err
    assert_same_run(tmp_path / "out", alone)


@pytest.mark.slow
def test_the_gpipe_schedule_gives_the_run_of_one_process(base, alone, tmp_path):
    argv = command(base, "--batch_size 4 --world_size 2 --pp_degree 2 --pp_schedule gpipe", output_dir=tmp_path / "out")
    code, _, err = finish(argv)
    assert code == 0, err
    assert_same_run(tmp_path / "out", alone)


@pytest.mark.slow
def test_one_scored_row_on_two_ranks_is_scored_by_one_of_them(base, tmp_path):
    """The rank without a row waits at the next collective of ours: generation may not communicate."""
    scored = jsonl(tmp_path / "scored.jsonl", [{"prompt": "the cat", "completion": "sat"}])
    flags = f"--max_steps 1 --score_dataset {scored} --score_max_new_tokens 4"
    for name, size in (("one", "--world_size 1 --batch_size 4"), ("two", "--world_size 2 --batch_size 2")):
        code, _, err = finish(command(base, f"{flags} {size}", output_dir=tmp_path / name))
        assert code == 0, err
    one, two = ([e["exact_match"] for e in read_events(tmp_path / n) if e["event"] == "eval"] for n in ("one", "two"))
    assert one == two and len(one) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["--batch_size 2", "--batch_size 4 --cp_degree 2"], ids=["FSDP2", "context parallel"]
)
def test_training_goes_on_after_fewer_rows_were_scored_than_there_are_ranks(base, rows_file, tmp_path, layout):
    """The rank that generated would gather ahead in the next backward, alone."""
    (tmp_path / "one.jsonl").write_text(rows_file.read_text().splitlines()[0])
    flags = {**base, "score_dataset": tmp_path / "one.jsonl", "validation_dataset": tmp_path / "one.jsonl"}
    every = "--eval_every 1 --max_steps 2 --rank_timeout 20"
    for name, more in (("alone", "--batch_size 4"), ("ranks", f"--world_size 2 {layout}")):
        code, _, err = finish(command(flags, every, more, output_dir=tmp_path / name))
        assert code == 0, err
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
