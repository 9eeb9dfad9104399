"""Whatever a reward function, its file, the word that names it or an answer does: one line, or a number."""

import os

import pytest

from finetune.data.chat_template import on_day
from finetune.data.render_process import DAY
from finetune.errors import PlanError
from finetune.parts.reward import RewardPlan, parse_rewards
from finetune.rewards.functions import Asked, Rewards
from tests.rewards.test_functions import ASKED, HEAD, rewards

HEADER = """
import collections, datetime, decimal, enum, fractions, itertools, math, os, queue, random, subprocess, sys, threading
import time, warnings
import numpy
import torch


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


class Many(Exception):
    def __str__(self):
        return "first\\nsecond\\nthird"


class Unshown:
    def __repr__(self):
        raise ValueError("no words")


class Incomparable(float):
    def __abs__(self):
        raise ValueError("no size")


class Endless(float):
    def __abs__(self):
        time.sleep(60)


class Unspeakable(Exception):
    def __str__(self):
        time.sleep(60)

    __repr__ = __str__


class Disguised:
    shape = ()

    def __init__(self, item):
        self.item = item


class Iterated:
    def __iter__(self):
        raise KeyError("no items")


class Half:
    def __iter__(self):
        yield 1.0
        raise KeyError("no more")
"""
RAISED = """ArithmeticError AssertionError AttributeError BaseException BlockingIOError BrokenPipeError BufferError
ChildProcessError ConnectionError EOFError Exception FileExistsError FileNotFoundError FloatingPointError GeneratorExit
ImportError IndexError InterruptedError KeyError KeyboardInterrupt LookupError MemoryError ModuleNotFoundError NameError
NotImplementedError OSError OverflowError PermissionError RecursionError ReferenceError RuntimeError StopAsyncIteration
StopIteration SyntaxError SystemError SystemExit TabError TimeoutError TypeError UnboundLocalError UserWarning
ValueError Warning ZeroDivisionError""".split()
RAISES = {f"raise {name}('why')": f"raised {name}" for name in RAISED}
RAISES |= {
    "raise Mute": "raised Mute on the answer to rows:1",
    "raise Many": "raised Many: first on the answer",
    "raise ValueError": "raised ValueError on the answer",
    "raise Unspeakable": "raised Unspeakable on the answer to rows:1",
    "return Unspeakable()": "returned a Unspeakable. Return a list",
    "return [1.0, Unspeakable()]": "gave a Unspeakable for the answer to rows:2",
    "return [Incomparable()] * len(rows)": "raised ValueError: no size on the answer to rows:1",
    "return [Disguised(rows.clear) for r in rows]": "for the answer to rows:1. Return a number",
    "return [Disguised(exit) for r in rows]": "raised SystemExit: None on the answer to rows:1",
    "raise ValueError('é' * 1000)": "raised ValueError: é",
    "raise ExceptionGroup('both', [ValueError('1'), KeyError('2')])": "raised ExceptionGroup: both",
    "raise subprocess.CalledProcessError(3, 'judge')": "raised CalledProcessError",
    "raise 3": "raised TypeError: exceptions must derive",
    "raise ValueError('a\\x1b[31mb')": "raised ValueError",
    "sys.exit('bye')": "raised SystemExit: bye",
    "exit(3)": "raised SystemExit: 3",
    "os._exit(0)": "raised SystemExit: os._exit(0) on the answer to rows:1",
    "os._exit(7)": "raised SystemExit: os._exit(7) on the answer to rows:1",
    "return [r['id'] < 2 or os._exit(0) for r in rows]": "raised SystemExit: os._exit(0) on the answer to rows:2",
    "f(prompts, answers, rows)": "raised RecursionError",
    "return nothing": "raised NameError",
    "return rows[9]": "raised IndexError",
    "return [r['score'] for r in rows]": "raised KeyError: 'score' on the answer to rows:1",
    "return [float(a) for a in answers]": "raised ValueError: could not convert string to float: ''",
    "return [1 / (r['id'] - 2) for r in rows]": "raised ZeroDivisionError: division by zero on the answer to rows:2",
    "return [1 / (3 - sum(r['id'] for r in rows))] * 2": "raised ZeroDivisionError: division by zero. Correct",
    "return Iterated()": "raised KeyError: 'no items'",
    "return Half()": "raised KeyError: 'no more'",
    "open('/nothing/at/all')": "raised FileNotFoundError",
    "import nothing_like_it": "raised ModuleNotFoundError",
    "subprocess.run(['/nothing'], check=True)": "raised FileNotFoundError",
    "import signal; signal.signal(signal.SIGALRM, signal.SIG_DFL)": "raised ValueError",
    "warnings.simplefilter('error'); warnings.warn('careful')": "raised UserWarning: careful",
    "return torch.zeros(2) @ torch.zeros(3)": "raised RuntimeError",
    "return numpy.zeros(2) + numpy.zeros(3)": "raised ValueError",
    "return (lambda: (yield 1))().throw(KeyError('x'))": "raised KeyError",
}
NO_LIST = ["None", "3", "1.5", "True", "...", "NotImplemented", "object()", "Unshown()", "f", "type", "math", "1j"]
NO_LIST += [
    "'12' * 1000",
    "'12'",
    "b'12'",
    "bytearray(2)",
    "{1, 2}",
    "frozenset([1, 2])",
    "{1: 1, 2: 2}",
    "collections.Counter('ab')",
]
NO_LIST += ["datetime.date.today()", "numpy.float64(1)", "ValueError('returned')", "decimal.Decimal(1)"]
LENGTHS = ["[]", "[1]", "[1] * 3", "()", "iter(())", "range(3)", "numpy.zeros(0)", "numpy.zeros(3)", "torch.zeros(1)"]
LENGTHS += [
    "itertools.count()",
    "itertools.repeat(1.0)",
    "(1 for _ in range(10**9))",
    "collections.deque([1])",
    "[[1, 2]]",
]
VALUES = [
    "None",
    "'1'",
    "'1' * 1000",
    "''",
    "b'1'",
    "1j",
    "[1]",
    "(1,)",
    "{}",
    "{1}",
    "object()",
    "Unshown()",
    "f",
    "type",
    "...",
]
VALUES += ["math.nan", "math.inf", "-math.inf", "1e10", "-1e10", "1.0000001e9", "10**400", "-10**400", "1e308"]
VALUES += ["numpy.nan", "numpy.float32('inf')", "numpy.float16('nan')", "numpy.array([1, 2])", "numpy.array('1')"]
VALUES += ["numpy.datetime64('2026-01-01')", "numpy.complex64(1)", "torch.tensor(math.nan)", "torch.zeros(2)"]
VALUES += [
    "torch.tensor(1j)",
    "datetime.timedelta(1)",
    "datetime.date.today()",
    "decimal.Decimal('NaN')",
    "ValueError('x')",
]
NUMBERS = [
    "[1.0, 0.0]",
    "(1, 0)",
    "[True, False]",
    "iter([1, 0])",
    "(x for x in (1, 0))",
    "map(int, '10')",
    "range(1, -1, -1)",
]
NUMBERS += ["numpy.array([1, 0])", "numpy.array([1, 0], 'float16')", "numpy.array([True, False])", "[numpy.int8(1), 0]"]
NUMBERS += ["torch.tensor([1.0, 0.0])", "torch.tensor([1, 0])", "torch.tensor([True, False])", "[torch.tensor(1), 0]"]
NUMBERS += ["torch.tensor([1.0, 0.0], dtype=torch.bfloat16)", "torch.tensor([1.0, 0.0], requires_grad=True)"]
NUMBERS += [
    "[fractions.Fraction(1), 0]",
    "collections.deque([1, 0])",
    "{'a': 1, 'b': 0}.values()",
    "[numpy.array(1), 0]",
]
NUMBERS += ["[enum.IntEnum('N', 'one').one, 0]", "memoryview(bytes([1, 0]))"]
EFFECTS = [
    "prompts.clear()",
    "answers.clear()",
    "rows.clear()",
    "rows[0].clear()",
    "rows[0]['id'] = 9",
    "prompts[0] = 3",
]
EFFECTS += ["answers.append('x')", "rows.extend(rows)", "rows[1].update(a=rows)", "del rows[0]['id']", "rows.reverse()"]
EFFECTS += [
    "print('noise')",
    "print('noise', file=sys.stderr)",
    "sys.stdout.flush()",
    "os.environ['X_OF_REWARD'] = '1'",
]
EFFECTS += [
    "warnings.warn('careful')",
    "random.seed(0)",
    "numpy.random.seed(0)",
    "subprocess.run(['true'], check=True)",
]
EFFECTS += ["threading.Thread(target=time.sleep, args=(0.01,)).start()", "torch.no_grad().__enter__()", "import json"]
EFFECTS += ["pid = os.fork() or os._exit(0); os.waitpid(pid, 0)", "sys.setswitchinterval(0.005)", "f.calls = 1"]
WAITS = [
    "time.sleep(0.4)",
    "threading.Event().wait(0.4)",
    "subprocess.run(['sleep', '0.4'])",
    "queue.Queue().get(timeout=0.4)",
]
WAITS += ["return [Endless(), 1]", "return [Disguised(lambda: time.sleep(0.4)), 1]"]
WAITS += ["yield time.sleep(0.4)", "end = time.time() + 0.4\n    while time.time() < end: pass"]
FILES = {
    "": "has no function of this name. It has none.",
    "def g(p, a, r): pass": "has no function of this name. It has g.",
    "f = 3": "has no function of this name",
    "f = 'f'": "has no function of this name",
    "f = None": "has no function of this name",
    "F = lambda p, a, r: a": "has no function of this name",
    "def f(": "raised SyntaxError",
    "def f(p, a, r) return 1": "raised SyntaxError",
    "  def f(p, a, r): pass": "raised IndentationError",
    "def f(p, a, r):\npass": "raised IndentationError",
    "if 1:\n\tx = 1\n        y = 2": "raised TabError",
    "print 'x'": "raised SyntaxError",
    "return 3": "raised SyntaxError",
    "f = = 3": "raised SyntaxError",
    "x = 'open": "raised SyntaxError",
    "\0": "raised SyntaxError",
    "await f": "raised SyntaxError",
    "from nothing_like_it import f": "raised ModuleNotFoundError",
    "from math import nothing": "raised ImportError",
    "from . import f": "raised ImportError",
    "import mine_not_there as f": "raised ModuleNotFoundError",
    "1 / 0": "raised ZeroDivisionError",
    "raise SystemExit": "raised SystemExit",
    "import sys; sys.exit(4)": "raised SystemExit: 4",
    "raise KeyboardInterrupt": "raised KeyboardInterrupt",
    "def f(): f()\nf()": "raised RecursionError",
    "undefined": "raised NameError",
    "import time; time.sleep(0.4)": "importing the file took more than 0.1 s",
    "def __getattr__(name): 1 / 0": "importing the file raised ZeroDivisionError",
    "import time\ndef __getattr__(name): time.sleep(60)": "importing the file took more than 0.1 s",
    "class Z:\n    __call__ = print\n    __module__ = property(len)\nz = Z()": "It has none",
    "assert False, 'no key'": "raised AssertionError: no key",
    "open('/nothing/at/all')": "raised FileNotFoundError",
}
SIGNATURES = ["f()", "f(prompts)", "f(prompts, answers)", "f(a, b, c, d)", "f(*, prompts, answers, rows)"]
WORDS = {
    "exakt": "is no reward",
    "Exact": "is no reward",
    "perplexity": "is no reward",
    "exact_match": "is no reward",
    "f": "is no reward",
    "1": "is no reward",
    "None": "is no reward",
    "exact numeric": "is no reward",
    "exact;numeric": "is no reward",
    "exact=2": "is no reward",
    "exact*2": "is no reward",
    "exact.py": "names no function",
    "dir/mine.py": "names no function",
    "mine.py:": "is neither",
    ":f": "is neither",
    ":": "is neither",
    "::": "is neither",
    "mine:f": "is neither",
    "mine.txt:f": "is neither",
    "mine.pyc:f": "is neither",
    "mine.py:f()": "is neither",
    "mine.py:f.g": "is neither",
    "mine.py:f g": "is neither",
    "mine.py:1f": "is neither",
    "mine.py:f:two": "is neither",
    "mine.py:lambda x: x": "is neither",
    "mine.py:f:1:2": "is neither",
    "exact:two": "is neither",
    "exact:1:2": "is neither",
    "exact:": "is neither",
    "exact:1,000:2": "is no reward",
    "exact:nan": "is no weight",
    "exact:inf": "is no weight",
    "exact:-inf": "is no weight",
    "exact:1e999": "is no weight",
    "mine.py:f:nan": "is no weight",
    "exact:0": "all weights are 0",
    "exact:-0.0": "all weights are 0",
    "exact:0,contains:0": "all weights are 0",
    "exact,exact": "is given twice",
    "exact,exact:2": "is given twice",
    "mine.py:f,mine.py:f:2": "is given twice",
    "": "is empty",
    ",": "is empty",
    " , ,": "is empty",
}
ANSWERS = [
    "",
    " ",
    "\n\n",
    "\0",
    "\ufeff4",
    "<|im_end|>",
    "<s></s>",
    "☃",
    "4" * 5000,
    "[" * 5000,
    "{",
    '{"a": NaN}',
    "1e999",
]
ANSWERS += ["-", "１", "\u202e4", "é" * 300, "\ud83d", "4\r", "```json\n```", "(((((", "a" * 3000 + "!"]
METRICS = ["exact", "contains", "numeric", "json", "regex", "choice"]


