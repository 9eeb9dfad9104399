"""A teacher that a server has opened: asked over the network for log-probabilities of prompts, as vLLM gives them.

The server speaks OpenAI's protocol, and its completions have vLLM's `prompt_logprobs`: at each token of a prompt, which
is given as ids, the likeliest tokens and the prompt's own. Others (OpenAI's API, llama.cpp's server) have no
log-probabilities of prompts.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from finetune.data.run_data import Data
from finetune.data.taught_rows import key_of
from finetune.data.tokens.tokenize import TokenizedDataset
from finetune.errors import PlanError
from finetune.estimate.model_cost import ModelCost
from finetune.model_files.hub import MOST_OF_ANSWER, at_most, in_time
from finetune.parts.teacher import is_address
from finetune.plan.run_plan import RunPlan
from finetune.system.terminal import clean, say
from finetune.system.untrusted import untrusted

FORMAT = 1
KEY = "TEACHER_API_KEY"  # environment variable of the key that is sent, if the server asks for one
ANSWER_S = 600.0  # of one request, whole
LIST_S = 30.0  # of the names of its models
SAY_AFTER_S = 15.0  # of waiting for an answer
PAUSES_S = (1, 5, 25)  # before a request is sent again
BUSY = (429, 500, 502, 503, 504)
DOCUMENTS = 16  # of a request, which has at most TOKENS unless one alone has more
TOKENS = 16384
SHOWN = 200  # letters of an answer in a message
LEAST = math.log(1e-9)  # of the probability of all tokens that the server does not give
# Two readings by one server, whose sums depend on their company: likeliest tokens that are the same, and how far their
# log-probabilities are apart in the mean.
LEAST_SAME = 0.8
MOST_APART = 0.2
MOST_OTHER = 0.1  # of the tokens whose text is compared
# Of the probabilities at a token; the likeliest alone has more than the least, in any vocabulary.
MOST_SUM = 1.02
LEAST_SUM = 1e-7
ENTRY_BYTES = 2**10  # of a log-probability and its text, at most
WITHOUT_SCHEME = re.compile(r"[\w.-]+:\d+(/.*)?")  # an address as people shorten it
OTHER_SERVER = "Use a server such as vLLM's"


class Interrupted(Exception):
    """The wait for a server ended because the run is to end."""


class ServedTeacher:
    """A teacher at an address: a run.teacher.Reader. It takes no memory here."""

    standing = 0
    reading = 0
    cost: ModelCost | None = None

    def __init__(self, plan: RunPlan, data: Data):
        assert plan.teacher is not None, "a run without a teacher"
        self.server = Server(plan.teacher.model)
        self.tokenizer = data.tokenizer
        self.vocabulary = max(data.tokenizer.get_vocab().values()) + 1
        self.width = min(plan.teacher.top_k, self.vocabulary)
        self.is_full = self.width == self.vocabulary
        self.texts_agree = False  # of the server's tokens and the model's
        self.key = key_of(FORMAT, self.server.address, self.server.model, self.width, data.train.digest())

    def listen(self, stopped: Callable[[], bool]) -> None:
        self.server.stopped = stopped

    def open(self, say: Callable[[str], object]) -> None:
        """Says which model reads."""
        say(f"  {self.server.address} serves {self.server.model}")

    def close(self) -> None:
        pass

    def in_its_tokens(self, dataset: TokenizedDataset) -> TokenizedDataset:
        return dataset

    def top_log_probs(self, dataset: TokenizedDataset, rows: range) -> list[tuple[np.ndarray, np.ndarray]]:
        """The likeliest tokens of these rows, see Reader."""
        found = []
        for entries in self._at_targets(dataset, rows, self.width):
            tokens_TK = np.zeros((len(entries), self.width), np.int32)
            log_probs_TB = np.full((len(entries), self.width + (not self.is_full)), LEAST, np.float32)
            for t, entry in enumerate(entries):
                ordered = sorted((token for token in entry if token < self.vocabulary), key=lambda i: (-entry[i], i))
                if len(ordered) < self.width:
                    raise self.server.error(
                        f"gives {len(ordered)} log-probabilities of the {self.width} that are asked for",
                        f"Use --teacher_top_k {max(1, len(ordered))}",
                    )
                best = ordered[: self.width]
                tokens_TK[t] = best
                log_probs_TB[t, : self.width] = [entry[token] for token in best]
                if self.is_full:  # among these alone, as of an opened teacher
                    log_probs_TB[t] -= np.logaddexp.reduce(log_probs_TB[t])
                    continue
                rest = 1 - sum(math.exp(entry[token]) for token in best)
                log_probs_TB[t, -1] = math.log(max(rest, math.exp(LEAST)))
            found.append((tokens_TK, log_probs_TB))
        return found

    def target_log_probs(self, dataset: TokenizedDataset, rows: range) -> list[np.ndarray]:
        """Log-probabilities of the targets, see Reader."""
        found = []
        for row, entries in zip(rows, self._at_targets(dataset, rows, 1), strict=True):
            ids, is_target = dataset.document(row)
            targets = ids[is_target].tolist()
            found.append(np.array([[entry[token]] for token, entry in zip(targets, entries, strict=True)], np.float32))
        return [of.reshape(-1, 1) for of in found]

    def check_kept(self, dataset: TokenizedDataset, row: int, kept: tuple[np.ndarray, np.ndarray]) -> str | None:
        """Compares, as the weights behind an address may change, see Reader."""
        tokens_TK, log_probs_TB = self.top_log_probs(self.in_its_tokens(dataset), range(row, row + 1))[0]
        same_T = tokens_TK[:, 0] == kept[0][:, 0]
        apart_T = np.abs(log_probs_TB[:, 0] - kept[1][:, 0].astype(np.float32))
        if not len(same_T) or same_T.mean() >= LEAST_SAME and apart_T.mean() <= MOST_APART:
            return None
        return (
            f"{self.server.address} finds other tokens likeliest now, at {1 - same_T.mean():.0%} of a row's targets: "
            "its model has changed"
        )

    def _at_targets(self, dataset: TokenizedDataset, rows: range, count: int) -> Iterator[list[dict[int, float]]]:
        """{token: log-probability} at the targets of each of these rows, with the target's own."""
        documents = [dataset.document(row) for row in rows]
        for part in _requests([ids.tolist() for ids, _ in documents]):
            answers = self.server.prompt_log_probs([documents[i][0].tolist() for i in part], count)
            for i, answer in zip(part, answers, strict=True):
                ids, is_target = documents[i]
                if not self.texts_agree:
                    self._check_texts(answer)
                yield [self._of_token(answer[t], int(ids[t])) for t in np.flatnonzero(is_target)]

    def _of_token(self, entry: dict[int, tuple[float, str | None]], target: int) -> dict[int, float]:
        if target not in entry:
            raise self.server.error("gives no log-probability of a prompt's own token", OTHER_SERVER)
        return {token: log_prob for token, (log_prob, _) in entry.items()}

    def _check_texts(self, answer: list[dict[int, tuple[float, str | None]]]) -> None:
        """Raises PlanError for a server whose tokens have other texts than the model's. A token that is a part of a
        letter has none.
        """
        texts = {token: text for entry in answer for token, (_, text) in entry.items() if text is not None}
        own = {token: self.tokenizer.decode([token]) for token in texts if token < self.vocabulary}
        compared = [token for token in own if "\ufffd" not in own[token] + texts[token]]
        if not compared:
            raise self.server.error("does not say which text its tokens have", OTHER_SERVER)
        others = [token for token in compared if own[token].strip() != texts[token].strip()]
        if len(others) > MOST_OTHER * len(compared):
            token = others[0]
            raise self.server.error(
                f"has other tokens than the model: {token} is {clean(texts[token])!r} there and {own[token]!r} here",
                "Use a teacher with the model's tokenizer",
            )
        self.texts_agree = len(compared) >= 8


