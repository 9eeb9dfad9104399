"""Documents packed in one sequence train as the same documents padded and as each alone."""

import pytest

from tests.support import tiny
from tests.support.cells import but_slow
from tests.support.engines import assert_same, batches, engine, gradients

# Of the others the proof in tests/torch_engine/test_checks.py compares the logits.
QUICK = ("llama", "gpt2", "mistral", "gemma3", "mixtral", "gpt_oss")


@pytest.mark.parametrize("architecture", but_slow([a for a in tiny.ARCHITECTURES if a not in tiny.PADDED], QUICK))
def test_packed_padded_and_separate_documents_have_equal_losses_and_gradients(architecture):
    flat = engine(architecture)
    assert flat.layout == "padding_free"
    padded = engine(architecture, layout="padded")
    results = {
        "padding_free": (flat, batches("padding_free")),
        "padded": (padded, batches("padded")),
        "alone": (padded, batches("padded", batch_size=1)),
    }
    losses = {k: (r.nll, r.num_targets) for k, (e, b) in results.items() for r in [e.evaluate(b)]}
    assert losses["padding_free"][1] == losses["padded"][1] == losses["alone"][1]
    for name in ("padded", "alone"):
        assert losses["padding_free"][0] == pytest.approx(losses[name][0], rel=1e-6)
    grads = {k: gradients(e, b) for k, (e, b) in results.items()}
    # 1e-5: the sum over a document's tokens is taken in another order in each layout.
    assert_same(grads["padding_free"], grads["alone"], 1e-5)
    assert_same(grads["padded"], grads["alone"], 1e-5)
