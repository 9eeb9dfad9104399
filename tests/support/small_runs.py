"""Runs of three steps of a tiny model with a tokenizer of its own, and what the heads' tests show of each."""

import numpy as np
import transformers

from finetune.checkpoint.store import newest_checkpoint
from tests.support import tiny
from tests.support.commands import command, finish
from tests.support.rows import jsonl
from tests.support.runs import RUN, copy_up_to, losses, read_events, same_files
from train import fine_tune

THREE_STEPS = dict(max_steps=3, batch_size=5, lr=1e-2, lora_dropout=0.0, gradient_accumulation_steps=1)
TWO_RANKS = (dict(world_size=2, sharding_strategy="ddp"), dict(world_size=2, dp_shards=2))


def model_in(folder, seed: int, layers: int, architecture: str = "llama", **sizes):
    folder.mkdir()
    tiny.train_tokenizer(folder, bos=False, chat_template=tiny.CHATML)
    vocab = len(transformers.AutoTokenizer.from_pretrained(folder))
    tiny.build(architecture, seed=seed, num_hidden_layers=layers, **{"vocab_size": vocab} | sizes).save_pretrained(
        folder
    )
    return folder


def head_flags(root, task: str, rows: list[dict], num_held_out: int) -> dict:
    """Flags of a LoRA run of `task` on rows, the first of which are held out too."""
    return (
        RUN
        | THREE_STEPS
        | dict(
            model_name=str(model_in(root / "model", 1, 2)),
            dataset=str(jsonl(root / "rows.jsonl", rows)),
            validation_dataset=str(jsonl(root / "held_out.jsonl", rows[:num_held_out])),
            train_type="lora",
            task=task,
        )
    )


def without_lora(flags: dict) -> dict:
    """The flags that full fine-tuning takes too."""
    return {name: value for name, value in flags.items() if not name.startswith("lora")}


def learns_the_same_in_all_layouts(flags: dict, folder, metric: str, small: int, **tolerance):
    """Shows that steps of packed, padded, small and accumulated microbatches have the same losses and `metric`.

    `small`: tokens of a small microbatch.
    """
    layouts = {
        "packed": {},
        "padded": dict(batch_layout="padded"),
        "small": dict(microbatch_tokens=small),
        "accumulated": dict(batch_size=1, gradient_accumulation_steps=THREE_STEPS["batch_size"]),
    }
    found = {}
    for name, changes in layouts.items():
        fine_tune(**flags | changes | dict(output_dir=str(folder / name)))
        found[name] = [(e["loss"], e[metric]) for e in read_events(folder / name, "step")]
    for name in layouts:
        np.testing.assert_allclose(found[name], found["packed"], err_msg=name, **tolerance)


def resumes_bitwise(flags: dict, folder, state: list[str]):
    """Shows that a run resumed from its second step has the losses and the files of the undisturbed one."""
    saved = flags | dict(save_every=1)
    fine_tune(**saved | dict(output_dir=str(folder / "whole")))
    stopped = copy_up_to(folder / "whole", 2, folder / "stopped")
    fine_tune(**saved | dict(output_dir=str(stopped), resume="auto"))
    assert losses(stopped) == losses(folder / "whole")
    same_files(*(newest_checkpoint(of)[0].folder for of in (stopped, folder / "whole")), state)


def one_and_two_ranks(flags: dict, folder, changes: dict) -> tuple[dict, dict]:
    """The last evaluations of one process and of two ranks, in `folder`/one and two, whose losses are the same."""
    one = dict(output_dir=str(folder / "one"), batch_size=4)
    two = dict(output_dir=str(folder / "two"), batch_size=2) | changes
    for some in (one, two):
        done = finish(command(flags | some))
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(folder / "two"), losses(folder / "one"), rtol=1e-5)
    first, second = (read_events(folder / name, "eval")[-1] for name in ("one", "two"))
    return first, second
