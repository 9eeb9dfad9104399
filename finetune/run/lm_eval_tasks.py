"""score.py --lm_eval: tasks of lm-evaluation-harness on the model as it is loaded here.

The harness asks for log-probabilities of continuations and of documents, and for greedy text until a stop sequence. The
engine answers each, so a quantized base and an adapter are what is measured.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from backend_manager import package_version
from finetune.engine import FineTuningEngine
from finetune.errors import PlanError
from finetune.model_files.tokenizer import FullTokenizer, opened_ids
from finetune.run.scoring import greedy_log_prob, log_prob_of_ids

PACKAGE = "lm-eval"
NOT_NUMBERS = ("alias", "name", "sample_len", "sample_count")


def check_lm_eval(tasks: str) -> None:
    """Raises PlanError if the harness is not installed."""
    if package_version(PACKAGE) is None:
        raise PlanError(f"--lm_eval {tasks}: lm-evaluation-harness is not installed. pip install {PACKAGE}.")


def run_tasks(
    engine: FineTuningEngine, tokenizer: FullTokenizer, ends: set[int], tasks: str, limit: int | None
) -> dict[str, dict[str, float]]:
    """{task: {metric: value}}. `tasks`: names of the harness and YAML files of tasks, comma-separated; `limit`: of
    documents per task. Raises PlanError.
    """
    check_lm_eval(tasks)
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    manager = TaskManager()
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    missing = next((name for name in files if not Path(name).is_file()), None)
    unknown = next((name for name in names if name not in files and name not in manager.all_tasks), None)
    if missing or unknown or not names:
        fact = "no such file" if missing else "is not a task of the harness. lm_eval ls tasks lists them"
        raise PlanError(f"--lm_eval {missing or unknown or tasks}: {fact}.")
    found = lm_eval.simple_evaluate(
        model=language_model(engine, tokenizer, ends), tasks=names, limit=limit, bootstrap_iters=0, log_samples=False
    )
    return {task: _numbers(values) for task, values in found["results"].items()}


def _numbers(values: dict) -> dict[str, float]:
    """The metrics among what the harness says of a task; its names end with a filter, which is none by default."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in values.items()
        if name not in NOT_NUMBERS and "_stderr" not in name and isinstance(value, int | float)
    }


def language_model(engine: FineTuningEngine, tokenizer: FullTokenizer, ends: set[int]) -> Any:
    """The harness' interface to an engine."""
    from lm_eval.api.model import LM

    class EngineLM(LM):
        tokenizer_name = getattr(tokenizer, "name_or_path", "")

        def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
            return tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )

        def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
            return [self._continuation(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: list) -> list[float]:
            return [self._document(request.args[0]) for request in requests]

        def generate_until(self, requests: list) -> list[str]:
            return [self._until(*request.args) for request in requests]

        def _continuation(self, context: str, text: str) -> tuple[float, bool]:
            """Context and continuation are one text for the tokenizer, cut after the context's own tokens."""
            spaces = len(context) - len(context.rstrip())
            if spaces:  # a space belongs to the token after it
                context, text = context[:-spaces], context[-spaces:] + text
            whole = opened_ids(tokenizer, context + text)
            if context:
                before = opened_ids(tokenizer, context)
                ids = whole[len(before) :]
            else:
                before = self._first()
                ids = tokenizer(text, add_special_tokens=False).input_ids
            before, ids = self._fitted(before, ids)
            return greedy_log_prob(engine, before, ids)

        def _document(self, text: str) -> float:
            """Summed over windows that each begin with the last token of the one before."""
            ids = tokenizer(text, add_special_tokens=False).input_ids
            first = self._first()
            step = (engine.context_limit() or 2048) - 1
            total = 0.0
            for at in range(0, len(ids), step):
                if at:
                    before = [ids[at - 1]]
                else:
                    before = first
                total += log_prob_of_ids(engine, before, ids[at : at + step])
            return total

        def _until(self, context: str, how: dict) -> str:
            until = how.get("until") or []
            if isinstance(until, str):
                until = [until]
            else:
                until = [stop for stop in until if stop]
            most = int(how.get("max_gen_toks", how.get("max_new_tokens", 256)))
            prompt, _ = self._fitted(opened_ids(tokenizer, context), [0] * most)

            def stop_row(row: int, ids: list[int]) -> bool:
                text = tokenizer.decode(ids, skip_special_tokens=True)
                return any(stop in text for stop in until)

            (new,) = engine.generate([prompt], most, ends, stop_row)
            text = tokenizer.decode(new, skip_special_tokens=True)
            return text[: min([len(text), *(text.find(stop) for stop in until if stop in text)])]

        def _first(self) -> list[int]:
            """The empty context: the token that texts begin with."""
            token = tokenizer.bos_token_id
            if token is None:
                token = tokenizer.eos_token_id
            assert token is not None, "the tokenizer has neither bos nor eos"
            return [token]

        def _fitted(self, before: list[int], ids: Iterable[int]) -> tuple[list[int], list[int]]:
            """The context's end, so that it and what follows are within the model's limit."""
            ids = list(ids)
            limit = engine.context_limit()
            if limit is None or len(before) + len(ids) <= limit:
                return before, ids
            return before[-max(1, limit - len(ids)) :], ids

    return EngineLM()
