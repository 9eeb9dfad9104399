"""A teacher behind an address: a server that gives log-probabilities of prompts as vLLM does, on loopback."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
import transformers

from finetune.errors import PlanError
from finetune.run import served_teacher
from tests.run.test_on_policy import MOST, token_rows
from tests.support.cells import but_slow
from tests.support.hub import running
from tests.support.rows import jsonl
from tests.support.runs import RUN, losses
from tests.support.small_runs import THREE_STEPS, model_in
from train import fine_tune


class Served:
    """A model with its tokenizer, as a server answers for it. `busy`: requests that are answered 503 first; `room`: its
    most tokens; `most`: log-probabilities that it gives; `changed`: what becomes of an answer's entries.
    """

    def __init__(self, folder, names=("tiny",), room: int = 65, most: int = 20):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.names = names
        self.room = room
        self.most = most
        self.busy = 0
        self.key = ""
        self.asked: list[dict] = []
        self.changed: Callable = lambda entries: entries
        self.before: Callable = lambda method: None  # called before an answer is given

    def models(self) -> dict:
        return {"object": "list", "data": [{"id": name, "max_model_len": self.room} for name in self.names]}

    def completions(self, body: dict) -> tuple[int, dict]:
        self.asked.append(body)
        if body["prompt_logprobs"] > self.most:
            return 400, {"error": {"message": f"Requested prompt logprobs of more than max allowed: {self.most}"}}
        choices = [
            {"index": i, "text": "", "prompt_logprobs": self.changed(self.log_probs(ids, body["prompt_logprobs"]))}
            for i, ids in enumerate(body["prompt"])
        ]
        return 200, {"object": "text_completion", "choices": choices[::-1]}

    @torch.no_grad()
    def log_probs(self, ids: list[int], count: int) -> list[dict | None]:
        log_probs_TV = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found: list[dict | None] = [None]
        for own, of_V in zip(ids[1:], log_probs_TV, strict=False):
            tokens = dict.fromkeys([own, *of_V.topk(count).indices.tolist()])
            found.append(
                {str(i): {"logprob": float(of_V[i]), "decoded_token": self.tokenizer.decode([i])} for i in tokens}
            )
        return found


def serving(served: Served) -> AbstractContextManager[str]:
    """The address of a server on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def answer(self, status: int, content: dict) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            served.before("GET")
            if served.key and self.headers.get("Authorization") != f"Bearer {served.key}":
                return self.answer(401, {"error": "Unauthorized"})
            return self.answer(200, served.models()) if self.path == "/v1/models" else self.answer(404, {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.before("POST")
            if served.busy:
                served.busy -= 1
                return self.answer(503, {"error": "busy"})
            return self.answer(*served.completions(body))

    return running(ThreadingHTTPServer(("127.0.0.1", 0), Handler))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return model_in(tmp_path_factory.mktemp("served") / "teacher", 2, 3, initializer_range=0.1)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("asking")
    student = model_in(root / "student", 1, 2)
    rows = token_rows(transformers.AutoTokenizer.from_pretrained(student))
    of_rows = dict(model_name=str(student), dataset=str(jsonl(root / "rows.jsonl", rows)), train_type="lora")
    return RUN | THREE_STEPS | of_rows | dict(teacher_top_k=16)


OWN = dict(on_policy_fraction=0.5, max_completion_length=MOST)
WHOLE = dict(teacher_top_k=10**6, distill_loss="reverse_kl")  # all tokens
SAMPLED = OWN | dict(distill_loss="sampled_kl", teacher_top_k=64)


@pytest.mark.parametrize("changes", but_slow([{}, OWN, SAMPLED, WHOLE], [SAMPLED, WHOLE]))
def test_a_served_teacher_teaches_what_it_does_when_it_is_opened_here(flags, teacher, tmp_path, changes, capsys):
    how = flags | changes
    if "on_policy_fraction" not in changes:
        how["teacher_cache"] = str(tmp_path / "cache")
    fine_tune(**how | dict(teacher=str(teacher), output_dir=str(tmp_path / "opened")))
    served = Served(teacher, most=400)
    with serving(served) as address:
        fine_tune(**how | dict(teacher=address, output_dir=str(tmp_path / "served")))
    assert f"teacher: {address}, which serves tiny" in capsys.readouterr().out
    # the rest's probability is 1 less those that are given, and what is kept has two bytes
    np.testing.assert_allclose(losses(tmp_path / "served"), losses(tmp_path / "opened"), rtol=2e-4)
    assert served.asked and all(len(body["prompt"]) <= served_teacher.DOCUMENTS for body in served.asked)


def test_what_is_kept_of_a_server_is_not_that_of_another_model_at_its_address(flags, teacher, tmp_path):
    served = Served(teacher)
    how = flags | dict(teacher_cache=str(tmp_path / "cache"))
    with serving(served) as address:
        fine_tune(**how | dict(teacher=address, output_dir=str(tmp_path / "one")))
        read = len(served.asked)
        fine_tune(**how | dict(teacher=address, output_dir=str(tmp_path / "two")))
        assert len(served.asked) == read + 1  # a row, to compare
        assert losses(tmp_path / "one") == losses(tmp_path / "two")
        served.model = transformers.AutoModelForCausalLM.from_pretrained(flags["model_name"], dtype=torch.float32)
        with pytest.raises(PlanError, match="--teacher_cache .*: .* finds other tokens likeliest now"):
            fine_tune(**how | dict(teacher=address, output_dir=str(tmp_path / "three")))


def test_a_server_that_is_busy_is_asked_again(flags, teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(served_teacher, "PAUSES_S", (0.01, 0.01, 0.01))
    served = Served(teacher)
    served.busy = 3
    with serving(served) as address:
        fine_tune(**flags | dict(teacher=address, teacher_cache=str(tmp_path), output_dir=str(tmp_path / "o")))
        served.busy = 4
        with pytest.raises(PlanError, match=f"--teacher {address}: answers 503: .* goes on with --resume auto"):
            fine_tune(
                **flags | dict(teacher=address, teacher_cache=str(tmp_path / "c"), output_dir=str(tmp_path / "p"))
            )


def unlike(entries):
    return [e and {i: v | {"decoded_token": v["decoded_token"] + "x"} for i, v in e.items()} for e in entries]


def certain(entries):
    """As servers give that report what greedy decoding makes of probabilities."""
    return [e and {i: v | {"logprob": 0.0} for i, v in e.items()} for e in entries]


def impossible(entries):
    return [e and {i: v | {"logprob": -math.inf} for i, v in e.items()} for e in entries]


REFUSED = [
    (dict(names=("a", "b")), {}, "serves a, b. Name one: http.*#a"),
    (dict(room=64), {}, "takes 64 tokens, and rows have up to 64 and one more is asked for. Use --context_length 63"),
    (dict(most=5), {}, "answers 400: .*max allowed: 5"),
    (dict(key="secret"), {}, "answers 401: .*Set TEACHER_API_KEY"),
    (dict(changed=lambda entries: None), {}, r"gives no log-probabilities of prompts \(prompt_logprobs\)"),
    (dict(changed=lambda entries: entries[1:]), {}, "of other tokens than were asked for"),
    (dict(changed=lambda entries: [1, 2, 3]), {}, "gives log-prob"),
    (dict(changed=lambda entries: [e and dict(list(e.items())[:3]) for e in entries]), {}, "gives 3 log-prob.* 16 "),
    (dict(changed=impossible), {}, "gives log-probabilities of a token whose probabilities sum to 0. Use"),
    (dict(changed=certain), {}, "gives log-probabilities of a token whose probabilities sum to 1[67]"),
    (dict(changed=unlike), {}, "has other tokens than the model: .*Use a teacher with the model's tokenizer"),
    ({}, dict(teacher_bits=4), "--teacher_bits 4: contradicts --teacher http.*a server opens its model itself"),
]


@pytest.mark.parametrize("of_server, changes, fact", but_slow(REFUSED, REFUSED[2:5:2] + REFUSED[-2:]))
def test_what_a_server_cannot_give_is_a_line(flags, teacher, tmp_path, of_server, changes, fact):
    served = Served(teacher)
    for name, value in of_server.items():
        setattr(served, name, value)
    how = flags | changes | dict(teacher_cache=str(tmp_path / "cache"), output_dir=str(tmp_path / "o"))
    with serving(served) as address, pytest.raises(PlanError, match=fact):
        fine_tune(**how | dict(teacher=address))


def test_its_key_and_its_name_are_given(flags, teacher, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, served_teacher.KEY, "secret")
    served = Served(teacher, names=("a", "b"))
    served.key = "secret"
    with serving(served) as address:
        how = dict(teacher=f"{address}/v1#b", teacher_cache=str(tmp_path / "cache"), max_steps=1)
        fine_tune(**flags | how | dict(output_dir=str(tmp_path / "o")))
    assert {body["model"] for body in served.asked} == {"b"}


def test_a_server_whose_answer_has_no_end_is_a_line(flags, teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(served_teacher, "PAUSES_S", ())
    monkeypatch.setattr(served_teacher, "MOST_OF_ANSWER", 1000)
    monkeypatch.setattr(served_teacher, "ENTRY_BYTES", 1)
    with serving(Served(teacher)) as address, pytest.raises(PlanError, match="its answer is longer than 0 MiB"):
        fine_tune(**flags | dict(teacher=address, teacher_cache=str(tmp_path / "c")))


def test_a_server_that_takes_a_request_and_never_answers_is_asked_once(flags, teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(served_teacher, "ANSWER_S", 1.5)
    served = Served(teacher)
    released = threading.Event()
    asked = []

    def before(method: str) -> None:
        if method == "POST":
            asked.append(method)
            released.wait(30)

    served.before = before
    with serving(served) as address:
        with pytest.raises(PlanError, match="cannot be reached .timed out(: no whole answer in [12] s)?"):
            fine_tune(
                **flags | dict(teacher=address, teacher_cache=str(tmp_path / "c"), output_dir=str(tmp_path / "o"))
            )
        released.set()
    assert len(asked) == 1


def test_a_server_that_is_not_there_is_a_line_and_a_dry_run_asks_none(flags, tmp_path, capsys):
    how = flags | dict(teacher="http://127.0.0.1:9", output_dir=str(tmp_path / "o"))
    fine_tune(**how | dict(dry_run=True))
    assert "which is asked when the run begins" in capsys.readouterr().out
    began = time.monotonic()
    with pytest.raises(
        PlanError, match="--teacher http://127.0.0.1:9: cannot be reached .*Start it, or correct the ad"
    ):
        fine_tune(**how)
    assert time.monotonic() - began < 20
    for address in ("http://", "https://no host/"):
        with pytest.raises(PlanError, match=f"--teacher {address}: cannot be "):
            fine_tune(**how | dict(teacher=address))


@pytest.mark.parametrize(
    "address, fact",
    [
        ("http://me:a-password@127.0.0.1:9", r"--teacher http://\*\*\*@127.0.0.1:9: has a name, a password or a query"),
        ("https://127.0.0.1:9/v1?key=a-password", "--teacher https://127.0.0.1:9/v1: has a name, a password or"),
        ("HTTP://me@127.0.0.1:9", "has a name, a password or a query.* TEACHER_API_KEY in the environment"),
        ("localhost:8000/v1", "--teacher localhost:8000/v1: is neither .* Write http://localhost:8000/v1."),
    ],
)
def test_an_address_has_no_secret_that_the_run_would_keep_and_a_scheme(flags, tmp_path, address, fact):
    with pytest.raises(PlanError, match=fact) as error:
        fine_tune(**flags | dict(teacher=address, output_dir=str(tmp_path / "o")))
    assert "a-password" not in str(error.value)


@pytest.mark.parametrize("silent", ["GET", "POST"])
def test_a_server_that_does_not_answer_is_named_and_a_signal_is_heard(
    flags, teacher, tmp_path, silent, monkeypatch, capsys
):
    released = threading.Event()
    served = Served(teacher)

    def before(method: str) -> None:
        if method == silent:
            if method == "POST":
                os.kill(os.getpid(), signal.SIGTERM)
            released.wait(30)

    served.before = before
    monkeypatch.setattr(served_teacher, "LIST_S", 1.5)
    monkeypatch.setattr(served_teacher, "SAY_AFTER_S", -1.0)
    began = time.monotonic()
    with serving(served) as address:
        how = flags | dict(teacher=address, teacher_cache=str(tmp_path / "c"), output_dir=str(tmp_path / "o"))
        if silent == "GET":
            with pytest.raises(PlanError, match=f"--teacher {address}: cannot be reached .timed out"):
                fine_tune(**how)
        else:
            state = fine_tune(**how)
            assert state.status != "finished" and state.step == 0
        released.set()
    assert time.monotonic() - began < 20
    assert f"--teacher {address}: has not answered for 0 s, waiting" in capsys.readouterr().err
