"""What is trained where the user left it open: rows per step, passes, rank, rate, early end; and what is said."""

import json

import pytest

from backend_manager import Backend
from finetune.adapters.continued import scaling_of
from finetune.data.lengths import DataSample
from finetune.data.sampler import Mix
from finetune.errors import PlanError
from finetune.plan.facts import Facts
from finetune.plan.resolve import resolve_plan
from finetune.plan.resume import inherited_from_checkpoint, merge_saved
from tests.support.planned import GIB, SMALL
from tests.support.plans import NOW, adjustment, capabilities


def planned(rows, tokens=50, is_all=True, shape=SMALL, env=None, num_devices=1, gib=64, rates=None, **flags):
    sample = DataSample((tokens,) * min(rows, 1000), rows, is_all)
    caps = capabilities(memory_bytes=int(gib * GIB), **(rates or {}))
    facts = Facts(Backend.CPU, caps, shape, sample=lambda data: sample, num_devices=num_devices)
    return resolve_plan({"dataset": "rows.jsonl", "output_dir": "o", **flags}, facts, NOW)


# rows: (rows per step, passes)
AMOUNTS = {
    3: (1, 34),
    8: (1, 13),
    31: (1, 4),
    34: (1, 3),
    100: (2, 2),
    144: (4, 3),
    300: (8, 3),
    900: (8, 1),
    20_000: (16, 1),
}


@pytest.mark.parametrize(("rows", "amount"), AMOUNTS.items())
def test_small_sets_are_read_several_times_in_small_steps(rows, amount):
    settings = planned(rows).settings
    assert (settings.batch_size, settings.num_epochs) == amount


def test_a_step_of_embeddings_has_rows_to_tell_a_positive_from():
    for rows in (2, 40, 66, 300):
        plan = planned(rows, task="embed")
        assert plan.settings.batch_size == min(8, 2 ** (rows.bit_length() - 1))
        assert not any("has 1 row" in line for line in plan.notices)
    assert any("last step of a pass has 1 row" in line for line in planned(5, task="embed", batch_size=2).notices)
    given = planned(5, task="embed", batch_size=2, hard_negatives="true")
    assert not any("has 1 row" in line for line in given.notices)
    with pytest.raises(PlanError, match="a step of 1 row"):
        planned(40, task="embed", batch_size=1)


def test_documents_of_a_row_count_as_the_rows_of_the_run():
    sample = DataSample((50,) * 80, 20, per_row=4.0)
    facts = Facts(Backend.CPU, capabilities(memory_bytes=64 * GIB), SMALL, sample=lambda data: sample, num_devices=1)
    plan = resolve_plan({"dataset": "rows.jsonl", "output_dir": "o"}, facts, NOW)
    same = planned(80)
    assert (plan.settings.batch_size, plan.settings.num_epochs) == (same.settings.batch_size, same.settings.num_epochs)
    assert [line for line in plan.notices if "steps; each of 80 rows" in line] and plan.notices == same.notices


def test_what_was_given_stays_and_the_rest_follows_it():
    asked = planned(144, num_epochs=1).settings
    assert (asked.num_epochs, asked.batch_size) == (1, 1)  # 144 rows are 100 steps in one pass
    asked = planned(12, batch_size=8).settings
    assert (asked.num_epochs, asked.batch_size) == (50, 8)
    short = planned(300, max_steps=5)
    assert (short.settings.max_steps, short.settings.num_epochs) == (5, 1)
    assert short.settings.batch_size == 8 and planned(5, max_steps=5).settings.batch_size == 4
    assert any(line.startswith("5 steps change a model little") for line in short.notices)
    one = planned(300, max_steps=1).notices
    assert any(line.startswith("1 step changes a model little") for line in one)
    assert any(line.startswith("about 1 step; each of") for line in one)
    assert planned(300, lr=1e-4, lora_rank=4).settings.lr == 1e-4


def test_steps_have_as_many_rows_on_any_number_of_ranks():
    for ranks in (1, 2, 4):
        assert planned(300, num_devices=ranks).rows_per_step == 8
    assert planned(300, gradient_accumulation_steps=4).settings.batch_size == 2