def of_metric(metric: str, pattern: str | None = None, choices: tuple[str, ...] = ("4", "5")) -> Rewards:
    if metric == "regex":
        pattern = pattern or r"(\d+)"
    found = Rewards(RewardPlan(reward=metric, reward_timeout=5.0, score_pattern=pattern, **HEAD))
    found.choose_among(list(choices))
    return found


def refusal(text: str, tmp_path, timeout: float = 5.0) -> str:
    """The line that a function's file ends a run with."""
    with pytest.raises(PlanError) as raised:
        rewards(text, tmp_path, timeout=timeout).of(ASKED)
    line = str(raised.value)
    assert line.isprintable() and line.startswith("--reward ") and line.count(". ") < 4 and len(line) < 500
    return line


def function(body: str) -> str:
    return f"{HEADER}\n\ndef f(prompts, answers, rows):\n    {body}\n"


@pytest.mark.parametrize("body", RAISES)
def test_what_a_function_raises_is_a_line(body, tmp_path):
    assert RAISES[body] in refusal(function(body), tmp_path)


@pytest.mark.parametrize("value", NO_LIST)
def test_what_is_no_list_of_numbers_is_a_line(value, tmp_path):
    assert "returned " in (line := refusal(function(f"return {value}"), tmp_path)) and "Return a list" in line


