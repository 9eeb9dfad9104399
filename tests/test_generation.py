from finetune.generation import NewTokens


def test_rows_end_at_their_stop_tokens_or_when_they_are_stopped():
    shown = []
    new = NewTokens(3, {9}, lambda row, ids: row == 1 and len(ids) == 2, lambda ids: shown.append(list(ids)))
    assert not new.add([1, 2, 9])
    assert not new.add([3, 4, 5])
    assert new.add([9, 6, 7])
    assert new.ids == [[1, 3], [2, 4], []] and shown == [[1], [1, 3]]
