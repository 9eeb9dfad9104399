"""Printed reports: the plan before the first step, the closing table after the last, and the next command to run."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from finetune.checkpoint.store import newest_checkpoint
from finetune.data.columns import OF_TASKS, Row
from finetune.data.conversation import turns_of
from finetune.data.formats import needs_template, question_text, render_text
from finetune.data.images.marks import as_asked, marked_in
from finetune.data.images.rows import PLACEHOLDER
from finetune.data.preference_rows import as_answer
from finetune.data.run_data import Data
from finetune.data.tokens.tokenize import render_row
from finetune.distributed.accelerate_config import NAMES
from finetune.engine import BaseReads, Engine
from finetune.generation import legible
from finetune.model_files.tokenizer import Tokenizer, opened_ids
from finetune.parts.plan_base import PlanBase
from finetune.parts.train_state import TrainState
from finetune.plan.run_plan import RunPlan
from finetune.run.evaluation import OF_LABELS, SCORE_NAMES, UNTRAINED
from finetune.run.metrics import GIB, Summary, memory_rows, table
from finetune.run.outcome import best_title
from finetune.system.program import started_as
from finetune.system.terminal import clean

LEAST_COMPARED = 16 * 2**20  # bytes of a peak; a second run in a process loads no libraries, which are predicted
# Part by which a predicted time is far off.


def stored_as(plan: RunPlan) -> list[str]:
    """The line on weights that are not plain safetensors."""
    if not plan.files or not any(path.suffix == ".npz" for path in plan.files.weight_files):
        return []
    kind = "quantized" if plan.files.stored else "not quantized"
    return [f"weights: MLX's .npz, {kind}"]


def plan_lines(plan: RunPlan) -> list[str]:
    """Lines that print the final plan, and every adjustment with its reason."""
    s = plan.settings
    if s.assume_memory and plan.memory_budget and plan.memory_budget.device != plan.backend:
        where = "an assumed accelerator"
    else:
        where = plan.backend
    quantization = plan.quantization
    base = ""
    if quantization:
        base = f", base in {quantization.method} {quantization.bits} bits"
    if s.llama_pro_path:
        what = f"added layers ({s.train_type})"
    else:
        what = s.train_type
    return [
        f"{plan.objective.described(what)} of {s.model_name} on {where} in {s.precision}{base}",
        *stored_as(plan),
        *ranks_line(plan),
        f"{plan.data.unit} per step: {plan.rows_per_step} "
        f"(batch_size {s.batch_size} x accumulation {s.gradient_accumulation_steps} "
        f"x data ranks {plan.data_ranks}), at most {s.microbatch_tokens} tokens per forward",
        *reasons(plan),
        f"output: {s.output_dir}",
    ]


def reasons(plan: PlanBase) -> list[str]:
    """Every adjustment and notice of a plan."""
    adjustments = [f"  {adjustment}" for adjustment in plan.adjustments]
    return [*adjustments, *(f"  note: {notice}" for notice in plan.notices)]


def ranks_line(plan: RunPlan) -> list[str]:
    """The line on world size and distributed implementation; nothing for a single rank."""
    if plan.dims.world_size == 1:
        return []
    if plan.distribution == "ptd":
        by = ""
    else:
        by = f", by accelerate: {NAMES[plan.distribution]}"
    return [f"ranks: {plan.dims.world_size} ({plan.dims}{by})"]


def not_finite(error: BaseException, step: int, sources: list[str], root: Path, lr_flag: str) -> str:
    """The error line of a diverged run: step, rows, and the checkpoint to resume from."""
    shown = ", ".join(sources[:4]) + (f" and {len(sources) - 4} more" if len(sources) > 4 else "")
    good, _ = newest_checkpoint(root)
    kept = "no checkpoint exists yet"
    if good:
        kept = f"last good checkpoint: {good.folder}"
    if step == 1:
        return f"step {step}: {error}; rows {shown}; {kept}. {UNTRAINED}"
    return f"step {step}: {error}; rows {shown}; {kept}. Lower {lr_flag}, or look at these rows."


def diverged(fact: str, step: int, root: Path, lr_flag: str) -> str:
    """The error line of --stop_on_divergence."""
    good, _ = newest_checkpoint(root)
    best = root / "best"
    kept = "no checkpoint exists yet"
    if good:
        kept = f"last checkpoint: {good.folder}"
    kept += f"; lowest validation loss: {best}" if best.is_dir() else ""
    return f"step {step}: the run diverged: {fact}; {kept}. Lower {lr_flag}."


def ended_early(state: TrainState) -> str:
    """The line of a run that --early_stopping ended."""
    return (
        f"ends at step {state.step} of {state.total_steps}: {state.worse_evals} evaluations in a row without a better "
        f"validation loss than {state.best_loss:.4f}, of step {state.best_step}"
    )


def ask_command(
    output_dir: str, row: Row | None, tokenizer: Tokenizer | None = None, prompt: Sequence[int] = ()
) -> str:
    """Command of generate.py that asks the trained model a row's question. `prompt`: ids of its last prompt, which is
    asked if the row has several.
    """
    command = [*started_as("generate.py").split(), "--checkpoint", output_dir]
    row = row and as_answer(row)
    if row is not None and row.format in OF_TASKS:
        text = row.get("text")
        if isinstance(text, list) and len(text) == 1 and isinstance(text[0], dict):
            text = text[0].get("content")  # --prompt asks what was learned from messages as one of them
        return shlex.join([*command, "--prompt", text if isinstance(text, str) else "..."])
    if row is None:
        command += ["--prompt", "..."]
    elif needs_template(row):
        messages = turns_of(row)[0]
        questions = [m["content"] for m in messages if m["role"] == "user"]
        history = None
        if tokenizer is not None and len(questions) > 1 and not row.images:
            history = _typed(tokenizer, prompt)
        system = next((m["content"] for m in messages if m["role"] == "system"), None)
        if history:
            command += ["--raw", "--prompt", history]
        else:
            command += ["--system", system] if system else []
            command += ["--prompt", next(iter(questions), "...")]
    elif row.format == "prompt_completion":
        command += ["--raw", "--prompt", _without_joined_space(row.text("prompt"), row.text("completion"), tokenizer)]
    elif row.format in ("alpaca", "qna") and tokenizer is not None and not tokenizer.chat_template:
        command += ["--raw", "--prompt", render_text(row, tokenizer).spans[0].text]  # as the rows were rendered
    else:
        command += ["--prompt", question_text(row) if row.format in ("alpaca", "qna") else "..."]
    if row is not None and row.images:
        images = marked_in(command[-1], row.images) or row.images
        shown = [str(image.path) for image in images if image.path is not None]
        command[-2:-2] = [word for path in shown or ["..."] for word in ("--image", path)]
    return shlex.join(as_asked(word, PLACEHOLDER) for word in command)


def try_command(plan: RunPlan, data: Data, prompt: Sequence[int]) -> str:
    """The command that shows what a run learned: of a head that answers nothing, its score of rows."""
    folder = str(plan.settings.output_dir)
    if plan.data.has_head and not plan.objective.labels:
        return shlex.join([*started_as("score.py").split(), "--checkpoint", folder, "--dataset", "FILE"])
    return ask_command(folder, data.example, data.tokenizer, prompt)


def _typed(tokenizer: Tokenizer, prompt: Sequence[int]) -> str | None:
    """Text for which `generate.py --raw` reads these token ids; None if there is none."""
    opening = opened_ids(tokenizer, "")
    text = tokenizer.decode(prompt[len(opening) :])
    if list(prompt[: len(opening)]) != opening:
        text = tokenizer.decode(prompt)
    if opened_ids(tokenizer, text) == list(prompt):
        return text
    return None


def _without_joined_space(prompt: str, completion: str, tokenizer: Tokenizer | None) -> str:
    """The prompt without spaces at its end that the tokenizer joins to the answer's first token."""
    if tokenizer is None:
        return prompt
    found = tokenizer(prompt + completion, add_special_tokens=False, return_offsets_mapping=True)
    first = next((start for start, end in found.offset_mapping if end > len(prompt)), len(prompt))
    if prompt[first:].strip():
        return prompt
    return prompt[:first]


