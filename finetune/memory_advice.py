"""A refused allocation as one line that says what to lower, with the present values; the words are the engines'."""

import contextlib
from pathlib import Path

from finetune.errors import OutOfMemoryError, is_out_of_memory
from finetune.parts.parts import Parts


@contextlib.contextmanager
def memory_advice(message: str, refusals: tuple[str, ...] = ()):
    """Raises OutOfMemoryError(message) if memory is refused inside. `refusals`: what a framework says besides."""
    try:
        yield
    except (MemoryError, RuntimeError, UserWarning) as error:  # the last: see process.NO_MEMORY_FOR_KERNEL
        if not (is_out_of_memory(error) or any(text in str(error) for text in refusals)):
            raise
        raise OutOfMemoryError(message) from error


def on_loading(folder: Path | str, plan: Parts) -> str:
    settings = plan.settings  # the words as they are written
    return (
        f"--model_name {folder}: loading it took more memory than there is. Use --train_type qlora (now "
        f"{settings.train_type}), --cache_dequantized false (now {settings.cache_dequantized}) or a smaller model."
    )


def on_microbatch(framework: str, size: str, plan: Parts, *switches: str) -> str:
    """`size`: of the microbatch, as 4x512; `switches`: flags that save memory."""
    s = plan.settings
    graphs = ""
    if s.cuda_graphs == "true":
        graphs = ", or use --cuda_graphs false: a graph keeps activations of its own"
    offered = " or ".join(f"--{name} (now {getattr(s, name)})" for name in switches)
    return (
        f"{framework} ran out of memory on a microbatch of {size} tokens. Lower --microbatch_tokens "
        f"{s.microbatch_tokens}, --batch_size {s.batch_size} or --context_length {s.context_length}, or turn on "
        f"{offered}{graphs}."
    )


def on_sampling(framework: str, answers: int, plan: Parts) -> str:
    s = plan.settings
    return (
        f"{framework} ran out of memory while it sampled {answers} answers. Lower --batch_size {s.batch_size}, "
        f"--num_generations {s.num_generations} or --max_completion_length {s.max_completion_length}."
    )
