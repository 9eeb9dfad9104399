"""The objective of a step."""

from dataclasses import dataclass, field

from finetune.parts.fields import Settings
from finetune.parts.heads import HEADS
from finetune.parts.objectives import OBJECTIVES, ObjectiveFacts, objective_of


def names_in(value: str | list[str] | None) -> tuple[str, ...]:
    """The names that a flag was given."""
    if isinstance(value, str):
        return (value,)
    return tuple(value or ())


@dataclass(frozen=True)
class ObjectivePlan:
    """The objective of a step. `facts`: its row of OBJECTIVES; `arguments`: of its class.

    `load_balancing`: the routers' loss is added with this weight. `precomputes_reference`: the reference's
    log-probabilities are computed once; None until the number of rows is known. `reference_is_adapter`: it is the base
    with the adapter that the run continues from. `label_smoothing` and `neftune_noise_alpha`: of training, never of an
    evaluation. `temperature`: divides the logits of answers that are sampled and learned from. `labels`: names of
    classes, by number; none until the rows were read.
    """

    name: str = "none"
    facts: ObjectiveFacts = OBJECTIVES["none"]
    arguments: dict[str, float] = field(default_factory=dict)
    load_balancing: float = 0.0
    precomputes_reference: bool | None = None
    reference_is_adapter: bool = False
    label_smoothing: float = 0.0
    neftune_noise_alpha: float = 0.0
    temperature: float = 1.0
    labels: tuple[str, ...] = ()

    @property
    def outputs(self) -> int:
        """The outputs of the head beside the model's own; 0 without one, or where the rows are not read yet."""
        width = HEADS[self.facts.head].width
        if isinstance(width, int):
            return width
        return int(self.arguments.get(width) or 0)

    def described(self, what: str) -> str:
        """Name of the training `what`, with the objective if it is not next-token."""
        if self.facts.is_preference:
            return f"{self.name} with {what}"
        return what

    @classmethod
    def of(cls, settings: Settings) -> "ObjectivePlan":
        s = settings
        name = objective_of(settings)
        facts = OBJECTIVES[name]
        given = {argument: getattr(s, flag) for argument, flag in facts.arguments.items()}
        names = names_in(s.class_names)  # one alone is a word, as other flags have
        arguments = {
            name: len(names) if facts.arguments[name] == "class_names" else value for name, value in given.items()
        }
        if s.precompute_ref_log_probs == "auto":
            once = None
        else:
            once = s.precompute_ref_log_probs == "true"
        continues = s.adapter is not None and not s.adapter_merge
        return cls(
            name,
            facts,
            arguments,
            s.router_aux_loss_coef,
            once,
            continues,
            s.label_smoothing,
            s.neftune_noise_alpha,
            s.temperature,
            names,
        )
