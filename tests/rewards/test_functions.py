"""Reward functions of a user: what they are called with, and a line for whatever else they do."""

import json
import math
import os
import random
import signal
import subprocess

import numpy as np
import pytest
import torch

from finetune.data.prepare import load_data, read_datasets
from finetune.errors import PlanError
from finetune.from_python import overrides_of
from finetune.model_files.files import find_model
from finetune.model_files.tokenizer import load_tokenizer
from finetune.parts.reward import RewardPlan, RewardSource, parse_rewards
from finetune.rewards import functions
from finetune.rewards.functions import Asked, Rewards, given_functions, load_function
from tests.support.commands import PYTHON, ROOT, command, finish, refused
from tests.support.plans import plan_of
from tests.support.runs import read_events
from train import fine_tune

HEAD = dict(reward_loss="grpo", num_generations=2, max_completion_length=8, temperature=1.0, top_p=1.0)
HEAD |= dict(scale_rewards="group", kl_beta=0.0, updates_per_rollout=1, mask_truncated=True, refill=False)
ASKED = [Asked("2+2=", "4", "4", {"id": 1}, "rows:1"), Asked("3+3=", "", "6", {"id": 2}, "rows:2")]


def rewards(text: str, tmp_path, word="f", timeout=5.0) -> Rewards:
    file = tmp_path / "mine.py"
    file.write_text(text)
    return Rewards(RewardPlan(reward=f"{file}:{word}", reward_timeout=timeout, score_pattern=None, **HEAD))


def test_a_function_gets_prompts_answers_and_rows(tmp_path):
    text = "def f(prompts, answers, rows):\n    return [len(p) + len(a) + r['id'] "
    found = rewards(text + "for p, a, r in zip(prompts, answers, rows)]", tmp_path)
    assert found.of(ASKED).tolist() == [[6.0, 6.0]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1 / 0", "raised ZeroDivisionError: division by zero on the answer to rows:1"),
        ("return [1 / len(a) for a in answers]", "raised ZeroDivisionError: division by zero on the answer to rows:2"),
        ("return None", "returned None. Return a list"),
        ("return [1.0]", "returned 1 values for 2 answers"),
        ("return [1.0] * 3", "returned more than 2 values for 2 answers"),
        ("return [1.0, None]", "gave None for the answer to rows:2"),
        ("return [float('nan'), 1.0]", "gave nan for the answer to rows:1"),
        ("return [1.0, float('inf')]", "gave inf for the answer to rows:2"),
        ("return ['1', 2]", "gave '1' for the answer to rows:1"),
        ("return [1j, 2]", "gave 1j for the answer to rows:1"),
        ("yield 1 / 0", "raised ZeroDivisionError: division by zero on the answer to rows:1"),
        ("import time; yield time.sleep(60)", "did not return within 0.5 s"),
        ("return [10**400, 1]", "for the answer to rows:1"),
        ("return [1e308, 1]", "gave 1e+308 for the answer to rows:1"),
        ("return {'a': 1, 'b': 2}", "returned {'a': 1, 'b': 2}. Return a list"),
        ("raise SystemExit(3)", "raised SystemExit: 3 on the answer to rows:1"),
        ("raise KeyError('x')", "raised KeyError: 'x' on the answer to rows:1"),
        ("import time; time.sleep(60)", "did not return within 0.5 s"),
        ("any(map(bool, (0 for _ in range(10**8))))", "did not return within 0.5 s"),
        ("return iter(lambda: 1, 2)", "returned more than 2 values"),
    ],
)
def test_whatever_a_function_does_wrong_is_a_line(body, said, tmp_path):
    found = rewards(f"def f(prompts, answers, rows):\n    {body}", tmp_path, timeout=0.5)
    with pytest.raises(PlanError) as raised:
        found.of(ASKED)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).startswith("--reward f: ")


@pytest.mark.parametrize("body", ["return [True, False]", "import numpy; return numpy.array([1, 0])", "return (1, 0)"])
def test_numbers_of_other_kinds_are_numbers(body, tmp_path):
    assert rewards(f"def f(prompts, answers, rows):\n    {body}", tmp_path).of(ASKED).tolist() == [[1.0, 0.0]]


def test_a_function_may_change_its_rows(tmp_path):
    found = rewards(
        "def f(prompts, answers, rows):\n    rows[0].clear(); answers.clear()\n    return [1.0, 2.0]", tmp_path
    )
    found.of(ASKED)
    assert ASKED[0].row == {"id": 1}


