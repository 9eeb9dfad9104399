"""Puzzles: one solution each, symmetries that keep it, files that say where they are wrong."""

import numpy as np
import pytest

from finetune.errors import PlanError
from recursive.data import puzzles

SIZES = sorted(puzzles.SHAPES)


def is_solution(sudoku, tokens) -> bool:
    grid, wanted = tokens.reshape(sudoku.size, -1) - 1, set(range(1, sudoku.size + 1))
    boxes = [tokens[sudoku.boxes() == box] - 1 for box in range(sudoku.size)]
    return all(set(map(int, group)) == wanted for group in (*grid, *grid.T, *boxes))


@pytest.mark.parametrize("size", SIZES)
def test_generated_sudokus_are_different_minimal_and_have_one_solution(size):
    sudoku = puzzles.SHAPES[size]
    asked, answers = puzzles.generate_sudoku(sudoku, 4, seed=1)
    assert len({row.tobytes() for row in asked}) == 4
    for puzzle, answer in zip(asked, answers, strict=True):
        assert is_solution(sudoku, answer)
        values = (puzzle - 1).tolist()
        assert puzzles.solutions(sudoku, values, 2) == [(answer - 1).tolist()]
        for cell in np.flatnonzero(puzzle != puzzles.BLANK):
            less = [*values[:cell], 0, *values[cell + 1 :]]
            assert len(puzzles.solutions(sudoku, less, 2)) == 2
    again = puzzles.generate_sudoku(sudoku, 4, seed=1)
    assert np.array_equal(asked, again[0]) and np.array_equal(answers, again[1])


def test_clues_are_kept_down_to_the_number_asked_for():
    asked, _ = puzzles.generate_sudoku(puzzles.SHAPES[6], 3, seed=0, clues=18)
    assert ((asked != puzzles.BLANK).sum(1) == 18).all()


@pytest.mark.parametrize("size", SIZES)
def test_a_symmetry_of_a_sudoku_is_a_sudoku_with_the_same_solution(size):
    sudoku = puzzles.SHAPES[size]
    (asked,), (answer,) = puzzles.generate_sudoku(sudoku, 1, seed=2)
    seen = set()
    for epoch in range(20):
        cells, values = puzzles.symmetry("sudoku", size**2, 0, epoch, 7)
        puzzle, solved = values[asked[cells]], values[answer[cells]]
        assert is_solution(sudoku, solved)
        assert puzzles.solutions(sudoku, (puzzle - 1).tolist(), 2) == [(solved - 1).tolist()]
        seen.add(puzzle.tobytes())
    assert len(seen) == 20
    one, other = (puzzles.symmetry("sudoku", size**2, 0, 3, 7) for _ in range(2))
    assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])


def test_mazes_have_the_shortest_path_drawn():
    asked, answers = puzzles.generate_mazes(9, 5, seed=0)
    assert len({row.tobytes() for row in asked}) == 5
    for maze, answer in zip(asked.reshape(-1, 9, 9), answers.reshape(-1, 9, 9), strict=True):
        path = puzzles.shortest_path(maze)
        steps = [abs(a - c) + abs(b - d) for (a, b), (c, d) in zip(path, path[1:], strict=False)]
        assert set(steps) == {1} and maze[path[0]] == puzzles.START and maze[path[-1]] == puzzles.GOAL
        assert {tuple(map(int, cell)) for cell in np.argwhere(answer == puzzles.PATH)} == {
            tuple(map(int, cell)) for cell in path[1:-1]
        }
        cells, _ = puzzles.symmetry("maze", 81, 0, 1, 2)
        assert len(puzzles.shortest_path(maze.reshape(-1)[cells].reshape(9, 9))) == len(path)


def test_a_csv_is_read_and_a_wrong_row_is_named(tmp_path):
    file = tmp_path / "puzzles.csv"
    file.write_text("puzzle,solution\n1..4..1...4.4..1,1234341221434321\n")
    asked, answers, repeated = puzzles.read_sudoku_csv(file)
    assert repeated == 0
    row = "1..4..1...4.4..1,1234341221434321\n"
    file.write_text("\ufeffpuzzle,solution\n" + row + row.replace(".", "0"), encoding="utf-8")
    found = puzzles.read_sudoku_csv(file)
    assert len(found[0]) == 1 and found[2] == 1
    assert asked.shape == answers.shape == (1, 16) and asked[0, 1] == puzzles.BLANK and answers[0, 1] == 3
    for text, fact in (
        ("quiz,solution\n1,1\n", "not 'puzzle' and 'solution'"),
        ("puzzle,solution\n1..4,1234\n", ":2: 4 and 4 cells"),
        ("puzzle,solution\n2..4..1...4.4..1,1234341221434321\n", "does not complete the puzzle"),
        ("puzzle,solution\n7..4..1...4.4..1,1234341221434321\n", "something other than"),
        (f"puzzle,solution\n{'.' * 17},{'1' * 17}\n", "17 and 17 cells"),
        ("puzzle,solution\n\u00b2..4..1...4.4..1,1234341221434321\n", "something other than"),
        ("puzzle,solution\n\u0663..4..1...4.4..1,1234341221434321\n", "something other than"),
        ("puzzle,solution\n", "has no rows"),
        (b"puzzle,solution\n\xff\xfe", "cannot be read as csv"),
    ):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(PlanError, match=fact.replace(".", r"\.")):
            puzzles.read_sudoku_csv(file)


def test_impossible_sizes_are_refused():
    with pytest.raises(PlanError, match="no Sudoku of that size"):
        puzzles.sudoku_of(5)
    with pytest.raises(PlanError, match="odd number of cells"):
        puzzles.generate_mazes(8, 1, 0)
    with pytest.raises(PlanError, match="only .* different mazes"):
        puzzles.generate_mazes(5, 10**4, 0)