@pytest.mark.parametrize("value", LENGTHS)
def test_too_few_or_too_many_numbers_are_a_line(value, tmp_path):
    assert "values for 2 answers" in refusal(function(f"return {value}"), tmp_path)


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_is_no_reward_is_a_line_that_names_its_row(value, tmp_path):
    line = refusal(function(f"return [1.0, {value}]"), tmp_path)
    assert "gave " in line and "for the answer to rows:2. Return a number" in line


@pytest.mark.parametrize("value", NUMBERS)
def test_numbers_of_any_kind_are_rewards(value, tmp_path):
    assert rewards(function(f"return {value}"), tmp_path).of(ASKED).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("body", EFFECTS)
def test_what_a_function_does_beside_changes_no_reward(body, tmp_path, monkeypatch):
    monkeypatch.setenv("X_OF_REWARD", "")
    found = rewards(function(f"{body}\n    return [1.0, 0.0]"), tmp_path)
    with pytest.MonkeyPatch.context():
        assert found.of(ASKED).tolist() == found.of(ASKED).tolist() == [[1.0, 0.0]]
    assert [one.row for one in ASKED] == [{"id": 1}, {"id": 2}]


@pytest.mark.parametrize("body", WAITS)
def test_a_function_that_waits_longer_than_the_time_is_a_line(body, tmp_path):
    assert "did not return within 0.1 s" in refusal(function(body), tmp_path, timeout=0.1)


