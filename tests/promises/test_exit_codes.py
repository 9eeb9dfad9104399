"""The command line as a user meets it: bad input, exit codes, kills, signals; the real program in its own process."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import export
import generate
import score
import train
from finetune.checkpoint.store import Lock, newest_checkpoint, steps_of
from finetune.config import FIELDS
from finetune.errors import PlanError
from finetune.metrics import read_events
from tests.support import hub as hub_server

ROOT = Path(__file__).parents[2]


def command(*argv, script="train.py"):
    return [sys.executable, "-W", "ignore", str(ROOT / script), *map(str, argv)]


def finish(*argv, script="train.py", cwd=None, **environment):
    return subprocess.run(
        command(*argv, script=script),
        capture_output=True,
        text=True,
        cwd=cwd or ROOT,
        env={**os.environ, **environment},
    )


@pytest.fixture
def base(tiny_model, rows_file, tmp_path):
    """Flags of a tiny run."""
    return [
        "--model_name",
        tiny_model,
        "--dataset",
        rows_file,
        "--output_dir",
        tmp_path / "out",
        "--backend",
        "cpu",
        "--train_type",
        "lora",
        "--lora_rank",
        4,
        "--batch_size",
        4,
        "--context_length",
        64,
        "--precision",
        "fp32",
    ]


# ---- bad input: one line, exit code 2, before the model loads, nothing lost


def jsonl(*rows):
    return "".join(json.dumps(r) + "\n" for r in rows).encode()


ROW = {"prompt": "a", "completion": "b"}
FULL = jsonl(*[ROW] * 8)
BAD_DATA = {
    "empty": (b"", "has no rows"),
    "newlines": (b"\n\n\n", "has no rows"),
    "broken row": (FULL + b'{"prompt": "a", \n', "bad.jsonl:9: "),
    "list": (FULL + b"[1]\n", "bad.jsonl:9: "),
    "missing field": (FULL + jsonl({"prompt": "a"}), "bad.jsonl:9: field 'completion' is missing"),
    "wrong type": (FULL + jsonl({"prompt": "a", "completion": 5}), "bad.jsonl:9: field 'completion' is int"),
    "null": (FULL + jsonl({"prompt": None, "completion": "b"}), "bad.jsonl:9: field 'prompt' is"),
    "duplicate key": (FULL + b'{"prompt": "a", "prompt": "b", "completion": "c"}\n', "bad.jsonl:9: "),
    "NUL": (FULL + b'{"prompt": "a\x00", "completion": "c"}\n', "bad.jsonl:9"),
    "long line": (FULL + b'{"prompt": "' + b"a" * (17 * 2**20) + b'"}\n', "bad.jsonl:9: "),
    "not UTF-8": (FULL + '{"prompt": "ä", "completion": "c"}\n'.encode("latin-1"), "bad.jsonl:9:"),
    "no target": (jsonl(*[{"prompt": "a", "completion": ""}] * 8), "none of its 8 rows has an answer"),
    "too few rows": (jsonl(ROW, ROW), "2 rows are fewer than the 4 of one step"),
    "no format": (jsonl(*[{"foo": "a"}] * 8), "columns foo match no format"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_rows_are_one_line_and_the_run_that_was_there_is_not_lost(base, tmp_path, case, capsys):
    content, message = BAD_DATA[case]
    (tmp_path / "bad.jsonl").write_bytes(content)
    kept = tmp_path / "out" / "run_plan.json"
    kept.parent.mkdir()
    kept.write_text("{}")
    with pytest.raises(PlanError) as error:
        train.main(_with(base, dataset=tmp_path / "bad.jsonl", overwrite="true"))
    assert message in str(error.value) and "\n" not in str(error.value) and error.value.exit_code == 2
    assert "trainable parameters" not in capsys.readouterr().out
    assert kept.read_text() == "{}"


def _with(base, **changes):
    """The flags with some values replaced or added."""
    flags = dict(zip(base[::2], base[1::2], strict=True)) | {f"--{k}": v for k, v in changes.items()}
    return [str(part) for pair in flags.items() for part in pair]


def test_bad_input_leaves_no_output_folder_behind(base, tmp_path):
    (tmp_path / "bad.jsonl").write_text("")
    with pytest.raises(PlanError):
        train.main(_with(base, dataset=tmp_path / "bad.jsonl"))
    assert not (tmp_path / "out").exists()


BAD_FLAGS = {
    "missing model": ({"model_name": "no/such/model"}, "--model_name no/such/model: "),
    "missing data": ({"dataset": "nowhere.jsonl"}, "--dataset nowhere.jsonl: "),
    "folder without data": ({"dataset": str(ROOT / "docs")}, "--dataset "),
    "context": ({"context_length": 100_000}, "--context_length 100000: is over this model's limit of 256"),
    "backend": ({"backend": "cuda"}, "--backend cuda: Backend 'cuda' is not available"),
    "pair": (
        {"train_type": "qlora", "quantization_backend": "quanto", "n_bits": "3"},
        "--n_bits 3: quanto has 2/4/8 bits",
    ),
    "bits": ({"train_type": "qlora", "n_bits": 7}, "--n_bits 7: nf4 has 4 bits"),
    "groups": (
        {"train_type": "qlora", "n_bits": 3},
        "--group_size 64: does not divide the 96 columns of model.layers.0.mlp.down_proj",
    ),
    "targets": ({"lora_target_modules": "nope"}, "--lora_target_modules nope: no adaptable layer of this model"),
    "config": ({"config": "nowhere.yaml"}, "--config nowhere.yaml: no such file"),
    "resume": ({"resume": "nowhere"}, "--resume nowhere: no such folder"),
    "validation": ({"validation_dataset": "nowhere.jsonl"}, "--validation_dataset nowhere.jsonl: "),
    "wandb": ({"log_to": "wandb"}, "--log_to wandb: wandb is not installed"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags_are_one_line_that_names_the_flag(base, case, monkeypatch):
    changes, message = BAD_FLAGS[case]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PlanError) as error:
        train.main(_with(base, **changes))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_token_ids_beyond_the_embedding_name_the_row(base, make_tokenizer, tmp_path):
    from tests.support import tiny

    folder = tmp_path / "model"
    make_tokenizer(folder, bos=False)
    tiny.build("llama", vocab_size=128).save_pretrained(folder)
    with pytest.raises(
        PlanError, match=r"rows.jsonl:1: token id \d+ is out of range for the model's 128 embedding rows"
    ):
        train.main(_with(base, model_name=folder))


@pytest.mark.parametrize(
    ("script", "argv", "message"),
    [
        (generate, ["--checkpoint", "nowhere", "--prompt", "x"], "--checkpoint nowhere"),
        (generate, ["--checkpoint", "x"], "--prompt: none given"),
        (generate, ["--checkpoint", "x", "--prompt", "a", "--top-p", "7"], "--top_p 7.0: must be 0 to 1"),
        (
            score,
            ["--checkpoint", "nowhere", "--dataset", str(ROOT / "examples" / "orders_test.jsonl")],
            "--checkpoint nowhere",
        ),
        (export, ["--checkpoint", "nowhere", "--output_dir", "x"], "--checkpoint nowhere: has no adapter_config.json"),
    ],
)
def test_the_small_scripts_say_what_is_missing(script, argv, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PlanError) as error:
        script.main(argv)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_bad_command_leaves_one_line_on_stderr_and_code_2():
    out = finish("--lora_rnk", "4")
    assert out.returncode == 2 and out.stdout == ""
    assert out.stderr == "error: --lora_rnk: unknown flag. Nearest: --lora_rank. See --help.\n"
    for script in ("generate.py", "score.py", "export.py"):
        out = finish("--nope", script=script)
        assert out.returncode == 2 and len(out.stderr.splitlines()) == 1


# ---- dry run, help, environment


def test_a_dry_run_prints_the_plan_without_importing_a_framework(base):
    argv = [*_with(base, precision="auto"), "--dry_run"]
    code = (
        f"import sys; sys.argv = {['train.py', *argv]!r}; import runpy\n"
        "code = runpy.run_path('train.py', run_name='train')['main']()\n"
        "assert not {'torch', 'mlx', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "rows per step: 4" in out.stdout and "precision: auto ->" in out.stdout


def test_help_shows_every_flag_with_its_default():
    text = finish("--help").stdout
    for name, field in FIELDS.items():
        assert f"--{name}" in text
        if field.default not in (None, False, True):
            assert (
                f"(default: {field.default})" in text.replace("\n", " ").replace("  ", " ")
                or str(field.default) in text
            )


def test_threads_of_the_environment_are_respected(base, tmp_path):
    code = "import train, torch; from finetune.torch_engine.engine import settle_threads; settle_threads(); print(torch.get_num_threads())"
    for number in ("1", "2"):
        env = {**os.environ, "OMP_NUM_THREADS": number}
        assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env, text=True).strip() == number


# ---- a hub, another process, kills and signals


def test_a_hub_model_and_dataset_train_as_the_local_ones_do(base, tiny_model, rows_file, tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    shutil.copy(rows_file, tmp_path / "rows" / "train.jsonl")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with hub_server.serve(models={"org/tiny": tiny_model}, datasets={"org/rows": tmp_path / "rows"}) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert train.main(_with(base, model_name="org/tiny", dataset="org/rows", max_steps=3)) == 0
    assert train.main(_with(base, output_dir=tmp_path / "local", max_steps=3)) == 0
    one, two = ([(e["loss"], e["grad_norm"]) for e in read_events(tmp_path / n, "step")] for n in ("out", "local"))
    assert one == two
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/tiny"


@pytest.fixture(scope="module")
def long_run(tiny_model, tmp_path_factory):
    """Flags of a run of 150 steps with dropout that saves each, and the run itself, undisturbed."""
    folder = tmp_path_factory.mktemp("long")
    rows = [{"prompt": f"{i} and {i}? ", "completion": f"{2 * i}"} for i in range(40)]
    (folder / "rows.jsonl").write_bytes(jsonl(*rows))
    flags = [
        "--model_name",
        tiny_model,
        "--dataset",
        folder / "rows.jsonl",
        "--backend",
        "cpu",
        "--train_type",
        "lora",
        "--lora_rank",
        4,
        "--batch_size",
        4,
        "--max_steps",
        150,
        "--save_every",
        1,
        "--lora_dropout",
        0.1,
        "--lr",
        "1e-3",
        "--resume",
        "auto",
    ]
    assert finish(*flags, "--output_dir", folder / "whole").returncode == 0
    return flags, folder / "whole"


def kill_until_done(flags, folder, whole, kills, seed):
    """Starts the same command over and over, killed at random moments; (restarts that failed, steps that differ)."""
    rng, failed, done = random.Random(seed), 0, 0
    wall = read_events(whole, "end")[-1]["wall_s"]
    while True:
        process = subprocess.Popen(
            command(*flags, "--output_dir", folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done < kills:
            # Most of a start is imports: wait for the run to be on its way, then anywhere in its steps and saves.
            deadline, steps = time.time() + 60, _lines(folder)
            while process.poll() is None and _lines(folder) == steps and time.time() < deadline:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, wall / kills / 2))
            process.kill()
        output = process.communicate()[0]
        if process.returncode == 0:
            break
        if process.returncode != -signal.SIGKILL:
            failed += 1
            print(output)
            assert failed < 3, output
        done += 1
    differ = [
        a["step"]
        for a, b in zip(read_events(folder, "step"), read_events(whole, "step"), strict=True)
        if (a["step"], a["loss"], a["grad_norm"]) != (b["step"], b["loss"], b["grad_norm"])
    ]
    return failed, differ, done


def _lines(folder):
    file = Path(folder) / "metrics.jsonl"
    return file.read_bytes().count(b'"event": "step"') if file.exists() else 0


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_at_random_moments_fail_no_restart_and_change_no_step(long_run, tmp_path, kills):
    flags, whole = long_run
    failed, differ, done = kill_until_done(flags, tmp_path / "out", whole, kills, seed=kills)
    assert (failed, differ) == (0, []) and done >= kills / 2
    for name in ("adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors"):
        last = "checkpoints/step-150"
        assert (tmp_path / "out" / last / name).read_bytes() == (whole / last / name).read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_once_and_its_code_is_the_exit_code(long_run, tmp_path, number, code):
    flags = list(long_run[0])
    flags[flags.index("--save_every") + 1] = 0
    process = subprocess.Popen(command(*flags, "--output_dir", tmp_path / "out"), stdout=subprocess.PIPE, text=True)
    while _lines(tmp_path / "out") < 3:
        time.sleep(0.002)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == code and "continue with --resume" in output
    assert len(steps_of(tmp_path / "out")) == 1
    saved = newest_checkpoint(tmp_path / "out")[0]
    assert saved.step == _lines(tmp_path / "out")


def test_a_second_process_in_one_folder_exits_75_and_names_the_first(base, tmp_path):
    lock = Lock(tmp_path / "out")
    out = finish(*base)
    lock.release()
    assert out.returncode == 75 and f"in use by pid {os.getpid()}" in out.stderr and len(out.stderr.splitlines()) == 1


def test_a_diverging_run_exits_65(base):
    out = finish(*base, "--lr", "1e30")
    assert out.returncode == 65 and out.stderr.startswith("error: step ") and len(out.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_demo_reaches_its_score(tmp_path, world_size):
    out = finish("--output_dir", tmp_path / "demo", "--world_size", world_size)
    assert out.returncode == 0, out.stderr
    before, after = read_events(tmp_path / "demo", "eval")
    assert before["exact_match"] < 0.05 and after["exact_match"] > 0.9
    from finetune.model_files.demo_model import DEMO_MODEL
    from finetune.model_files.files import find_model

    assert_answers_elsewhere(tmp_path, find_model(DEMO_MODEL).folder)


def assert_answers_elsewhere(tmp_path, base_folder):
    """The demo's adapter answers in plain transformers + peft, and its merged model in plain transformers."""
    import peft
    import transformers

    rows = [json.loads(line) for line in (ROOT / "examples" / "orders_test.jsonl").read_text().splitlines()[:4]]
    assert (
        finish("--checkpoint", tmp_path / "demo", "--output_dir", tmp_path / "merged", script="export.py").returncode
        == 0
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base_folder, dtype="float32")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    for model in (peft.PeftModel.from_pretrained(plain, tmp_path / "demo"), merged):
        right = 0
        for row in rows:
            ids = tokenizer.apply_chat_template(
                row["messages"][:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            out = model.generate(**ids, max_new_tokens=60, do_sample=False)
            text = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            right += text.strip() == row["messages"][-1]["content"]
        assert right >= 3  # four rows; the base here is not the quantized one it was trained on