def test_rows_of_datasets_with_weights_are_not_read_equally_often():
    weighted = (("a", 1, 3.0), ("b", 5, 1.0))
    sample = DataSample((50,) * 6, 6, weighted=weighted)
    facts = Facts(Backend.CPU, capabilities(memory_bytes=64 * GIB), SMALL, sample=lambda data: sample, num_devices=1)
    plan = resolve_plan({"dataset": "rows.jsonl", "output_dir": "o", "num_epochs": 10, "batch_size": 2}, facts, NOW)
    draws = Mix((1, 5), (3.0, 1.0)).draws()
    assert draws == [5, 1] or draws == [4, 2]
    times = [f"{10 * n / size:.1f}".removesuffix(".0") for n, size in zip(draws, (1, 5), strict=True)]
    said = f"about 30 steps; by their weights, a row of a is read {times[0]} times, a row of b is read {times[1]} times"
    assert said in plan.notices


def test_it_is_said_how_often_rows_are_read_and_what_so_few_can_teach():
    assert "about 114 steps; each of 300 rows is read 3 times" in planned(300).notices
    assert "at least 1,250 steps; each of 20,000 rows is read once" in planned(20_000, is_all=False).notices
    needed = "12 rows: about 100 steps are needed to memorize so few, and this run makes 36. --num_epochs 9 makes them"
    assert needed in planned(12, num_epochs=3).notices
    memorized = "12 rows: the model will memorize so few, and generalize little"
    assert memorized in planned(12).notices and memorized in planned(12, num_epochs=12).notices
    assert any(line.endswith("--max_steps 100 makes them") for line in planned(12, max_steps=36).notices)
    assert "about 2 steps; 1 row is read 2 times" in planned(1, max_steps=2).notices
    pairs = planned(300, preference="dpo").notices
    assert any("each of 300 pairs is read" in line for line in pairs)
    assert not any("memorize" in line or "little" in line for line in planned(300).notices)


@pytest.mark.parametrize(("rows", "fraction", "left"), [(3, 0.1, 2), (2, 0.1, 1), (4, 0.9, 1), (31, 0.01, 30)])
def test_of_few_rows_one_at_least_is_held_out_and_one_left(rows, fraction, left):
    """Rows are counted as the run does: with the one that it does not train on, half of the steps came."""
    said = "; ".join(planned(rows, validation_split=fraction).notices)
    assert ("; 1 row is read" if left == 1 else f"; each of {left} rows is read") in said, said


def test_a_warmup_that_leaves_too_few_steps_is_said():
    longer = planned(300, warmup_steps=400).notices
    assert "all 114 steps warm up, of 400: the rate ends at 28% of --lr" in longer
    both = planned(300, lr_scheduler="wsd", wsd_decay_ratio=0.9, warmup_ratio=0.5).notices
    assert "the decay of wsd takes 103 of 114 steps, and the warmup leaves 57: it takes those" in both
    assert not any("warm" in line for line in planned(300, warmup_steps=100).notices)


def test_a_cpu_is_said_to_be_slow_only_of_long_runs():
    rates = dict(product_rates={"fp32": 5e10, "bf16": 1e11}, memory_rate=1e10, operator_seconds=1e-5)

    def is_said(**flags):
        return any("a CPU is slow" in line for line in planned(300, **flags).notices)

    assert is_said() and is_said(max_steps=3)  # without rates nothing is predicted
    assert not is_said(max_steps=3, rates=rates) and is_said(max_steps=10**9, rates=rates)


def test_a_stream_has_no_number_of_rows():
    settings = planned(2000, is_all=False, streaming=True, max_steps=50, batch_size=8).settings
    assert (settings.num_epochs, settings.early_stopping) == (1, 0)


def test_long_documents_are_the_windows_they_are_split_into():
    assert planned(10, tokens=51_200, overlong="split", context_length=512).settings.batch_size == 8


def test_the_rank_grows_where_tokens_would_fill_it():
    assert planned(300).settings.lora_rank == 16
    large = planned(20_000, tokens=4000)
    assert large.settings.lora_rank == 64 and adjustment(large, "lora_rank").reason.startswith(
        "about 80,000,000 tokens"
    )


