"""The end that was learned is where every program stops: ours, transformers and mlx-lm on the folder of the run."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers

import export
from generate import main as generate
from tests.support.cells import but_slow
from tests.support.rows import jsonl
from tests.support.runs import read_events

FRUITS = ["A pear.", "A plum.", "An apple.", "A fig."]
ROWS = [
    {"messages": [{"role": "user", "content": f"Fruit {i}?"}, {"role": "assistant", "content": text}]}
    for i, text in enumerate(FRUITS)
]
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "own end": TURN + "<|im_end|>\n" + PROMPT,
    "EOS": TURN + "{{ eos_token }}\n" + PROMPT,
    "next role": "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_end|>{% endif %}",
    "plain text": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}
ENDS = {"own end": "<|im_end|>", "EOS": "</s>", "next role": "<|im_start|>", "plain text": "</s>"}
GENERATION = {"none": None, "EOS": {"eos_token_id": 2}, "others": {"eos_token_id": [2, 7], "do_sample": False}}


def base_of(tiny_model, folder, template: str, generation: dict | None):
    base = shutil.copytree(tiny_model, folder)
    (base / "chat_template.jinja").write_text(template)
    (base / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (base / "generation_config.json").write_text(json.dumps(generation))
    return base


def said_by_transformers(folder) -> tuple[str, str]:
    """(the answer to the second question, the token that it ends with)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = tokenizer.apply_chat_template(
        ROWS[1]["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    new = model.generate(**asked, max_new_tokens=24, do_sample=False)[0, asked["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(new[:-1]), tokenizer.convert_ids_to_tokens(new[-1])


def said_by_mlx_lm(folder) -> str:
    """The answer that the program mlx_lm.generate prints: up to where it stops."""
    argv = ["-m", "mlx_lm", "generate", "--model", str(folder), "--prompt", "Fruit 1?", "--max-tokens", "24"]
    done = subprocess.run([sys.executable, *argv, "--temp", "0"], capture_output=True, text=True, check=True)
    return done.stdout.split("==========")[1].strip("\n")


CELLS = [(form, generation) for form in TEMPLATES for generation in GENERATION]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "generation"), CELLS)
def test_every_program_stops_where_the_rows_did(tiny_model, plain_run, tmp_path, capsys, form, generation):
    base = base_of(tiny_model, tmp_path / "base", TEMPLATES[form], GENERATION[generation])
    data = jsonl(tmp_path / "rows.jsonl", ROWS)
    full = dict(train_type="full", lora_rank=None, precision="fp32", lr=1e-2, max_steps=60)
    plain_run(model_name=str(base), dataset=data, score_dataset=data, **full)
    out = tmp_path / "out"
    evals = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines() if '"eval"' in line]
    assert evals[-1]["exact_match"] == 1
    capsys.readouterr()
    assert generate(["--checkpoint", str(out), "--prompt", "Fruit 1?", "--max_new_tokens", "24"]) == 0
    assert capsys.readouterr().out.strip() == "A plum."
    answer, end = said_by_transformers(out)
    assert (answer.strip(), end) == ("A plum.", ENDS[form])
    assert said_by_mlx_lm(out).strip() == "A plum."


FORMS = [("own end", [4]), ("next role", [3]), ("EOS", [])]


@pytest.mark.parametrize(("form", "ends"), but_slow(FORMS, FORMS[1:]))
def test_the_files_of_an_adapter_and_of_what_it_is_exported_to_name_the_end(
    tiny_model, plain_run, tmp_path, capsys, form, ends
):
    base = base_of(tiny_model, tmp_path / "base", TEMPLATES[form], None)
    data, out = jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "out"
    plain_run(model_name=str(base), dataset=data, max_steps=1)
    said = f"answers end with {ENDS[form]}, the model's own with </s>"
    assert (said in capsys.readouterr().out) is bool(ends)
    argv = ["--checkpoint", str(out), "--output_dir", str(tmp_path / "merged")]
    assert export.main(argv) == 0
    assert (said in capsys.readouterr().out) is bool(ends)
    for folder in (out, tmp_path / "merged"):
        assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == ENDS[form]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.generation_config.eos_token_id == ([*ends, 2] if ends else 2)


def test_a_run_on_plain_text_keeps_the_models_end_whatever_its_template_says(tiny_model, plain_run, tmp_path, capsys):
    base = base_of(tiny_model, tmp_path / "base", TEMPLATES["own end"], None)
    plain_run(model_name=str(base), max_steps=1)
    assert "answers end with" not in capsys.readouterr().out
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "</s>"
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_held_out_rows_without_turns_end_as_score_py_reads_them(tiny_model, plain_run, tmp_path):
    """The learned end of a run on chats is the EOS token of the folder that it writes."""
    base = base_of(tiny_model, tmp_path / "base", TEMPLATES["own end"], None)
    held_out = jsonl(
        tmp_path / "held_out.jsonl", [{"prompt": f"Fruit {i}?", "completion": " A fig."} for i in range(3)]
    )
    chats = jsonl(tmp_path / "chats.jsonl", ROWS)
    result = plain_run(model_name=str(base), dataset=chats, validation_dataset=str(held_out), max_steps=1)
    last = read_events(tmp_path / "out", "eval")[-1]["loss"]
    assert result.score(str(held_out), samples=3, max_new_tokens=1)["loss"] == pytest.approx(last, rel=1e-6)


def test_the_token_that_the_user_names_is_the_end(tiny_model, plain_run, tmp_path, capsys):
    plain_run(eos_token="<|im_end|>", max_steps=1)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|im_end|>"
    assert "<|im_end|>⟧" in capsys.readouterr().out


def test_rows_with_both_ends_leave_the_tokenizers_own_and_resume(tiny_model, plain_run, tmp_path):
    """An adapter's run goes on with the tokenizer that it saved: its text rows must end as before."""
    base = base_of(tiny_model, tmp_path / "base", TEMPLATES["own end"], None)
    text, mixed = [{"text": f"Fruit {i}. A pear."} for i in range(4)], tmp_path / "mixed.jsonl"
    plain_run(
        model_name=str(base), dataset=jsonl(tmp_path / "text.jsonl", text), max_steps=1, output_dir=str(tmp_path / "a")
    )
    both = dict(dataset=jsonl(mixed, [*ROWS, *text]), adapter=str(tmp_path / "a"), model_name=None, save_every=1)
    plain_run(**both, max_steps=1)
    plain_run(**both, max_steps=2, resume="auto")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "</s>"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [4, 2]
