"""Settings of a run without --dataset: the demo's rows and length."""

from finetune.shipped import shipped

EXAMPLES = shipped("examples")
DEMO_DATASET = str(EXAMPLES / "orders_train.jsonl")
DEMO_TEST = str(EXAMPLES / "orders_test.jsonl")
# A demo is to be short: one pass in steps of 8 rows reaches its score. Rate and rows per step are the plan's.
MAX_STEPS = 18
MAX_NEW_TOKENS = 40  # its longest answer has 34; until it is trained the model goes on for as long as it may


def demo_defaults(requested: dict) -> dict:
    """The demo's rows and length if no dataset is given; else nothing."""
    if requested.get("dataset") is not None:
        return {}
    if requested.get("num_epochs"):
        length = {}
    else:
        length = {"max_steps": MAX_STEPS}
    return {"dataset": DEMO_DATASET, "score_dataset": DEMO_TEST, "score_max_new_tokens": MAX_NEW_TOKENS, **length}