def test_validation_ends_a_run_early_and_its_best_weights_are_kept():
    plan = planned(300, validation_split="auto")
    assert plan.settings.validation_split == 0.1 and plan.settings.early_stopping == 2
    assert plan.settings.eval_every == 34 and plan.output.load_best  # 270 rows are 34 steps of 8
    assert planned(100, validation_split="auto").settings.validation_split == 0.0
    given = planned(300, validation_split=0.1, num_epochs=4)
    assert (given.settings.early_stopping, given.settings.eval_every, given.output.load_best) == (0, 0, False)
    assert planned(300, validation_split=0.1, num_epochs=4, eval_every="auto").settings.eval_every == 34
    full = planned(300, validation_split=0.1, train_type="full")
    assert full.settings.early_stopping == 2 and not full.output.load_best


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (dict(early_stopping=2), "--early_stopping 2: needs validation rows."),
        (dict(load_best="true"), "--load_best true: needs validation rows."),
        (dict(load_best="true", validation_split=0.1, save_model=False), "--load_best true: reads best/ again"),
        (dict(load_best="true", validation_split=0.1, train_type="full"), "--load_best true: only adapters"),
    ],
)
def test_what_needs_validation_is_refused_without_it(flags, line):
    with pytest.raises(PlanError) as error:
        planned(300, **flags)
    assert str(error.value).startswith(line)


def test_a_resumed_run_keeps_what_was_settled_and_reads_no_rows():
    def unread(data):
        raise AssertionError("read")

    saved = planned(300, validation_split="auto").to_json()
    inherited = inherited_from_checkpoint(saved, "cpu")
    facts = Facts(Backend.CPU, capabilities(memory_bytes=64 * GIB), SMALL, inherited, sample=unread)
    again = resolve_plan(merge_saved({}, saved), facts, NOW).to_json()["settled"]
    assert again == saved["settled"]


def test_a_run_of_before_adam_beta2_was_a_setting_goes_on_with_torchs():
    saved = planned(300, max_steps=120).to_json()
    del saved["settled"]["adam_beta2"]
    facts = Facts(Backend.CPU, capabilities(memory_bytes=64 * GIB), SMALL, inherited_from_checkpoint(saved, "cpu"))
    assert resolve_plan(merge_saved({}, saved), facts, NOW).steps.adam_beta2 == 0.999


# ---- the rate


def rate(rows=300, **flags):
    return planned(rows, **flags).settings.lr


LONG = dict(adam_beta2=0.999)  # Adam averages over 1,000 steps


def test_the_rate_falls_with_the_width_and_rises_where_adam_averages_over_all_of_a_short_run():
    assert SMALL.hidden_size == 2048
    long = rate(max_steps=1000, **LONG)
    assert long == rate(max_steps=5000) == pytest.approx(5e-4 * (2000 / 2048) ** 0.781, rel=0.05)  # two digits
    assert rate(max_steps=20, **LONG) == rate(max_steps=100, **LONG) == pytest.approx(1.5 * long, rel=0.05)
    assert rate(max_steps=316, **LONG) == pytest.approx(1.5**0.5 * long, rel=0.05)
    assert rate(max_steps=5) == rate(max_steps=20) == rate(max_steps=316) == long
    assert rate(max_steps=20, optimizer="adafactor") == rate(max_steps=20, **LONG)
    assert rate(train_type="full") == pytest.approx(long / 10, rel=0.05)


@pytest.mark.parametrize(("memory", "part"), [({}, 2.0), (LONG, 2**0.5)])
def test_few_rows_a_step_are_noise_and_take_a_lower_rate(memory, part):
    few = [rate(batch_size=n, num_epochs=3, max_steps=200, **memory) for n in (1, 4, 8, 16)]
    assert few[0] == pytest.approx(few[2] / part, rel=0.05) and few[0] < few[1] < few[2] == few[3]


def test_adam_averages_over_a_part_of_a_run_of_adapters():
    def averaged(**flags):
        return round(1 / (1 - planned(300, **flags).steps.adam_beta2))

    assert [averaged(max_steps=n) for n in (5, 120, 600, 12_000, 90_000)] == [10, 10, 50, 1000, 1000]
    reason = adjustment(planned(300, max_steps=600), "adam_beta2").reason
    assert reason == "averages squared gradients over 50 of 600 steps; 0.999 over 1,000"
    changed = {a.setting for a in planned(300, max_steps=3).adjustments}
    assert "adam_beta2" not in changed  # an average over more steps than there are needs no line
    for flags in (LONG, dict(train_type="full"), dict(preference="dpo"), dict(optimizer="sgd")):
        assert averaged(max_steps=120, **flags) == 1000
    assert averaged(max_steps=120, optimizer="adamw_8bit") == 10 and averaged(max_steps=120, optimizer="lion") == 100


