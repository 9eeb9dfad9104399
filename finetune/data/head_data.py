"""Data of a run whose head reads whole documents: nothing is generated from its rows."""

from finetune.data.run_data import Data


class HeadData(Data):
    """Rows with labels, pairs or texts that belong together, in the place of answers."""

    def sample_prompts(self, number: int) -> list[tuple]:
        """None: the model answers nothing."""
        return []