def _requests(documents: list[list[int]]) -> Iterator[list[int]]:
    """Numbers of the documents that each request has, in order."""
    part: list[int] = []
    tokens = 0
    for i, ids in enumerate(documents):
        if part and (len(part) == DOCUMENTS or tokens + len(ids) > TOKENS):
            yield part
            part = []
            tokens = 0
        part.append(i)
        tokens += len(ids)
    if part:
        yield part


class Server:
    """A server of OpenAI's protocol. `address`: up to /v1; `model`: the name of the one that answers; `room`: its most
    tokens, None if it does not say. `stopped`: asked while it is waited for; Interrupted is raised then. Raises
    PlanError.
    """

    def __init__(self, given: str):
        self.given = given
        self.stopped: Callable[[], bool] = lambda: False
        base, _, model = given.partition("#")
        self.address = base.rstrip("/").removesuffix("/v1") + "/v1"
        key = os.environ.get(KEY)
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        served = self._served()
        if model and model not in served:
            raise self.error(f"serves {_named(served)}, not {model}", "Correct the name after #")
        if not model and len(served) > 1:
            raise self.error(f"serves {_named(served)}", f"Name one: {given}#{next(iter(served))}")
        self.model = model or next(iter(served))
        self.room = served[self.model]

    def error(self, fact: str, remedy: str) -> PlanError:
        return PlanError(f"--teacher {self.given}: {fact}. {remedy}.")

    def _served(self) -> dict[str, int | None]:
        """{name: its most tokens} of the models that it serves."""
        answer = self._asked("models", None)
        found = {}
        with untrusted(f"--teacher {self.given}: lists its models as no server of OpenAI's protocol", OTHER_SERVER):
            for each in answer["data"]:
                room = each.get("max_model_len")
                found[str(each["id"])] = room if isinstance(room, int) else None
        if not found:
            raise self.error("serves no model", OTHER_SERVER)
        return found

    def prompt_log_probs(self, prompts: list[list[int]], count: int) -> list[list[dict[int, tuple[float, str | None]]]]:
        """{token: (log-probability, text)} of the `count` likeliest tokens and the prompt's own, at each token of each
        prompt; {} at the first.
        """
        asked = {"model": self.model, "prompt": prompts, "max_tokens": 1, "temperature": 0, "prompt_logprobs": count}
        answer = self._asked("completions", asked)
        with untrusted(f"--teacher {self.given}: answers as no server of vLLM's protocol", OTHER_SERVER):
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            given = [choice.get("prompt_logprobs") for choice in choices]
            if len(given) == len(prompts) and any(of is None for of in given):
                raise self.error("gives no log-probabilities of prompts (prompt_logprobs)", OTHER_SERVER)
            if [len(of) for of in given] != [len(ids) for ids in prompts]:
                raise self.error("gives log-probabilities of other tokens than were asked for", OTHER_SERVER)
            return [[self._entry(entry or {}) for entry in of] for of in given]

    def _entry(self, entry: dict) -> dict[int, tuple[float, str | None]]:
        found = {}
        for token, value in entry.items():
            log_prob = float(value["logprob"])
            if not log_prob <= 1e-3:  # nan too
                raise self.error(f"gives {log_prob} as a log-probability", OTHER_SERVER)
            text = value.get("decoded_token")
            found[int(token)] = (log_prob, None if text is None else str(text))
        total = sum(math.exp(log_prob) for log_prob, _ in found.values())
        if found and not LEAST_SUM < total < MOST_SUM:
            raise self.error(f"gives log-probabilities of a token whose probabilities sum to {total:.3g}", OTHER_SERVER)
        return found

    def _asked(self, path: str, body: dict | None) -> Any:
        """The answer to a request, which is sent again where a server is busy or away. Raises PlanError."""
        from huggingface_hub.errors import HTTPError

        left_s = LIST_S if body is None else ANSWER_S  # of all tries together
        for pause in (*PAUSES_S, None):
            began = time.monotonic()
            try:
                send = partial(self._send, path, body)
                status, content = in_time(send, limit_s=left_s, meanwhile=self._waiting())
            except HTTPError as error:
                fact = f"cannot be reached ({clean(str(error))[:SHOWN]})"
            except (ValueError, OSError) as error:  # an address that is none
                raise self.error(f"cannot be asked ({clean(str(error))[:SHOWN]})", "Correct the address") from None
            else:
                if status == 200:
                    with untrusted(f"--teacher {self.given}: answers no JSON", OTHER_SERVER):
                        return json.loads(content)
                fact = f"answers {status}: {clean(content.decode(errors='replace'))[:SHOWN]}"
                if status in (401, 403):
                    raise self.error(fact, f"Set {KEY} in the environment")
                if status not in BUSY:
                    raise self.error(fact, "Is it the address of a server such as vLLM's, and does it give so many?")
            left_s -= time.monotonic() - began
            if pause is None or body is None or left_s <= 0:
                break
            until = time.monotonic() + pause
            while (left := until - time.monotonic()) > 0:
                self._end_if_stopped()
                time.sleep(min(left, 1.0))
        raise self.error(fact, "Start it, or correct the address; a run that had begun goes on with --resume auto")

    def _waiting(self) -> Callable[[float], None]:
        """A function to call with the seconds waited; says so once."""
        said: list[float] = []

        def waiting(waited_s: float) -> None:
            self._end_if_stopped()
            if waited_s > SAY_AFTER_S and not said:
                said.append(waited_s)
                say(f"--teacher {self.given}: has not answered for {waited_s:.0f} s, waiting", file=sys.stderr)

        return waiting

    def _end_if_stopped(self) -> None:
        if self.stopped():
            raise Interrupted

    def _send(self, path: str, body: dict | None) -> tuple[int, bytes]:
        """(status, content) of the answer. Raises HTTPError for one that is longer than what was asked for."""
        from huggingface_hub import get_session

        most = MOST_OF_ANSWER
        if body is not None:
            most += ENTRY_BYTES * (body["prompt_logprobs"] + 1) * sum(map(len, body["prompt"]))
        method = "GET" if body is None else "POST"
        how: dict[str, Any] = dict(headers=self.headers, timeout=ANSWER_S, follow_redirects=False)
        with get_session().stream(method, f"{self.address}/{path}", json=body, **how) as response:
            return response.status_code, b"".join(at_most(most, response.iter_bytes))