def memory_table(predicted: dict, measured: dict) -> str:
    """Text table of predicted and measured bytes per item, see memory_rows."""
    rows = [("memory", "predicted", "measured", "error")]
    for name, one, other in memory_rows(predicted, measured):
        # less is shown as 0.0
        off = ""
        if other > 2**16:
            off = f"{one / other - 1:+.1%}"
        rows.append((name, f"{one / 2**20:,.1f} MiB", f"{other / 2**20:,.1f} MiB", off))
    return table(rows)


def data_lines(data: Data, color: bool) -> list[str]:
    """Lines on the rows read: skipped ones, counts, and one row as the model will see it. Cleaned; the row may be in
    color.
    """
    lines = [*(f"  skipped: {line}" for line in data.train.skipped[:10]), f"data: {data.train.describe()}"]
    lines += [f"  {part.name}: {part.line}" for part in data.train.parts]
    lines += [f"  note: {line}" for line in (data.train.lost(), *data.train.notices) if line]
    return [*map(clean, lines), render_row(data.train, 0, data.tokenizer, color=color)]


def dataset_lines(tokens: dict[str, int]) -> list[str]:
    """The line on how many tokens of each dataset were trained on; nothing for a single one."""
    if not tokens:
        return []
    total = max(1, sum(tokens.values()))
    return ["tokens by dataset: " + ", ".join(f"{name} {n:,} ({n / total:.1%})" for name, n in tokens.items())]