@pytest.mark.parametrize("text", FILES)
def test_a_file_that_cannot_be_used_is_a_line(text, tmp_path):
    assert FILES[text] in refusal(text, tmp_path, timeout=0.1)


@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_function_of_other_arguments_is_a_line(signature, tmp_path):
    found = refusal(f"def {signature}:\n    return [1, 0]", tmp_path)
    assert "is called with prompts, answers and rows" in found and "Write def f(prompts, answers, rows)." in found


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_names_no_reward_is_a_line(word):
    with pytest.raises(PlanError) as raised:
        parse_rewards(word)
    assert WORDS[word] in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_gives_every_answer_a_number(metric, answer):
    asked = Asked("2+2=", answer, "4", {}, "rows:1")
    own = Asked("2+2=", answer, answer, {}, "rows:2")
    found = of_metric(metric).of([asked, own]).tolist()[0]
    assert set(found) <= {0.0, 1.0}
    assert found[0] == 0.0 or "4" in answer or answer == "１"
    if metric == "exact":
        assert found[1] == 1.0


@pytest.mark.parametrize(
    ("answer", "right"), [("4", 1), ("It is 4.", 1), ("5, not 4", 0), ("45", 0), ("", 0), ("4 or 5", 1)]
)
def test_a_choice_is_the_first_of_the_rows_answers_in_it(answer, right):
    assert of_metric("choice").of([Asked("2+2=", answer, "4", {}, "rows:1")]).tolist() == [[right]]


@pytest.mark.parametrize(
    ("choices", "answer", "right"),
    [
        (("C", "C++", "C#", "Cobol"), "Write it in C++.", "C++"),
        (("C", "C++", "C#", "Cobol"), "C# it is, not C", "C#"),
        (("C", "C++", "C#", "Cobol"), "a cobol or C program", "Cobol"),
        (("C", "C++", "C#", "Cobol"), "because of c", "C"),
        (("+", "-", "--"), "a - b", "-"),
        (("+", "-", "--"), "a -- b + c", "--"),
        (("👍", "👎"), "I say 👎", "👎"),
        (("A", "a"), "an a", "a"),
        (("no", "no!"), "No.", "no"),
        (("no", "no!"), "No!", "no!"),
        (("New York", "York", "C", "C++"), "in new-york", "New York"),
    ],
)
def test_choices_without_words_or_of_the_same_words_are_told_apart(choices, answer, right):
    rewards = of_metric("choice", choices=choices)
    asked = [Asked("Which? ", answer, choice, {}, "rows:1") for choice in choices]
    assert rewards.of(asked).tolist() == [[float(choice == right) for choice in choices]]


def test_code_that_changes_the_working_directory_leaves_the_run_in_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moves = "import os\nos.chdir('/')\ndef f(prompts, answers, rows):\n    os.chdir('/')\n    return [0.0] * 2\n"
    rewards(moves, tmp_path).of(ASKED)
    assert os.getcwd() == str(tmp_path)


def test_code_that_empties_the_environment_ends_no_run_with_a_traceback():
    with on_day("2026-01-02"):
        os.environ.pop(DAY)
    assert DAY not in os.environ
