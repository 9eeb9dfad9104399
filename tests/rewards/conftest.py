import json

import pytest


@pytest.fixture(scope="session")
def reward_prompts(tmp_path_factory):
    """24 prompts without answers, with a column for the function."""
    file = tmp_path_factory.mktemp("prompts") / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"What is {i} plus {i}? ", "id": i}) + "\n" for i in range(24)))
    return file
