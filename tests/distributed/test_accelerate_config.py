"""The config files of examples/accelerate."""

import yaml

from finetune.distributed import accelerate_config
from tests.support.accelerated import CONFIGS


def test_every_shipped_config_file_is_one_that_the_plan_knows():
    from accelerate.commands.config.config_args import ClusterConfig

    for file in sorted(CONFIGS.glob("*.yaml")):
        words = yaml.safe_load(file.read_text())
        ClusterConfig.from_yaml_file(file)  # accelerate refuses keys it does not know
        assert words["mixed_precision"] == "no" and file.stem in accelerate_config.NAMES, file