def _named(served: dict) -> str:
    return ", ".join(clean(name) for name in served)


def check_address(given: str) -> None:
    """Raises PlanError for an address with a secret, which the files of the run would keep, and one without http://.
    Names and folders pass.
    """
    if is_address(given):
        host, _, query = given.partition("?")
        if "@" in host.partition("://")[2].partition("/")[0] or query:
            raise PlanError(
                f"--teacher {clean(host)}: has a name, a password or a query, which run_plan.json and README.md would "
                f"keep. Give the address alone, and the key that the server asks for as {KEY} in the environment."
            )
    elif WITHOUT_SCHEME.fullmatch(given) and not os.path.exists(given):
        raise PlanError(f"--teacher {given}: is neither a folder nor an address. Write http://{given}.")


def check(plan: RunPlan) -> str:
    """Words on the server for the plan's line. Raises PlanError. A dry run asks nobody."""
    assert plan.teacher is not None, "a run without a teacher"
    if plan.settings.dry_run:
        return "which is asked when the run begins"
    server = Server(plan.teacher.model)
    needed = plan.data.context_length + 1
    if server.room is not None and server.room < needed:
        raise server.error(
            f"takes {server.room:,} tokens, and rows have up to {needed - 1:,} and one more is asked for",
            f"Use --context_length {server.room - 1}, or start it with --max-model-len {needed}",
        )
    return f"which serves {clean(server.model)}"