@pytest.mark.parametrize(
    ("word", "text", "said"),
    [
        ("g", "def f(): pass", "has no function of this name. It has f."),
        ("f", "1 +", "importing the file raised SyntaxError"),
        ("f", "import nothing_like_it", "raised ModuleNotFoundError"),
        ("f", "raise SystemExit", "importing the file raised SystemExit"),
        ("f", "f = 3", "has no function of this name. It has none."),
    ],
)
def test_a_file_without_the_function_is_a_line(word, text, said, tmp_path):
    with pytest.raises(PlanError, match="--reward .*mine.py"):
        rewards(text, tmp_path, word)
    with pytest.raises(PlanError) as raised:
        rewards(text, tmp_path, word)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("exakt", "is no reward. Use exact, contains, numeric, json, regex, choice, FILE.py:FUNCTION, or the"),
        ("perplexity", "is no reward"),
        ("mine.py", "names no function of the file"),
        ("mine.txt:f", "is neither"),
        ("exact,exact:2", "is given twice"),
        ("exact:0", "all weights are 0"),
        ("exact:nan", "is no weight"),
        ("exact:1e300", "is no weight"),
        (" , ", "is empty"),
    ],
)
def test_words_that_name_no_reward_are_refused(word, said):
    with pytest.raises(PlanError, match=said):
        parse_rewards(word)


def test_a_metric_needs_the_rows_answer(tmp_path):
    found = Rewards(RewardPlan(reward="numeric", reward_timeout=5.0, score_pattern=None, **HEAD))
    assert found.of(ASKED).tolist() == [[1.0, 0.0]]
    with pytest.raises(PlanError, match="rows:3 has no answer"):
        found.of([Asked("1", "2", None, {}, "rows:3")])


@pytest.mark.parametrize(
    ("metric", "pattern", "expected"),
    [
        ("numeric", None, "none at all"),
        ("json", None, "not JSON"),
        ("json", None, "[" * 10**5),
        ("regex", "[0-9]", "a"),
    ],
)
def test_an_expected_answer_that_is_never_right_is_a_line(metric, pattern, expected):
    found = Rewards(RewardPlan(reward=metric, reward_timeout=5.0, score_pattern=pattern, **HEAD))
    found.check_expected("17", "rows:1")
    with pytest.raises(PlanError, match=f"--reward {metric}: rows:2 expects .*, which {metric} never holds right"):
        found.check_expected(expected, "rows:2")