def test_the_rate_is_divided_by_what_multiplies_the_change_of_a_weight():
    """With a scale of alpha / rank the rank does not matter; rsLoRA's alpha / sqrt(rank) grows with its root."""
    assert rate(lora_rank=64) == rate() and rate(lora_rank=64, lora_alpha=64) == pytest.approx(rate() / 2, rel=0.05)
    gain = scaling_of(64, 32, True) / scaling_of(64, 32, False)
    assert rate(lora_rank=64, use_rslora=True) == pytest.approx(rate() / gain, rel=0.05)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (dict(init_lora_weights="pissa"), 1 / 10),
        (dict(init_lora_weights="olora"), 1 / 10),
        (dict(init_lora_weights="loftq", train_type="qlora"), 1 / 2),
        (dict(loraplus_lr_ratio=16.0), 1 / 4),
        (dict(optimizer="lion"), 1 / 10),
        *((dict(preference=name), 1 / 20) for name in ("dpo", "kto")),
        *((dict(preference=name), 1 / 10) for name in ("orpo", "simpo")),
    ],
)
def test_starts_optimizers_and_preferences_take_the_part_of_the_rate_that_the_page_says(flags, part):
    same = LONG if {"preference", "optimizer"} & set(flags) else {}
    assert rate(max_steps=200, **flags) == pytest.approx(rate(max_steps=200, **same) * part, rel=0.05)


def test_the_reason_names_what_the_rate_is_of():
    plan = planned(300, lora_alpha=64, use_dora=True)
    assert adjustment(plan, "lr").reason == "DoRA on a model of width 2048, 114 steps of 8 rows, alpha 64"
    assert adjustment(planned(300, train_type="full"), "lr").reason == "full fine-tuning of a model of width 2048"


# ---- lora or qlora


def test_lora_where_the_base_fits_with_room_else_qlora():
    roomy, tight = planned(300, gib=64), planned(300, gib=4)
    assert roomy.settings.train_type == "lora" and tight.settings.train_type == "qlora"
    assert "qlora, " in adjustment(roomy, "train_type").reason
    assert adjustment(tight, "train_type").reason.startswith("lora takes at least")


def test_a_flag_of_a_quantized_base_asks_for_qlora():
    for flag in (dict(n_bits=4), dict(quantization_backend="nf4"), dict(init_lora_weights="loftq")):
        assert planned(300, **flag).settings.train_type == "qlora"
    assert planned(300, quantization_backend="none").settings.train_type == "lora"
    assert planned(300, gib=4, train_type="lora").settings.train_type == "lora"


def test_steps_of_rewards_count_those_that_learn_from_the_same_answers():
    rewarded = {"reward": "exact", "batch_size": 4, "num_epochs": 2}
    assert any(line.startswith("about 12 steps") for line in planned(24, **rewarded).notices)
    several = planned(24, updates_per_rollout=3, eval_every="auto", score_dataset="rows.jsonl", **rewarded)
    assert any(line.startswith("about 36 steps; each of 24 prompts is read 2 times") for line in several.notices)
    assert several.output.eval_every == 18


def test_prompts_are_not_counted_as_windows_of_long_expected_answers():
    notices = planned(24, tokens=6000, context_length=64, reward="exact", batch_size=4, num_epochs=2).notices
    assert any(line.startswith("about 12 steps; each of 24 prompts is read 2 times") for line in notices)


@pytest.mark.parametrize(
    ("row", "flags", "steps"),
    [
        ({"prompt": "How many? ", "completion": "9" * 600}, {}, 2),
        ({"prompt": "How many? ", "chosen": "9" * 600, "rejected": "8" * 600}, {"preference": "orpo"}, 2),
        ({"text": "9" * 600}, {}, 20),
    ],
)
def test_rows_over_the_context_are_counted_as_they_are_read(row, flags, steps, plain_run, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    result = plain_run(dataset=str(file), num_epochs=1, **flags)
    assert result.step == steps
    assert f"about {steps} steps; each of" in capsys.readouterr().out
