"""Failures of libraries on other people's files, in lines that name the flag, the fact and what to do."""

import pytest

from finetune.errors import PlanError
from finetune.system.untrusted import untrusted

CLOSED = PermissionError(13, "Permission denied", "/there/config.json")


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ("--model_name there: its config.json is not that of a model", "--model_name there: /there/config.json: "),
        ("/there/config.json: is damaged", "/there/config.json: "),
    ],
)
def test_a_file_that_may_not_be_opened_is_not_called_broken_and_the_flag_is_named(fact, said):
    with pytest.raises(PlanError) as raised, untrusted(fact, "Save the model again."):
        raise CLOSED
    assert str(raised.value) == f"{said}permission denied. Change its permissions."


def test_what_is_not_about_a_file_s_content_keeps_its_fact_and_remedy():
    with pytest.raises(PlanError) as raised, untrusted("--log_to wandb: it failed", "Omit it.", reads=False):
        raise CLOSED
    assert str(raised.value).startswith("--log_to wandb: it failed (") and "'/there/config.json'" in str(raised.value)
    assert str(raised.value).endswith("). Omit it.")
