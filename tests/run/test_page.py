"""report.html and report.py: what the page holds, that it asks nobody for anything, and who may see it live."""

import http.client
import json
import re
import shutil
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

import report
from backend_manager import package_version
from finetune.errors import DivergedError, PlanError
from finetune.run import live_page, page
from finetune.run.charts import Chart, Line, chart_table, svg, thinned
from finetune.run.diagnostics import Finding
from finetune.run.live_page import LivePage
from finetune.run.report import memory_table
from finetune.system.owned_files import read_list
from tests.support.commands import PYTHON, command, finish_fork
from tests.support.pages import Reader
from tests.support.rows import json_lines
from tests.support.runs import copy_up_to, read_events

needs_pygal = pytest.mark.skipif(package_version("pygal") is None, reason="pygal is not installed")
HOSTILE = "<script>alert(1)</script>\x1b[2J"


@pytest.fixture(scope="module")
def finished(tiny_model, rows_file, tmp_path_factory):
    """A run with validation and sampled answers, in a folder whose rows are not friendly."""
    folder = tmp_path_factory.mktemp("page")
    rows = [{"prompt": f"What is {i}? {HOSTILE}", "completion": f"It is {i}."} for i in range(40, 46)]
    (folder / "held_out.jsonl").write_bytes(json_lines(*rows))
    flags = "--max_steps 12 --eval_every 4 --batch_size 2 --context_length 64 --backend cpu --train_type lora --lr 5e-3"
    files = dict(model_name=tiny_model, dataset=rows_file, validation_dataset=folder / "held_out.jsonl")
    argv = command(flags, files, log_to="stdout", output_dir=folder / "run", name="hf_secretsecret")
    code, out, err = finish_fork(argv[len(PYTHON) :], HF_TOKEN="hf_secretsecret")
    assert code == 0, err
    assert f"report: {folder}/run/report.html" in out
    return folder / "run"


def test_the_page_holds_the_numbers_of_the_log_and_refers_to_no_other_place(finished):
    text = (finished / "report.html").read_text(encoding="utf-8")
    found = Reader(text)
    assert len(text) < 3_000_000 and "script" not in found.tags
    for name, value in found.attributes:
        assert name not in ("src", "srcset", "action") and not name.startswith("on"), name
        assert name not in ("href", "xlink:href") or value.startswith("#"), value
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text
    said = " ".join(found.words)
    evaluations = read_events(finished, "eval")
    for event in evaluations:
        assert page.number(event["loss"]) in said, event
    for step in (1, 6, 12):
        assert page.number(read_events(finished, "step")[step - 1]["grad_norm"]) in said
    best = min(evaluations[1:], key=lambda e: e["loss"])
    assert f"best (step {best['step']})" in said and "What the plan decided" in said and "--max_steps 12" in said
    assert "finished" in said and "Tokens per row" in said and "predicted, MiB" in said


def test_the_start_event_announces_as_many_steps_as_the_run_takes(finished):
    assert [start["total_steps"] for start in read_events(finished, "start")] == [12]
    assert read_events(finished, "step")[-1]["step"] == 12


def test_the_page_s_memory_items_are_those_of_the_terminal(finished):
    run = page.read_run(finished)
    terminal = memory_table(run.start["predicted_memory_bytes"], run.end["peak_memory_bytes"])
    assert [row[0] for row in page.memory_items(run).rows] == [line.split()[0] for line in terminal.splitlines()[2:]]
    assert not any("–" in row for row in page.memory_items(run).rows)


def test_every_region_of_a_page_has_a_name_of_its_own(finished):
    for folders in ([finished], [finished, finished]):
        text = page.page_of(folders)
        names = re.findall(r'role="region" aria-label="([^"]*)"', text)
        assert len(names) > 5 and len(set(names)) == len(names)


