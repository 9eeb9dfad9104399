"""The config files of examples/accelerate and accelerate_configs."""

import pytest
import yaml

from finetune.distributed import accelerate_config
from tests.support.accelerated import CONFIGS
from tests.support.commands import ROOT


def test_every_shipped_config_file_is_one_that_the_plan_knows():
    from accelerate.commands.config.config_args import ClusterConfig

    for file in sorted(CONFIGS.glob("*.yaml")):
        words = yaml.safe_load(file.read_text())
        ClusterConfig.from_yaml_file(file)  # accelerate refuses keys it does not know
        assert words["mixed_precision"] == "no" and file.stem in accelerate_config.NAMES, file


@pytest.mark.promise("FT_11")
@pytest.mark.parametrize("number", [4, 8])
def test_the_config_files_of_the_older_guide_are_there_and_mean_replicas(number):
    from accelerate.commands.config.config_args import ClusterConfig

    config = ClusterConfig.from_yaml_file(ROOT / "accelerate_configs" / f"uncompiled_{number}.yaml")
    assert config.num_processes == number and str(config.distributed_type).endswith("MULTI_GPU")
    assert accelerate_config.method_of({"ACCELERATE_MIXED_PRECISION": config.mixed_precision}) == "ddp"
