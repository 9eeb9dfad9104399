"""One training step in plain PyTorch: what train.py computes, without what makes it fast, sharded or quantized.

python examples/reference_step.py MODEL_FOLDER [--method lora|dora|dpo|packed]

Prints the losses of ten steps on rows of examples/. The test suite takes the same steps with train.py's engine and
compares losses and weights; docs/architecture.md names, for each part, the file that does it there and what it adds.
"""

import argparse
import json
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn


class LoRALinear(nn.Module):
    """A frozen linear and a trained product of low rank beside it: W x + scale B A x (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 8, alpha: float = 16.0):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.empty(rank, base.in_features).uniform_(-1, 1) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.A.T) @ self.B.T


class DoRALinear(LoRALinear):
    """LoRA for the direction of each row of W, and its length trained apart (Liu et al. 2024)."""

    def __init__(self, base: nn.Linear, rank: int = 8, alpha: float = 16.0):
        super().__init__(base, rank, alpha)
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.base.weight + self.scale * self.B @ self.A
        weight = weight * (self.magnitude / weight.detach().norm(dim=1))[:, None]
        return nn.functional.linear(x, weight, self.base.bias)


def add_adapters(model: nn.Module, kind: type[LoRALinear] = LoRALinear) -> list[nn.Parameter]:
    """Puts an adapter beside every linear but the head, freezes all else, and returns what trains."""
    model.requires_grad_(False)
    linears = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"]
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, kind(model.get_submodule(name)))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextmanager
def adapters_off(model: nn.Module):
    """The model before training: DPO's reference."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoRALinear)]
    scales = [layer.scale for layer in layers]
    for layer in layers:
        layer.scale = 0.0
    with torch.no_grad():
        yield
    for layer, scale in zip(layers, scales, strict=True):
        layer.scale = scale


def log_probs(model: nn.Module, ids: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    """The log-probability of each target of one document, from the tokens before it."""
    logits = model(input_ids=ids[None]).logits[0, :-1]
    of_tokens = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return of_tokens[is_target[1:]]


def packed_log_probs(model: nn.Module, documents: list) -> torch.Tensor:
    """The same of several documents in one row: positions restart at 0, and attention stays within a document."""
    ids = torch.cat([ids for ids, _ in documents])
    is_target = torch.cat([is_target for _, is_target in documents])
    positions = torch.cat([torch.arange(len(ids)) for ids, _ in documents])
    document = (positions == 0).cumsum(0)
    sees = (document[:, None] == document[None]).tril()[None, None]
    logits = model(input_ids=ids[None], position_ids=positions[None], attention_mask=sees).logits[0, :-1]
    of_tokens = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return of_tokens[is_target[1:] & (positions[1:] > 0)]


def next_token_loss(model: nn.Module, documents: list) -> torch.Tensor:
    """The mean over all targets of the step, not of each document's mean."""
    return -torch.cat([log_probs(model, *document) for document in documents]).mean()


def packed_loss(model: nn.Module, documents: list) -> torch.Tensor:
    return -packed_log_probs(model, documents).mean()


def dpo_loss(model: nn.Module, documents: list, beta: float = 0.1) -> torch.Tensor:
    """Documents are pairs, the chosen answer first. Rafailov et al. 2023, equation 7."""
    with adapters_off(model):
        reference = torch.stack([log_probs(model, *document).sum() for document in documents])
    ratios = torch.stack([log_probs(model, *document).sum() for document in documents]) - reference
    return -nn.functional.logsigmoid(beta * (ratios[::2] - ratios[1::2])).mean()


def train_step(loss: torch.Tensor, optimizer: torch.optim.Optimizer, max_norm: float = 1.0) -> tuple[float, float]:
    """(the loss, the norm of its gradient) of one step."""
    parameters = optimizer.param_groups[0]["params"]
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


LOSSES = {"lora": next_token_loss, "dora": next_token_loss, "packed": packed_loss, "dpo": dpo_loss}


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_FOLDER")
    parser.add_argument("--method", choices=LOSSES, default="lora")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    documents = []
    for line in (Path(__file__).parent / "completion.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        ids = torch.tensor(prompt + answer)
        documents.append((ids, torch.arange(len(ids)) >= len(prompt)))
    trained = add_adapters(model, DoRALinear if args.method == "dora" else LoRALinear)
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    for step in range(10):
        loss, norm = train_step(LOSSES[args.method](model, documents[:8]), optimizer)
        print(f"step {step + 1:>2} | loss {loss:.6f} | gradient norm {norm:.4f}")


if __name__ == "__main__":
    main()