def test_texts_of_data_are_shown_as_text_and_secrets_are_masked(finished):
    text = (finished / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text and "<script" not in text and "\x1b" not in text
    assert "hf_secretsecret" not in text and "***" in text


MARKUP = "\"'><blink onclick=x>&lt;</pre></style><blink>"


def places(value: object, path: tuple = ()) -> list[tuple]:
    """The path to every field of an event, containers and what is in them: of lists and of items one stands for all."""
    if isinstance(value, dict):
        inner = list(value.items())
        if path and path[-1] in ("items", "versions"):
            inner = inner[:1]
    elif isinstance(value, list):
        inner = list(enumerate(value))[:1]
    else:
        inner = []
    found = [place for key, part in inner for place in places(part, (*path, key))]
    return [*([path] if path else []), *found]


def with_markup(event: dict, path: tuple, as_key: bool) -> dict:
    """A copy of the event with markup as the field at `path`, or as the field's name."""
    copy = json.loads(json.dumps(event))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    if as_key and isinstance(holder, dict):
        holder[MARKUP] = holder.pop(path[-1])
    else:
        holder[path[-1]] = MARKUP
    return copy


@pytest.mark.parametrize("each", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("as_key", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["value", "name"])
def test_markup_in_any_field_of_any_event_is_text(finished, tmp_path, as_key, each):
    """Fields of an event: in the default suite each fifth, and the first."""
    first: dict[str, dict] = {}
    for event in map(json.loads, (finished / "metrics.jsonl").read_text().splitlines()):
        first.setdefault(event["event"], event)
    first["end"]["exit_code"] = 66
    first["start"]["facts"]["checks"] = [{"what": "a", "count": 1, "first": "b", "remedy": "c"}]
    assert {"start", "step", "eval", "save", "end"} <= set(first)
    tried = shown = 0
    for kind, event in first.items():
        for path in list(places(event))[::each]:
            hostile = first | {kind: with_markup(event, path, as_key)}
            (tmp_path / "metrics.jsonl").write_bytes(json_lines(*hostile.values()))
            try:
                text = page.page_of([tmp_path])
            except PlanError:  # where a number is computed with
                continue
            found = Reader(text)
            assert "blink" not in found.tags and "onclick" not in dict(found.attributes), (kind, path)
            assert "<blink" not in text, (kind, path)
            tried += 1
            shown += "&lt;blink onclick=x&gt;" in text
    assert tried > 40 / each and shown > 3 / each


@needs_pygal
def test_curves_are_drawn_with_their_numbers_as_words_and_as_a_table(finished, monkeypatch):
    found = Reader(page.page_of([finished]))
    labels = [value for name, value in found.attributes if name == "aria-label"]
    first, last = (read_events(finished, "step")[i] for i in (0, -1))
    said = f"training from {page.number(first['loss'])} at step 1 to {page.number(last['loss'])} at step 12"
    assert any(label.startswith("Loss: ") and said in label for label in labels)
    assert found.attributes.count(("role", "img")) == found.tags.count("figure") >= 6
    assert found.tags.count("summary") == found.tags.count("figure")


def test_lines_are_thinned_to_means_of_neighbours():
    points = [(float(i), float(i % 2)) for i in range(1, 1001)]
    few = thinned(points, 100)
    assert len(few) == 100 and few[-1][0] == 1000.0 and {v for _, v in few} == {0.5}
    assert thinned(points[:100], 100) == points[:100]


def test_a_table_has_every_step_of_a_short_run_and_the_last_of_a_long_one():
    short = chart_table(Chart("Loss", [Line("a", [(float(i), i / 3) for i in range(1, 20)])]))
    assert [row[0] for row in short.rows] == [str(i) for i in range(1, 20)]
    long = chart_table(Chart("Loss", [Line("a", [(float(i), i / 3) for i in range(1, 5000)])]))
    assert long.rows[-1][0] == "4,999" and len(long.rows) < 70


class Counted(list):
    """A list that counts how often it is read from its beginning."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


@needs_pygal
def test_a_chart_of_many_steps_reads_them_a_few_times():
    points = Counted((float(step), 1.0 + step) for step in range(2000))
    chart = Chart("Loss", [Line("a", points)], can_be_logarithmic=True)
    assert "<svg" in svg(chart) and chart.is_logarithmic and points.reads < 10


@needs_pygal
def test_bars_have_few_labels_that_begin_at_0():
    found = svg(Chart("Rows", bars=[("≤ 1", 48.0), ("≤ 2", 152.0)]))
    said = re.search(r'class="axis y.*?(?=class="series)', found, re.DOTALL)
    assert re.findall(r"<text[^>]*>([^<]*)</text>", said[0]) == ["0", "50", "100", "152", "≤ 1", "≤ 2"]


@needs_pygal
def test_a_name_in_a_chart_is_text():
    found = svg(Chart(HOSTILE, [Line(HOSTILE, [(1.0, 2.0), (2.0, 1.0)])]))
    assert "<script" not in found and "\x1b" not in found and "&lt;script&gt;" in found


def test_a_flag_in_a_sentence_is_not_broken_at_its_hyphens(finished):
    run = page.read_run(finished)
    run.findings.append(Finding("over-fitted", f"Lower --lr, or {HOSTILE} at last."))
    text = page.page([run])
    assert '<li>Lower <span class="flag">--lr,</span> or &lt;script&gt;' in text and "at last.</li></ul>" in text
    assert ".flag{white-space:nowrap}" in text


def test_several_runs_are_compared_by_name_with_the_settings_that_differ(finished, tmp_path, capsys):
    other = tmp_path / "elsewhere" / "run"
    shutil.copytree(finished, other)
    with_plan(other, lr=0.125)
    assert report.main([str(finished), str(other), "--output", str(tmp_path / "both.html")]) == 0
    said = " ".join(Reader((tmp_path / "both.html").read_text()).words)
    assert "elsewhere/run" in said and f"{finished.parent.name}/run" in said and "0.125" in said
    assert "Settings that differ" in said and "lora_rank" not in said


def with_plan(folder, **settled):
    """Changes what a finished run's plan has settled."""
    plan = json.loads((folder / "run_plan.json").read_text())
    plan["settled"] |= settled
    del plan["sha256"]
    (folder / "run_plan.json").write_text(json.dumps(plan))


@pytest.mark.parametrize(
    ("setting", "values", "score", "said"),
    [
        ("score_pattern", ("a+", "b"), "regex", "regex by different --score_pattern (a: a+; b: b)"),
        ("score_max_new_tokens", (4, 64), "contains", "the scores by different --score_max_new_tokens (a: 4; b: 64)"),
        ("score_pattern", ("a+", "b"), "exact_match", None),
        ("score_pattern", ("a+", "a+"), "regex", None),
    ],
)
def test_scores_by_another_measure_are_not_compared_in_silence(finished, tmp_path, setting, values, score, said):
    for name, value in zip("ab", values, strict=True):
        shutil.copytree(finished, tmp_path / name)
        with_plan(tmp_path / name, **{setting: value})
        with open(tmp_path / name / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"event": "eval", "step": 1, score: 0.5, "num_rows": 2}) + "\n")
    lines = [line for line in page.rows_compared([(n, page.read_run(tmp_path / n)) for n in "ab"]) if "--score" in line]
    assert lines == ([f"Not comparable: {said}."] if said else [])