def test_a_row_that_can_never_be_right_is_refused_before_the_first_step(base, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1 + 1 = ", "completion": "2"}\n{"prompt": "1 + 2 = ", "completion": "three"}\n')
    code, _, err = finish(command(base | {"dataset": file}, "--reward numeric", output_dir=tmp_path / "out"))
    assert code == 2 and f"--reward numeric: {file}:2 expects 'three'" in err


def test_a_pattern_of_the_reward_alone_is_taken(base, tmp_path):
    words = "--reward regex --score_metric exact --dry_run true"
    code, _, err = finish(command(base, words, "--score_pattern", "[0-9]+", output_dir=tmp_path / "out"))
    assert code == 0, err


def test_rows_without_answers_are_refused_before_the_first_step(base, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1 + 1 = ", "completion": "2"}\n{"prompt": "1 + 2 = "}\n')
    own = base | {"dataset": file}
    code, _, err = finish(command(own, "--reward exact", output_dir=tmp_path / "out"))
    assert code == 2
    assert err.strip() == f"error: --reward exact: {file}:2 has no answer to compare with. Add it, or use a function."


def test_an_answer_longer_than_the_context_is_compared_whole(tiny_model, tmp_path):
    file = tmp_path / "rows.jsonl"
    long = " ".join(map(str, range(200)))
    rows = [{"prompt": "Count. ", "completion": long}, {"prompt": f"{long} ", "completion": "1"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = dict(model_name=str(tiny_model), dataset=str(file), reward="exact", context_length=64, backend="cpu")
    tokenizer = load_tokenizer(tiny_model)
    with pytest.raises(PlanError, match="rows.jsonl:2: its prompt takes .* of --context_length 64"):
        read_prompts(tokenizer, **own)
    data = read_prompts(tokenizer, **own, overlong="drop")
    assert data.train.num_rows == 1 and data.train.counts["dropped_long"] == 1
    assert data.prompt(0).expected.split() == long.split()


def test_prompts_that_are_all_too_long_to_be_answered_are_a_line(base, tmp_path):
    file = tmp_path / "rows.jsonl"
    long = " ".join(map(str, range(200)))
    file.write_text("".join(json.dumps({"prompt": f"{i} {long} ", "completion": "1"}) + "\n" for i in range(3)))
    words = "--reward exact --overlong drop --context_length 64 --num_generations 2"
    code, _, err = finish(command(base | {"dataset": file}, words, output_dir=tmp_path / "out"))
    assert code == 2 and err.count("\n") == 1
    assert err.startswith(
        "error: --overlong drop: all 3 prompts leave fewer than 8 of --context_length 64 tokens for an"
    )


def read_prompts(tokenizer, **flags):
    plan = plan_of(**flags)
    return load_data(plan.data, read_datasets(plan.data), tokenizer, find_model(flags["model_name"]))


@pytest.mark.slow
def test_held_out_rows_may_have_the_columns_of_training_rows(base, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i} + 1 = ", "solution": str(i + 1)}) + "\n" for i in range(8)))
    words = "--reward exact --num_generations 2 --max_completion_length 4 --max_steps 1 --batch_size 2"
    own = base | {"dataset": file, "score_dataset": file}
    code, _, err = finish(command(own, words, output_dir=tmp_path / "out"))
    assert code == 0, err
    assert read_events(tmp_path / "out", "eval")[-1]["num_scored"] == 8
    lacking = tmp_path / "lacking.jsonl"
    lacking.write_text('{"prompt": "1 + 1 = "}\n')
    code, _, err = finish(command(own | {"score_dataset": lacking}, words, output_dir=tmp_path / "other"))
    assert code == 2 and "--score_dataset" in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(reward="exact", preference="dpo"), "--preference dpo from those in the rows"),
        (dict(kl_beta=0.1), "--kl_beta 0.1: is for --reward"),
        (dict(reward="exact", validation_split=0.1), "there is no loss on held-out rows"),
        (dict(reward="exact", reward_loss="rloo", kl_beta=0.1), "rloo has no divergence"),
        (dict(reward="exact", train_type="full", kl_beta=0.1), "all weights change"),
        (dict(reward="exact", streaming=True, max_steps=3), "with --reward, steps are planned over all rows"),
        (dict(reward="exact", lr="search"), "trials of a few steps"),
        (dict(reward="exact", train_on_prompt=True), "with --reward, what is learned are answers"),
        (dict(reward="regex"), "--reward regex: needs --score_pattern"),
        (dict(reward="exact", num_generations=1), "must be"),
    ],
)
def test_settings_that_rewards_exclude_are_refused(flags, changes, said):
    assert said in refused(flags, **changes)


def test_functions_of_a_python_program_reward(tiny_model, rows_file, tmp_path):
    seen = []

    def shorter(prompts, answers, rows):
        seen.extend(rows)
        return [-len(answer) for answer in answers]

    own = dict(model_name=str(tiny_model), dataset=str(rows_file), backend="cpu", train_type="lora", log_to="none")
    own |= dict(precision="fp32", max_steps=2, batch_size=2, num_generations=2, max_completion_length=6)
    state = fine_tune(
        **own, reward=[shorter, lambda prompts, answers, rows: [1.0] * len(rows)], output_dir=str(tmp_path / "out")
    )
    assert state.status == "finished"
    assert seen and set(seen[0]) == {"prompt", "completion"}
    event = read_events(tmp_path / "out", "step")[-1]
    assert event["rewards/reward"] == 1.0
    assert math.isclose(event["reward"], event["rewards/shorter"] + 1.0)


def test_the_row_that_fails_is_found_by_halving(tmp_path):
    log = tmp_path / "calls"
    text = f"def f(p, a, rows):\n    open({str(log)!r}, 'a').write('.')\n    return [1 / (r['id'] - 41) for r in rows]"
    many = [Asked("", "", None, {"id": i}, f"rows:{i}") for i in range(64)]
    with pytest.raises(PlanError, match="on the answer to rows:41"):
        rewards(text, tmp_path).of(many)
    assert len(log.read_text()) <= 1 + 2 * 6


def test_looking_for_the_row_that_fails_ends_with_the_time(tmp_path):
    log = tmp_path / "calls"
    text = f"import time\ndef f(p, a, rows):\n    open({str(log)!r}, 'a').write('.')\n    time.sleep(0.3); 1 / 0"
    many = [Asked("", "", None, {"id": i}, f"rows:{i}") for i in range(64)]
    with pytest.raises(PlanError, match="raised ZeroDivisionError: division by zero. Correct it."):
        rewards(text, tmp_path, timeout=0.5).of(many)
    assert len(log.read_text()) == 3


def test_what_never_says_what_it_is_keeps_no_process_alive(tmp_path):
    text = "import time\nclass Mute:\n    def __repr__(self): time.sleep(600)\ndef f(p, a, r): return Mute()"
    (tmp_path / "mine.py").write_text(text)
    program = (
        "import sys; from finetune.rewards.functions import Asked, Rewards\n"
        "from finetune.parts.reward import RewardPlan\n"
        f"how = RewardPlan(reward={str(tmp_path)!r} + '/mine.py:f', reward_timeout=5.0, score_pattern=None, **{HEAD})\n"
        "Rewards(how).of([Asked('', '', None, {}, 'rows:1')])"
    )
    done = subprocess.run([*PYTHON, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert "--reward f: returned a Mute. Return a list" in done.stderr


def test_functions_of_one_name_are_named_by_their_files(tmp_path):
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def f(p, a, r):\n    return [{value}.0 for _ in a]")
    word = f"{tmp_path}/one/mine.py:f,{tmp_path}/two/mine.py:f:0.5,exact"
    found = Rewards(RewardPlan(reward=word, reward_timeout=5.0, score_pattern=None, **HEAD))
    assert found.names == ["mine.f", "mine.f_2", "exact"]
    assert found.of(ASKED).tolist() == [[1.0, 1.0], [2.0, 2.0], [1.0, 0.0]]


def test_labels_are_those_of_the_documentation():
    def f(prompts, answers, rows):
        return answers

    def labels(*given) -> list[str]:
        return [source.label for source in parse_rewards(given_functions(given))]

    assert labels(f, "mine.py:f") == ["<python>.f", "mine.f"]
    assert labels("a/mine.py:f", "b/mine.py:f") == ["mine.f", "mine.f_2"]
    assert labels(lambda p, a, r: a, lambda p, a, r: p) == ["reward", "reward_2"]
    text = (ROOT / "docs" / "rewards.md").read_text()
    assert all(f"`{name}`" in text for name in ("<python>.f", "mine.f", "mine.f_2", "reward"))


def test_two_functions_of_one_name_have_two_words():
    one, two = (lambda p, a, r: a), (lambda p, a, r: p)
    words = given_functions([one, "exact:0.5", two])
    assert len(set(words)) == 3 and words[1] == "exact:0.5"
    assert given_functions([two]) == words[:1]  # defined again, as in a notebook, it has the name that the plan has


def test_a_call_has_the_functions_that_it_gives_and_no_other_call_s():
    def shorter(prompts, answers, rows):
        return answers

    source = RewardSource("shorter", file="<python>.py")
    overrides_of({"reward": shorter}, print)
    assert load_function(source, 1.0) is shorter
    overrides_of({"resume": "auto"}, print)  # of a run that another call's function of this name may have begun
    with pytest.raises(PlanError, match="--reward shorter: is a function of a Python program, .* reward="):
        load_function(source, 1.0)


def test_a_function_that_fails_later_loses_nothing(base, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "calls = []\ndef f(prompts, answers, rows):\n    calls.append(1)\n"
        "    return [1.0 / (len(calls) < 4) for _ in answers]\n"
    )
    words = f"--reward {file}:f --num_generations 2 --max_completion_length 4 --batch_size 2 --num_epochs 1"
    own = {key: value for key, value in base.items() if key != "num_epochs"}
    code, _, err = finish(command(own, words, output_dir=tmp_path / "out"))
    assert code == 2
    assert "raised ZeroDivisionError" in err and "Traceback" not in err
    assert (tmp_path / "out" / "checkpoints" / "step-3").is_dir()


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        ("def f(p, answers, r):\n    sys.stdout.close()\n    return [1.0] * len(answers)", "closed sys.stdout"),
        ("sys.stderr.close()\ndef f(p, answers, r):\n    return [1.0] * len(answers)", "closed sys.stderr"),
        (
            "def f(p, answers, r):\n    sys.stdout.close(); sys.stderr.close(); 1 / 0",
            "closed sys.stdout and sys.stderr",
        ),
    ],
)
def test_a_function_that_closes_the_output_is_a_line(base, tmp_path, body, fact):
    file = tmp_path / "mine.py"
    file.write_text(f"import sys\n{body}\n")
    words = f"--reward {file}:f --num_generations 2 --max_completion_length 4 --batch_size 2 --max_steps 2"
    code, _, err = finish(command(base, words, output_dir=tmp_path / "out"))
    assert code == 2 and err.count("\n") == 1, err
    assert err.startswith("error: --reward ") and f": {fact}, which the run prints to. Leave it open." in err


def test_sampled_text_is_what_a_function_sees(base, reward_prompts, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import json\ndef f(prompts, answers, rows):\n"
        f"    open({str(tmp_path / 'seen')!r}, 'a').write(json.dumps([prompts, answers, rows]))\n"
        "    return [0.0] * len(rows)\n"
    )
    words = f"--reward {file}:f --num_generations 2 --max_completion_length 4 --batch_size 2 --max_steps 1"
    code, _, err = finish(command(base | {"dataset": reward_prompts}, words, output_dir=tmp_path / "out"))
    assert code == 0, err
    prompts, answers, rows = json.loads((tmp_path / "seen").read_text())
    assert [row["id"] for row in rows] == list(np.repeat([row["id"] for row in rows[::2]], 2))
    assert prompts == [f"What is {row['id']} plus {row['id']}? " for row in rows]
    assert len(answers) == 4


def drawing(prompts, answers, rows):
    torch.manual_seed(0)
    np.random.seed(0)
    torch.rand(3)
    return [float(len(answer)) for answer in answers]


def by_length(prompts, answers, rows):
    return [float(len(answer)) for answer in answers]


def test_a_function_that_draws_or_seeds_changes_no_number_of_the_run(plain_run, tmp_path):
    short = dict(num_generations=2, max_completion_length=6, mask_truncated=False, lora_dropout=0.3, max_steps=3)
    found = []
    for function in (by_length, drawing):
        plain_run(reward=function, output_dir=str(tmp_path / function.__name__), lr=1e-2, **short)
        events = read_events(tmp_path / function.__name__, "step")
        found.append([(event["loss"], event["grad_norm"], event["reward"]) for event in events])
    assert found[0] == found[1]


def test_what_a_function_draws_follows_from_the_seed_and_the_step(plain_run, tmp_path):
    drawn = []

    def noise(prompts, answers, rows):
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return [0.0 for _ in answers]

    for name in ("one", "other"):
        random.seed(len(drawn))
        plain_run(
            reward=noise, output_dir=str(tmp_path / name), max_completion_length=4, num_generations=2, max_steps=2
        )
    assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1]


