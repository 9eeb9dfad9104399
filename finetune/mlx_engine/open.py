"""One rank of an MLX run, alone or under mlx.launch: it compares logits, loads the model, and builds the engine."""

from collections.abc import Callable

from finetune.engine import Batch
from finetune.mlx_engine import load, logit_check
from finetune.mlx_engine.engine import MLXEngine
from finetune.mlx_engine.vocabulary import config_with
from finetune.mlx_options import MLXOptions
from finetune.plan.run_plan import RunPlan
from finetune.system.mlx_of_caller import keep_mlx


class MLXRank:
    """`reference(folder, ids)`: transformers' logits, which MLX's are compared with before a run.

    `baseline`, `loads_own_shards`: as TorchRank's.
    """

    baseline = 0
    loads_own_shards = False

    def __init__(self, plan: RunPlan, reference: Callable):
        keep_mlx()
        self.plan = plan
        self.reference = reference

    def load(self, batches: list[Batch] | None = None, initial_adapter: dict | None = None):
        plan = self.plan
        options = MLXOptions.read(plan.settings.mlx_config)
        assert plan.files is not None, "a run of the mlx engine has the model's files"
        logit_check.check(plan.files, options, plan.data.context_length, self.reference)
        return load.load_model(plan.model.folder, plan.model.config, plan, plan.model.vocabulary)

    def build(self, model: tuple, pad_id: int) -> MLXEngine:
        loaded, keys = model
        config = config_with(self.plan.model.config, self.plan.model.vocabulary)
        return load.build_engine(loaded, keys, self.plan, pad_id, config, self.plan.dims.world_size)