def test_losses_of_other_functions_are_not_compared_in_silence(finished, tmp_path):
    for name, settled in (
        ("a", dict(preference="dpo", preference_beta=0.1)),
        ("b", dict(preference="dpo", preference_beta=0.9)),
        ("c", dict(preference="none")),
        ("f", dict(preference="dpo", preference_beta=0.1, adapter="out/sft")),
        ("d", dict(task="classify", class_names="yes,no")),
        ("e", dict(task="classify", class_names="yes,no,maybe")),
    ):
        shutil.copytree(finished, tmp_path / name)
        with_plan(tmp_path / name, **settled)
        with open(tmp_path / name / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"event": "eval", "step": 1, "loss": 0.5, "num_rows": 2}) + "\n")

    def lines(names: str) -> list[str]:
        found = page.rows_compared([(n, page.read_run(tmp_path / n)) for n in names])
        return [line for line in found if "functions" in line]

    (said,) = lines("abc")
    base = page.read_run(tmp_path / "a").settled["model_name"]
    assert f"(a: dpo --preference_beta 0.1 against {base}; b: dpo --preference_beta 0.9 against {base})." in said
    assert "f: dpo --preference_beta 0.1 against out/sft" in lines("af")[0]
    assert not lines("ac") and not lines("aa") and not lines("dd")
    (said,) = lines("de")
    assert "(d: classes yes,no; e: classes yes,no,maybe)." in said


def test_a_run_that_failed_has_its_page_too(plain_run, tmp_path):
    with pytest.raises(DivergedError):
        plain_run(max_steps=40, lr=1.0, stop_on_divergence=True, train_type="full", lora_rank=None)
    said = " ".join(Reader((tmp_path / "out" / "report.html").read_text()).words)
    assert "diverged after step" in " ".join(said.split()) and "exit code 66" in said


def test_a_page_that_was_edited_stays_and_no_other_file_is_replaced(plain_run, tmp_path, capsys):
    plain_run(max_steps=1)
    file = tmp_path / "out" / "report.html"
    file.write_text(file.read_text() + "mine")
    plain_run(max_steps=2, resume="auto")
    assert "is not as a run wrote it and stays" in capsys.readouterr().out and file.read_text().endswith("mine")
    with pytest.raises(PlanError, match="--output .*exists and is not an unmodified report"):
        report.main([str(tmp_path / "out")])
    plain_run(max_steps=1, run_page=False, output_dir=str(tmp_path / "without"))
    assert not (tmp_path / "without" / "report.html").exists()