def engine_lines(engine: Engine) -> list[str]:
    """Lines on the loaded model: notices, and how many of its parameters train."""
    trainable, total = engine.parameter_counts()
    lines = [f"  note: {notice}" for notice in engine.notices()]
    return [*lines, f"trainable parameters: {trainable:,} of {total:,} ({trainable / total:.2%})"]


def time_line(state: TrainState, summary: Summary) -> str:
    """The seconds of each phase, and the tokens of this run."""
    tokens = state.num_tokens - summary.tokens_before
    training_s = summary.seconds.get("training")
    rate = 0
    if training_s:
        rate = tokens / training_s
    seconds = dict(summary.seconds)
    whole = seconds.pop("whole run", None)
    if whole is None:
        other = 0.0
    else:
        other = whole - sum(seconds.values())
    seconds |= {"other": other} if other > 0.05 else {}
    seconds |= {} if whole is None else {"whole run": whole}
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in seconds.items())
    return f"time: {phases}; {tokens:,} tokens trained on, {rate:,.0f} per second"


def step_lines(summary: Summary, alone: bool = True) -> list[str]:
    """Line on a step's time next to its prediction; none without a prediction, or for fewer than three steps, as the
    first one takes longer. `alone`: one rank, so other processes are not this run's.
    """
    if not summary.predicted_step or len(summary.step_seconds) < 3:
        return []
    took = median(summary.step_seconds)
    predicted = predicted_seconds(summary)
    others = 0
    if alone and summary.other_processes:
        others = round(median(summary.other_processes))
    beside = f", {predicted / took - 1:+.0%}"
    if others > 0:  # a step beside them says nothing of the prediction
        beside = f"; about {others} other process{'es were' if others > 1 else ' was'} running"
    return [f"time of a step: {took:.2g} s, the median ({predicted:.2g} predicted{beside})"]


def predicted_seconds(summary: Summary) -> float:
    """Predicted seconds of a step; of answers that were sampled, by their mean length and how many were learned from,
    which no plan knows.
    """
    assert summary.predicted_step is not None, "a step was predicted"
    found = None
    if summary.sampled and summary.predicted_for is not None:
        lengths, learned = zip(*summary.sampled, strict=True)
        found = summary.predicted_for(sum(lengths) / len(lengths), sum(learned) / len(learned))
    return (found or summary.predicted_step).total


def memory_lines(summary: Summary, verbose: bool) -> list[str]:
    """The peak against its prediction; item by item with --verbose, or if the total is off by more than 10 %."""
    peak = 0
    if summary.peak:
        peak = summary.peak["total"]
    predicted = 0
    if summary.peak and summary.predicted:
        predicted = summary.predicted["total"]
    off = 0.0
    if peak and predicted:
        off = predicted / peak - 1
    if peak < LEAST_COMPARED:
        off = 0.0
    beside = ""
    if predicted:
        of_what = " for answers of full length that all teach" if summary.sampled else ""
        compared = f", {off:+.1%}" if peak >= LEAST_COMPARED else ""
        beside = f" ({predicted / GIB:.2f} predicted{of_what}{compared})"
    loading = f"{summary.loading_bytes / GIB:.2f} GiB while loading"
    if summary.peak is None:  # no step was taken
        return [f"memory above imports: {loading}"]
    line = f"memory above imports: {peak / GIB:.2f} GiB in training{beside}, {loading}"
    if summary.predicted and summary.peak and predicted and (verbose or abs(off) > 0.1):
        return [line, "", memory_table(summary.predicted, summary.peak), ""]
    return [line]


def reads_line(reads: BaseReads) -> str:
    """The line on the reads of a base that is not on the device."""
    return (
        f"base_offload: {reads.read_bytes / GIB:.1f} GiB of layers read in {reads.read_s:.1f} s beside the steps, "
        f"which waited {reads.waited_s:.1f} s for them"
    )