def test_a_function_that_holds_python_s_lock_is_ended_from_outside(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import re\n\n\ndef f(prompts, answers, rows):\n    re.match('(a|aa)+$', 'a' * 60 + 'b')\n"
    )
    plan = RewardPlan(reward=f"{tmp_path / 'mine.py'}:f", reward_timeout=0.2, score_pattern=None, **HEAD)
    child = os.fork()
    if child == 0:
        functions.LOCKED_S = 1.0
        Rewards(plan).of(ASKED)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        ([{"prompt": "1 + 1 = "}], "--reward exact", ":1 has no answer to compare with"),
        ([{"prompt": "1 + 1 = ", "completion": "two"}], "--reward numeric", ":1 expects 'two', which numeric never"),
        ([{"prompt": "1 + 1 = " * 40, "completion": "2"}], "--reward exact", "which leaves no room for an answer"),
        ([{"text": "1 + 1 = 2"}], "--reward FILE:f", ":1: has no prompt of two tokens or more"),
        ([{"prompt": "1 + 1 = ", "completion": "2"}] * 2, "--reward choice", "the rows have 1 distinct answers"),
        ([{"prompt": "1 + 1 = ", "completion": "2"}], "--reward FILE.none.py:f", "there is no such file"),
        (
            [{"prompt": "1 + 1 = ", "completion": "2"}],
            "--validation_split 0.5",
            "needs at least 2 rows, the data has 1",
        ),
    ],
)
def test_a_dry_run_refuses_what_the_run_would_and_runs_no_code(rows, words, said, base, tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit(3)")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = words.replace("FILE", str(tmp_path / "mine.py"))
    code, _, err = finish(command(base | {"dataset": data}, words, "--dry_run true", output_dir=tmp_path / "out"))
    assert code == 2 and said in err


@pytest.mark.parametrize("dry_run", ["true", "false"])
def test_expected_answers_that_are_never_sampled_whole_are_said(dry_run, base, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": "1 + 1 = ", "completion": "2" * n}) + "\n" for n in (1, 30)))
    words = f"--reward exact --max_completion_length 8 --num_generations 2 --max_steps 1 --dry_run {dry_run}"
    code, out, err = finish(command(base | {"dataset": data}, words, output_dir=tmp_path / "out"))
    assert code == 0, err
    assert "1 of 2 expected answers have more tokens than --max_completion_length 8" in out


def test_a_dry_run_with_a_function_reads_the_rows_alone(base, tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit(3)")
    words = f"--reward {tmp_path / 'mine.py'}:f --dry_run true"
    code, out, err = finish(command(base, words, output_dir=tmp_path / "out"))
    assert code == 0 and "data, train:" in out, err
