"""Lines of a run of rewards on itself: notes while it goes on, findings at its end, curves of its page."""

from finetune.run.diagnostics import RewardWatch, data_findings, findings
from finetune.run.page import charts_of, read_run
from tests.support.commands import command, finish
from tests.support.runs import read_events


def steps(rewards, lengths=None, alike=0.5):
    lengths = lengths or [10.0] * len(rewards)
    return [
        {
            "event": "step",
            "step": i,
            "loss": 0.0,
            "reward": reward,
            "frac_reward_zero_std": alike,
            "completions/mean_length": length,
        }
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True), 1)
    ]


def kinds(events):
    return [finding.kind for finding in findings(events, [], {"reward": "exact"})]


RISING = [0.1 + 0.03 * i for i in range(20)]


def scored(before, after):
    return [{"event": "eval", "step": 0, "exact_match": before}, {"event": "eval", "step": 20, "exact_match": after}]


def test_a_run_whose_reward_and_score_rise_has_no_finding():
    assert kinds([*steps(RISING), *scored(0.2, 0.5)]) == []


def test_a_reward_that_does_not_rise_is_said():
    assert kinds(steps(RISING[::-1])) == ["reward did not rise"]


def test_a_reward_that_rises_without_the_score_is_said():
    assert kinds([*steps(RISING), *scored(0.5, 0.5)]) == ["reward rose and the score did not"]


def test_answers_that_grow_without_reward_are_said():
    flat = [0.3 + 0.0005 * i for i in range(20)]
    assert kinds(steps(flat, [10 + i for i in range(20)])) == ["answers grew"]


def test_answers_that_are_all_cut_are_said():
    cut = [event | {"completions/clipped_ratio": 1.0} for event in steps(RISING)]
    assert kinds(cut) == ["answers were cut"]
    assert "taught nothing" in findings(cut, [], {"reward": "exact", "mask_truncated": True})[-1].text
    assert kinds([event | {"completions/clipped_ratio": 0.5} for event in cut]) == []


def test_means_count_a_rollout_once_however_many_steps_learned_from_it():
    rewards = [0.6] * 2 + [0.2] * 8 + [0.3] * 10
    log = [event | {"num_answers": 4} for event in steps(rewards)]
    again = [event | {"num_answers": 0} for event in log[:2]] * 3  # these were learned from four times
    (found,) = findings([*log[:2], *again, *log[2:]], [], {"reward": "exact"})
    (once,) = findings(log, [], {"reward": "exact"})
    assert found == once
    assert "0.36 in the first" in once.text


def test_prompts_without_answers_are_not_called_alike():
    same = {"rows": 20, "distinct_rows": 20, "distinct_answers": 1, "answers_of_one_token": True}
    assert [finding.kind for finding in data_findings({"alike": same})] == ["answers alike"]
    assert data_findings({"alike": same, "only_asks": True}) == []


def test_answers_that_only_functions_see_are_not_called_alike(plain_run, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "What is {i}? ", "completion": "yes"}}\n' for i in range(12)))
    short = dict(dataset=str(file), num_generations=2, max_completion_length=4, max_steps=1)
    plain_run(reward=lambda prompts, answers, rows: [len(answer) for answer in answers], **short)
    assert "the same answer" not in capsys.readouterr().out


def test_nothing_right_is_said_once_after_64_answers():
    watch = RewardWatch()
    none = {"reward": 0.0, "reward_std": 0.0, "num_answers": 32}
    assert watch.line(none) is None
    assert "no answer of the first 64 was right" in watch.line(none)
    assert watch.line(none) is None


def test_something_right_is_not():
    watch = RewardWatch()
    assert watch.line({"reward": 0.1, "reward_std": 0.3, "num_answers": 32}) is None
    assert watch.line({"reward": 0.0, "reward_std": 0.0, "num_answers": 64}) is None


def test_a_run_prints_its_reward_and_draws_it(base, reward_prompts, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(prompts, answers, rows):\n    return [len(a) for a in answers]\n")
    words = f"--reward {file}:f --num_generations 2 --max_completion_length 4 --batch_size 4 --max_steps 3"
    out = tmp_path / "out"
    code, said, err = finish(command(base | {"dataset": reward_prompts}, words, output_dir=out))
    assert code == 0, err
    line = next(line for line in said.splitlines() if line.startswith("step     1/3"))
    assert "| reward " in line and "| best " in line and "loss" not in line
    event = read_events(out, "step")[0]
    assert [answer["reward"] for answer in event["answers"]] == sorted(a["reward"] for a in event["answers"])
    assert event["sampler_difference"] < 1e-4
    assert "(no answer given)" in said and "same answer" not in said and "\u2603" not in said
    assert "answers reached --max_completion_length 4" in said
    titles = [chart.title for chart in charts_of(read_run(out))]
    assert {"Reward", "Entropy"} <= set(titles)