def score_text(name: str, value: float) -> str:
    if name == "perplexity":
        return f"{value:.4f}"
    return f"{value:.1%}"


def dense_lines(plan: RunPlan, summary: Summary, many: int) -> list[str]:
    """The scores of an adapter on both bases, and who has which; nothing for a run without a quantized base."""
    dense = summary.dense
    own = str(plan.quantization)
    if dense is None:
        return []
    if isinstance(dense, str):
        return [f"on the dense base, which export.py merges into: {dense}"]

    def said(values: dict) -> str:
        scores = [f"{n.replace('_', ' ')} {score_text(n, values[n])}" for n in SCORE_NAMES if n in values]
        return ", ".join([*scores, *([f"loss {values['loss']:.4f}"] if "loss" in dense else [])])

    return [
        f"scores of {many} rows, by the base under the adapter:",
        f"  {own}, as trained (generate.py, score.py): {said(summary.after or {})}",
        f"  dense (what export.py writes): {said(dense)}",
    ]


def best_lines(state: TrainState, summary: Summary) -> list[str]:
    """Line on the weights of the lowest validation loss, if there were several evaluations."""
    if not summary.best or not summary.best_folder:
        return []
    step = summary.best["step"]
    same = " (those of the last step)" if step == state.step else ""
    found = f"lowest validation loss: step {step}, its weights{same} are in {summary.best_folder}"
    before = (summary.before or {}).get("loss")
    if "trained" in best_title(summary.best, summary.before or {}):
        found = found.replace("loss:", f"loss after step 0, which had a lower one ({before:.4f}):")
    return [found]


def closing_lines(plan: RunPlan, data: Data, state: TrainState, summary: Summary, code: int) -> list[str]:
    """The closing report: metrics before and after, phase times, peak memory, output location."""
    s = plan.settings
    r = summary
    lines = [""]
    if r.after and code == 0:
        names = [n for n in r.after if n == "loss" or n.startswith("rewards/")]
        columns = {}
        if r.before:  # a resumed run may have had none, or of other rows
            columns["before"] = r.before
        if r.best and s.eval_every:
            columns[best_title(r.best, r.before or {})] = r.best
        columns["after"] = r.after
        rows = [("", *columns), *((n, *(f"{v[n]:.4f}" if n in v else "-" for v in columns.values())) for n in names)]
        many = len(data.score_examples)
        counts = {name: r.after.get("num_scored") for name in SCORE_NAMES if name.startswith("score_")}
        counts |= dict.fromkeys((*OF_LABELS, "recall_at_1"), r.after.get("num_rows"))
        for name in (n for n in SCORE_NAMES if n in r.after):
            # A resumed run may score what the run before it did not.
            shown = (score_text(name, v[name]) if name in v else "-" for v in columns.values())
            rows.append((f"{name.replace('_', ' ')} of {counts.get(name, many)}", *shown))
        lines += [table(rows), *best_lines(state, r), *dense_lines(plan, r, many), ""]
    if r.sample_after is not None:
        prompt, expected, source = data.score_examples[0]
        lines += [f"scored example ({source}):", data.tokenizer.decode(legible(prompt))]
        if r.sample_before is None:
            before = "(resumed)"
        else:
            before = r.sample_before
        for label, text in (("expected", expected), ("before", before), ("after", r.sample_after)):
            lines.append(f"{label + ':':<10}" + text.replace("\n", "\n" + " " * 10))
        lines.append("")
    lines += [
        time_line(state, r),
        *dataset_lines(data.tokens_by_dataset(plan, state)),
        *data.noted_while_training(),
        *step_lines(r, plan.dims.world_size == 1),
    ]
    lines += memory_lines(r, s.verbose)
    if r.base_reads is not None:
        lines.append(reads_line(r.base_reads))
    lines += [f"look at this: {finding.text}" for finding in r.findings]
    if code and not (plan.output.save_model and state.step):
        return lines + [f"stopped by a signal at step {state.step}; nothing was saved"]
    if code:
        return lines + [
            f"stopped by a signal, saved to {s.output_dir}/checkpoints/step-{state.step}; "
            f"continue with --resume {s.output_dir}"
        ]
    if not plan.output.save_model:
        return lines
    scored_prompt: Sequence[int] = ()
    if data.score_examples:
        scored_prompt, _, _ = data.score_examples[0]
    pages = []
    if plan.output.run_page:
        pages = [f"report: {s.output_dir}/report.html"]
    return lines + [f"saved: {s.output_dir}", *pages, f"try it: {try_command(plan, data, scored_prompt)}"]
