"""The engine's state: what it takes up, and when its random state fits."""

from tests.support.engines import batches, engine


def test_random_state_of_other_degrees_is_not_taken_up(device):
    """Ranks of a tensor-parallel group draw the same dropout, which another layout's states would not give."""
    one, other = engine(lora_dropout=0.1, device=device), engine(lora_dropout=0.1, device=device)
    one.train_step(batches(), 1e-3)
    trainable, (moments, values), rng = one.trainable_state(), one.optimizer_state(), one.rng_state()
    assert values["degrees"] == [1, 1, 1, 1, 1]
    other.load_state(trainable, moments, values | {"degrees": [1, 2, 1, 1, 1]}, rng)
    assert other.reseeded and not (other.rng_state()["host"] == rng["host"]).all()
    other.load_state(trainable, moments, {k: v for k, v in values.items() if k != "degrees"}, rng)
    assert (other.rng_state()["host"] == rng["host"]).all()
