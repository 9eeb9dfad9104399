"""Mutations of what is done with a finished run: its scores, its card, the Hub, merging, answering."""

from tests.mutations.mutation import Mutation

SAVE = "finetune/torch_engine/weights/save.py"
EVALUATION = "finetune/run/evaluation.py"

TABLE = (
    Mutation(
        "AT_01",
        "the second score is of the base as trained again",
        "finetune/run/conclusion.py",
        'precision="auto", n_bits=16, quiet=True',
        'precision="auto", n_bits=None, quiet=True',
    ),
    Mutation(
        "AT_02",
        "score.py opens a quantized run on a dense base",
        "finetune/trained_base.py",
        'settings = replace(settings, train_type="qlora", **changes)',
        "pass",
    ),
    Mutation(
        "AT_03",
        "the card has no scores",
        "finetune/run/model_card.py",
        '**{name: _numbers(scores.get(name)) for name in ("before", "after", "dense")},',
        "",
    ),
    Mutation(
        "AT_04",
        "an id that the Hub refuses is taken",
        "finetune/model_files/hub_upload.py",
        "if not ID.fullmatch(repo_id) or ",
        "if ",
    ),
    Mutation(
        "AT_05",
        "the merged base has no adapter in it",
        "finetune/torch_engine/weights/merge.py",
        "merged = change.apply(tensor, dtype)",
        "merged = tensor.to(dtype)",
    ),
    Mutation(
        "AT_06",
        "merging leaves out the adapter's scale",
        "finetune/torch_engine/weights/merge.py",
        "return block.addmm_(part.left[rows], part.right, alpha=part.scaling)",
        "return block.addmm_(part.left[rows], part.right)",
    ),
    Mutation(
        "AT_07",
        "all tensors are read before the first is written",
        SAVE,
        "for turn in self.turns:\n                    self._write_turn({n: read(n) for n in turn}, places)",
        "for turn in [{n: read(n) for n in turn} for turn in self.turns]:\n"
        "                    self._write_turn(turn, places)",
    ),
    Mutation(
        "AT_08",
        "--score_metric is ignored for exact match",
        EVALUATION,
        "asked = [name for name in names if name in answer_metrics.OF_ANSWERS]",
        'asked = ["exact"]',
    ),
    Mutation(
        "AT_09",
        "ranks that keep their shards do not wait for the one that answers longest",
        "finetune/torch_engine/generation/generate.py",
        "synced_gpus=synced,",
        "synced_gpus=False,",
    ),
    Mutation(
        "AT_10",
        "a model that is written has no rope_theta for older readers",
        SAVE,
        '        add_older_names(folder / "config.json")\n',
        "",
    ),
)
