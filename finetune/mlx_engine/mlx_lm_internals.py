"""Every import from mlx-lm's undocumented modules, so that an upgrade is checked in one place."""

from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache  # noqa: F401
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear  # noqa: F401
from mlx_lm.models.switch_layers import _gather_sort as gather_sort  # noqa: F401
from mlx_lm.models.switch_layers import _scatter_unsort as scatter_unsort  # noqa: F401
from mlx_lm.utils import _get_classes as model_classes  # noqa: F401
