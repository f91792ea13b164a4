"""The drafter's optimizer: AdamW or Muon over fp32 parameters, one flat gradient, warm-up and cosine, never a step with NaN.

All gradients are views of one buffer, so drafters sum theirs, and the norm is taken, in one call each, at addresses
that never change. What changes from step to step is a tensor too, set by `begin`, so that `apply` can be captured. Nothing
here synchronises but `check`. Each optimizer belongs to one drafter thread.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer.config import TrainConfig
from trainer.errors import CheckpointError, NonFiniteError

_FINE = -1
_MUON_MOMENTUM = 0.95


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of 0-based `step`: linear up to the peak, then a half cosine that reaches 0 at `run.steps`."""
    peak, warmup, steps = config.optim.lr, config.lr_warmup_steps, config.run.steps
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class DraftOptimizer:
    """Steps a drafter's parameters; `flat_grad` is what its backward fills and drafters sum."""

    flat_grad: Tensor
    """[number of parameters] fp32; every `parameter.grad` is a view of it."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        """Give every parameter of `model` a zero gradient; the model already lies on its device."""
        self._named = dict(model.named_parameters())
        parameters = list(self._named.values())
        device = parameters[0].device
        self._config = config
        self.flat_grad = _flat_gradient(parameters)
        self._lr = torch.tensor(0.0, dtype=torch.float32, device=device)
        self._step = torch.tensor(0, device=device)
        self._bad_step = torch.tensor(_FINE, device=device)
        self._held = torch.tensor(False, device=device)
        optim = config.optim
        matrices = [p for p in parameters if p.ndim > 1]
        self._muon = _Muon(matrices, optim.weight_decay) if optim.optimizer == "muon" else None
        groups = [
            {"params": [] if self._muon else matrices, "weight_decay": optim.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=self._lr, betas=(optim.beta1, optim.beta2), fused=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """What later steps depend on: `parameter/NAME` and its statistics, such as `exp_avg/NAME`. No copies."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            found[f"parameter/{name}"] = parameter.detach()
            found |= {f"{kind}/{name}": value for kind, value in self._state(parameter).items()}
        return found

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the `state_tensors` of an equal drafter, at the same addresses.

        A step has been taken, if only a held one: before it there are no statistics. Raises CheckpointError, and changes
        nothing, if there is any other tensor than an equal drafter's.
        """
        own = self.state_tensors()
        for key in sorted(own.keys() | tensors.keys()):
            allowed, got = _looks(own.get(key)), _looks(tensors.get(key))
            if allowed != got:
                raise CheckpointError(f"run.resume: {key} in the training state must be {allowed}, got {got}")
        for key, tensor in own.items():
            tensor.copy_(tensors[key])

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._adamw.state[parameter]
        return self._muon.state(parameter) if self._muon is not None and parameter.ndim > 1 else state

    def zero_grad(self) -> None:
        """Set the gradient to zero, in place."""
        self.flat_grad.zero_()

    def hold(self, held: bool) -> None:
        """While held, `apply` does all its work and changes nothing: for warm-up, capture and dry runs."""
        self._held.fill_(held)

    def capturable(self) -> None:
        """From now on `apply` may be captured; it has been called before."""
        for group in self._adamw.param_groups:
            group["capturable"] = True  # not from the start: torch warns of capturable steps that are not captured

    def begin(self, step: int) -> None:
        """Set what `apply` needs for 0-based `step`."""
        self._lr.fill_(learning_rate(self._config, step))
        self._step.fill_(step)

    def step(self, step: int, loss_sum: Tensor, weight_sum: Tensor) -> Tensor:
        """`begin` and `apply`."""
        self.begin(step)
        return self.apply(loss_sum, weight_sum)

    @torch.no_grad()
    def apply(self, loss_sum: Tensor, weight_sum: Tensor) -> Tensor:
        """Apply the step that has begun: `flat_grad`, `loss_sum` and `weight_sum` are sums over all drafters.

        Returns the norm of the gradient of loss_sum / weight_sum, before clipping. From the first step whose loss or
        gradient is not finite on, that one included, nothing is applied; `check` raises then. Without any weight the
        gradient counts as zero.
        """
        share = torch.where(weight_sum > 0, 1 / weight_sum, 0.0)
        grad_norm = torch.linalg.vector_norm(self.flat_grad) * share
        self.flat_grad.mul_(share * (self._config.optim.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0))
        finite = torch.isfinite(loss_sum) & torch.isfinite(grad_norm)
        self._bad_step.copy_(torch.where((self._bad_step == _FINE) & ~finite, self._step, self._bad_step))
        # The fused kernel reads this attribute, as GradScaler sets it, and then leaves everything as it was.
        skipped = (self._bad_step != _FINE) | self._held
        self._adamw.found_inf = skipped.float()  # type: ignore[attr-defined]
        self._adamw.step()
        if self._muon is not None:
            self._muon.step(self._lr, skipped)
        return grad_norm

    def check(self, num_drafters: int = 1) -> None:
        """Raise NonFiniteError if a step was not applied; waits for the device."""
        step = int(self._bad_step.item())
        if step == _FINE:
            return
        first, last = step * num_drafters, (step + 1) * num_drafters - 1
        batches = f"batch {first}" if first == last else f"batches {first}..{last}"
        raise NonFiniteError(f"step {step + 1} ({batches}): loss and gradient must be finite, got NaN or infinity; not applied")


class _Muon:
    """torch's Muon with a learning rate that is a tensor and steps that can be skipped, neither of which it has itself.

    It works on zeros instead of the parameters, at rate 1 and without decay, which leaves its steps there. They are scaled to
    the size that AdamW's have, so `optim.lr` means the same for both (arXiv 2502.16982).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], weight_decay: float) -> None:
        """The gradients of `parameters` are what they are at each step."""
        self._steps = {parameter: nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters}
        for parameter, step in self._steps.items():
            step.grad = parameter.grad
        self._weight_decay = weight_decay
        self._muon = torch.optim.Muon(
            list(self._steps.values()), lr=1.0, weight_decay=0.0, momentum=_MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw"
        )

    def step(self, lr: Tensor, skipped: Tensor) -> None:
        """Change the parameters, or nothing at all, statistics included, if `skipped`."""
        for parameter, step in self._steps.items():
            assert step.grad is not None
            step.zero_()
            held = self.state(parameter).get("momentum_buffer", step)
            step.grad.copy_(torch.where(skipped, held, step.grad))  # the mean with itself is itself
        self._muon.step()
        for parameter, step in self._steps.items():
            decayed = parameter * (1 - lr * self._weight_decay)
            parameter.copy_(torch.where(skipped, parameter, decayed + lr * step))

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Statistics of a parameter."""
        state: dict[str, Tensor] = self._muon.state[self._steps[parameter]]
        return state


def _looks(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _flat_gradient(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One zero buffer that every parameter's gradient is a view of."""
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float32, device=parameters[0].device)
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat
