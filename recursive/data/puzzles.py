"""Puzzles as token grids: Sudoku of any box shape and mazes, generated or read from csv, and their symmetries.

A Sudoku cell is token value + 1, 1 a blank, 0 is never used (the pad id). Grids are flat, row by row. Everything drawn
at random is a function of a seed, so that a data set, or a row's symmetry in an epoch, can be computed again.
"""

import contextlib
import csv
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finetune.errors import PlanError

BLANK = 1
# cells of a maze
WALL = 1
FREE = 2
START = 3
GOAL = 4
PATH = 5
MAZE_TOKENS = 6
REPEATS = 500  # in a row, after which there are no more different ones worth looking for


@dataclass(frozen=True)
class Sudoku:
    """A Sudoku of `size` values, in boxes of box_rows x box_columns = size cells."""

    box_rows: int
    box_columns: int

    @property
    def size(self) -> int:
        return self.box_rows * self.box_columns

    @property
    def vocab_size(self) -> int:
        return self.size + 2  # the pad token and the blank

    def boxes(self) -> np.ndarray:
        """The box of each cell, flat."""
        rows, columns = np.divmod(np.arange(self.size**2), self.size)
        return rows // self.box_rows * self.box_rows + columns // self.box_columns


SHAPES = {4: Sudoku(2, 2), 6: Sudoku(2, 3), 9: Sudoku(3, 3)}


def sudoku_of(size: int) -> Sudoku:
    if size not in SHAPES:
        raise PlanError(f"--size {size}: there is no Sudoku of that size. Use {', '.join(map(str, SHAPES))}.")
    return SHAPES[size]


# ---- Sudoku


def solutions(sudoku: Sudoku, grid: list[int], limit: int, order: list[int] | None = None) -> list[list[int]]:
    """Up to `limit` completions of a grid of values (0: blank). `order`: the values in the order they are tried."""
    size = sudoku.size
    boxes = sudoku.boxes().tolist()
    order = list(order if order is not None else range(1, size + 1))
    full = (1 << size) - 1
    rows = [0] * size
    columns = [0] * size
    of_box = [0] * size
    grid = list(grid)
    for cell, value in enumerate(grid):
        if value:
            bit, row, column = 1 << (value - 1), *divmod(cell, size)
            if (rows[row] | columns[column] | of_box[boxes[cell]]) & bit:
                return []
            rows[row] |= bit
            columns[column] |= bit
            of_box[boxes[cell]] |= bit
    found = []

    def search() -> bool:
        best = None
        fewest = size + 1
        for cell, value in enumerate(grid):
            if value == 0:
                free = full & ~(rows[cell // size] | columns[cell % size] | of_box[boxes[cell]])
                if free.bit_count() < fewest:
                    best = cell
                    fewest = free.bit_count()
                    choices = free
                    if fewest <= 1:
                        break
        if best is None:
            found.append(list(grid))
            return len(found) == limit
        row, column = divmod(best, size)
        for value in order:
            bit = 1 << (value - 1)
            if choices & bit:
                grid[best] = value
                rows[row] |= bit
                columns[column] |= bit
                of_box[boxes[best]] |= bit
                if search():
                    return True
                grid[best] = 0
                rows[row] ^= bit
                columns[column] ^= bit
                of_box[boxes[best]] ^= bit
        return False

    search()
    return found


# Puzzles of 4 x 4 cells by the clues that are left at least, counted over all 288 grids; with 0 to 4: minimal ones.
NUM_OF_SIZE_4 = (*[85_632] * 5, 285_696, 1_041_408, 2_141_184, 2_961_024, 2_958_336, 2_204_928, 1_239_552, 522_624)
NUM_OF_SIZE_4 += (161_280, 34_560, 4_608, 288)


def generate_sudoku(sudoku: Sudoku, count: int, seed: int, clues: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(puzzles, solutions) as tokens, `count` different ones with one solution each.

    Clues are removed in random order while the solution stays unique, down to `clues`: with 0, to a minimal puzzle.
    """
    if sudoku.size == 4:
        most = NUM_OF_SIZE_4[min(clues, 16)]
    else:
        most = count
    if count > most:
        raise PlanError(f"--count {count}, training and test: there are {most:,} different puzzles. Use fewer.")
    rng = np.random.default_rng([seed, sudoku.size])
    seen = set()
    answers = []
    puzzles: list[list[int]] = []
    repeats = 0
    while len(puzzles) < count:
        if repeats > REPEATS:
            raise PlanError(f"--count {count}: only {len(puzzles)} different puzzles were found. Use fewer.")
        answer = _random_grid(sudoku, rng)
        puzzle = list(answer)
        left = sudoku.size**2
        for cell in rng.permutation(sudoku.size**2):
            if left <= clues:
                break
            kept, puzzle[cell] = puzzle[cell], 0
            if len(solutions(sudoku, puzzle, 2)) > 1:
                puzzle[cell] = kept
            else:
                left -= 1
        if tuple(puzzle) in seen:
            repeats = repeats + 1
        else:
            repeats = 0
        if not repeats:
            seen.add(tuple(puzzle))
            puzzles.append(puzzle)
            answers.append(answer)
    return np.array(puzzles, np.int32) + 1, np.array(answers, np.int32) + 1


def _random_grid(sudoku: Sudoku, rng: np.random.Generator) -> list[int]:
    size = sudoku.size
    first = rng.permutation(size) + 1
    grid = [*map(int, first), *[0] * (size**2 - size)]
    return solutions(sudoku, grid, 1, order=(rng.permutation(size) + 1).tolist())[0]


def sudoku_symmetry(sudoku: Sudoku, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(cells, values) of a random symmetry: new grid = values[old grid[cells]]; blank and pad stay as they are."""
    size = sudoku.size

    def lines(bands: int, of_band: int) -> np.ndarray:
        inside = [band * of_band + rng.permutation(of_band) for band in rng.permutation(bands)]
        return np.concatenate(inside)

    rows = lines(size // sudoku.box_rows, sudoku.box_rows)
    columns = lines(size // sudoku.box_columns, sudoku.box_columns)
    cells = rows[:, None] * size + columns[None]
    if sudoku.box_rows == sudoku.box_columns and rng.random() < 0.5:
        cells = cells.T
    return cells.reshape(-1), np.concatenate([[0, BLANK], rng.permutation(size) + 2])


def read_sudoku_csv(path: Path, limit: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """(puzzles, solutions) as tokens, and the number of repeated rows left out.

    From a csv with columns puzzle (or question, quizzes) and solution (or answer). Values are digits, blanks '.' or
    '0'. Raises PlanError naming the line.
    """
    puzzles: list[np.ndarray] = []
    answers = []
    seen = set()
    repeated = 0
    with open(path, newline="", encoding="utf-8-sig") as file, _decoded(path):
        reader = csv.DictReader(file)
        names = reader.fieldnames or []
        asked = next((n for n in ("puzzle", "question", "quizzes") if n in names), None)
        told = next((n for n in ("solution", "answer", "solutions") if n in names), None)
        if asked is None or told is None:
            raise PlanError(f"{path}: has the columns {names}, not 'puzzle' and 'solution'. Rename them.")
        for row in reader:
            puzzle, answer = (row[n] or "" for n in (asked, told))
            where = f"{path}:{reader.line_num}"
            if len(puzzle) != len(answer) or len(puzzle) not in [size**2 for size in SHAPES]:
                raise PlanError(f"{where}: {len(puzzle)} and {len(answer)} cells. Both must be 16, 36 or 81.")
            if puzzles and len(puzzle) != len(puzzles[0]):
                raise PlanError(f"{where}: {len(puzzle)} cells, the rows before have {len(puzzles[0])}.")
            same = puzzle.replace(".", "0")
            if same in seen:
                repeated += 1
                continue
            seen.add(same)
            puzzles.append(_tokens_of(puzzle, where))
            answers.append(_tokens_of(answer, where))
            if (answers[-1] == BLANK).any() or ((puzzles[-1] != BLANK) & (puzzles[-1] != answers[-1])).any():
                raise PlanError(f"{where}: the solution does not complete the puzzle. Correct or remove the row.")
            if limit and len(puzzles) == limit:
                break
    if not puzzles:
        raise PlanError(f"{path}: has no rows.")
    return np.array(puzzles, np.int32), np.array(answers, np.int32), repeated


@contextlib.contextmanager
def _decoded(path: Path):
    try:
        yield
    except (UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path}: cannot be read as csv ({error}). Save it as UTF-8.") from None


def _tokens_of(text: str, where: str) -> np.ndarray:
    size = int(len(text) ** 0.5)
    values = [0 if c == "." else "0123456789".find(c) for c in text]
    if not all(0 <= v <= size for v in values):
        raise PlanError(f"{where}: holds something other than '.' and 0 to {size}. Correct or remove the row.")
    return np.array(values, np.int32) + 1


# ---- mazes


def generate_mazes(side: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(mazes, mazes with the shortest path drawn) as tokens: side x side cells, walls around, no two equal."""
    if side < 5 or side % 2 == 0:
        raise PlanError(f"--size {side}: a maze needs an odd number of cells per side, 5 or more.")
    rng = np.random.default_rng([seed, side])
    seen = set()
    solved = []
    mazes: list[np.ndarray] = []
    repeats = 0
    while len(mazes) < count:
        if repeats > REPEATS:
            raise PlanError(f"--count {count}: only {len(mazes)} different mazes were found. Use fewer.")
        maze = _random_maze(side, rng)
        if maze.tobytes() in seen:
            repeats = repeats + 1
        else:
            repeats = 0
        if repeats:
            continue
        seen.add(maze.tobytes())
        answer = maze.copy()
        for cell in shortest_path(maze):
            if answer[cell] == FREE:
                answer[cell] = PATH
        mazes.append(maze.reshape(-1))
        solved.append(answer.reshape(-1))
    return np.array(mazes, np.int32), np.array(solved, np.int32)


def _random_maze(side: int, rng: np.random.Generator) -> np.ndarray:
    """A spanning tree of the odd cells by a random depth-first walk, with a few walls opened so that paths compete."""
    maze = np.full((side, side), WALL, np.int32)
    maze[1, 1], stack = FREE, [(1, 1)]
    while stack:
        row, column = stack[-1]
        ways = [(row + a, column + b) for a, b in ((-2, 0), (2, 0), (0, -2), (0, 2))]
        ways = [(r, c) for r, c in ways if 0 < r < side and 0 < c < side and maze[r, c] == WALL]
        if not ways:
            stack.pop()
            continue
        r, c = ways[rng.integers(len(ways))]
        maze[r, c] = maze[(r + row) // 2, (c + column) // 2] = FREE
        stack.append((r, c))
    inner = maze[1:-1, 1:-1]
    inner[(inner == WALL) & (rng.random(inner.shape) < 0.05)] = FREE
    free = np.argwhere(maze == FREE)
    start, goal = free[rng.choice(len(free), 2, replace=False)]
    maze[tuple(start)], maze[tuple(goal)] = START, GOAL
    return maze


def shortest_path(maze: np.ndarray) -> list[tuple[int, int]]:
    """Cells from start to goal, by breadth-first search."""
    start = tuple(np.argwhere(maze == START)[0])
    came: dict[tuple, tuple | None] = {start: None}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        if maze[cell] == GOAL:
            break
        for step in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            beside = cell[0] + step[0], cell[1] + step[1]
            if maze[beside] != WALL and beside not in came:
                came[beside] = cell
                queue.append(beside)
    path = [cell]
    while (before := came[path[-1]]) is not None:
        path.append(before)
    return path[::-1]


def maze_symmetry(side: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(cells, values) of one of the eight symmetries of a square."""
    cells = np.arange(side * side).reshape(side, side)
    cells = np.rot90(cells, int(rng.integers(4)))
    return (cells.T if rng.random() < 0.5 else cells).reshape(-1), np.arange(MAZE_TOKENS)


def symmetry(kind: str, seq_len: int, seed: int, epoch: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """(cells, values) under which row `row` is seen in epoch `epoch`. `kind`: sudoku or maze."""
    rng = np.random.default_rng([seed, epoch, row])
    side = int(seq_len**0.5)
    if kind == "sudoku":
        return sudoku_symmetry(SHAPES[side], rng)
    return maze_symmetry(side, rng)
