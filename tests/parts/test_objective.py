"""Arguments of an objective, as flags give them."""

import pytest

from finetune.parts.parts import Parts
from tests.support.planned import settings_of


@pytest.mark.parametrize("word", ["true", "false", "auto"])
def test_a_flag_s_word_is_its_argument(word):
    """Once a word of three letters was a number of names, and negatives were not learned from."""
    objective = Parts(settings_of("lora", task="embed", hard_negatives=word)).objective
    assert objective.arguments["hard_negatives"] == word


@pytest.mark.parametrize(("names", "outputs"), [(["red", "blue", "green"], 3), ("red,blue", 1), (None, 0)])
def test_names_of_classes_are_counted(names, outputs):
    assert Parts(settings_of("lora", task="classify", class_names=names)).objective.outputs == outputs