def test_a_cut_run_that_report_py_drew_resumes_and_draws_its_own_page(plain_run, tmp_path):
    plain_run(max_steps=4, save_every=2, keep_last=2, run_page=False)
    cut = copy_up_to(tmp_path / "out", 2, tmp_path / "cut")
    assert report.main([str(cut)]) == 0 and "report.html" not in read_list(cut)[1]
    drawn = (cut / "report.html").read_bytes()
    plain_run(max_steps=4, resume="auto", output_dir=str(cut), run_page=True)
    assert (cut / "report.html").read_bytes() != drawn and "report.html" in read_list(cut)[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "metrics.jsonl").write_text('{"event": "step", "step": 1, "loss": "x"}\n{"event": "eval"}\n{'),
        lambda f: (f / "run_plan.json").write_text("[]"),
        lambda f: (f / "samples.jsonl").write_text('{"step": 1}\nnull\n\x00'),
    ],
    ids=["log", "plan", "samples"],
)
def test_damaged_files_are_left_out_or_named(finished, tmp_path, damage):
    shutil.copytree(finished, tmp_path / "run")
    damage(tmp_path / "run")
    try:
        Reader(page.page_of([tmp_path / "run"]))
    except PlanError as error:
        assert str(tmp_path / "run") in str(error) and "\n" not in str(error)


def test_a_folder_without_a_log_is_one_line(tmp_path):
    with pytest.raises(PlanError, match="has no metrics.jsonl. Give the --output_dir of a run."):
        report.main([str(tmp_path)])


# ---- live


@pytest.fixture
def live(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))  # without its end: it goes on
    with LivePage([tmp_path / "run"]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, file, lines[-1]
        server.shutdown()
        thread.join()


def asked(server, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_live_page_is_for_who_knows_its_token_and_asks_again_until_the_run_has_ended(live):
    server, file, end = live
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 32
    status, text = asked(server, f"/{server.token}/")
    assert status == 200 and 'http-equiv="refresh"' in text and "running" in text
    with file.open("a") as log:
        log.write(end)
    status, text = asked(server, f"/{server.token}/")
    assert status == 200 and 'http-equiv="refresh"' not in text and "finished" in text
    for path in ("/", "/wrong/", f"/{server.token[:-1]}/", f"/{server.token}/../", f"/{server.token}/run_plan.json"):
        assert asked(server, path)[0] == 404, path
    assert asked(server, f"/{server.token}/", host=f"evil.example:{server.server_port}")[0] == 404


def raw(server, *said: bytes) -> socket.socket:
    """A connection that has sent these bytes."""
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
    for part in said:
        connection.sendall(part)
    return connection


def test_clients_that_go_away_or_say_nothing_lock_nobody_out_and_print_nothing(live, capfd, monkeypatch):
    server, _, _ = live
    request = f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode()
    for said in (request, request[:20], b""):
        for _ in range(2):
            connection = raw(server, said)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()  # with a reset
    idle = [raw(server, request[:9]) for _ in range(live_page.MOST + 10)]
    assert asked(server, f"/{server.token}/")[0] == 200
    assert idle[0].recv(1) == b"" and len(server.open) <= live_page.MOST
    monkeypatch.setattr(live_page, "REQUEST_S", 0.1)
    assert idle[-1].recv(1) == b""  # within REQUEST_S over all of its bytes
    for connection in idle:
        connection.close()
    assert capfd.readouterr().err == ""


def test_a_client_that_drips_is_closed(live, monkeypatch):
    monkeypatch.setattr(live_page, "REQUEST_S", 0.3)
    connection = raw(live[0], b"GET / HTTP/1.1\r\n")
    with pytest.raises(OSError):
        for _ in range(200):
            connection.sendall(b"x")
            time.sleep(0.05)
    connection.close()


def test_a_log_that_is_gone_is_an_answer_and_comes_back(live, capfd):
    server, file, _ = live
    content = file.read_bytes()
    file.unlink()
    status, text = asked(server, f"/{server.token}/")
    assert status == 503 and "metrics.jsonl" in text
    file.write_bytes(content)
    assert asked(server, f"/{server.token}/")[0] == 200 and capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_one_line(live):
    with pytest.raises(PlanError, match=r"--port \d+: cannot be used"):
        LivePage([Path(".")], live[0].server_port)
