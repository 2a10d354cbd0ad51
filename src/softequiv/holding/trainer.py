"""How is a target held in transformers' Trainer? By a callback that lets the model's own loss carry the price."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from softequiv.errors import SoftEquivError
from softequiv.holding.held import HeldByMeasurement

PLACE = "softequiv.held"  # in the TrainerState, which every checkpoint of a Trainer has
IGNORED = -100  # a label that transformers does not count


def HeldCallback(held: HeldByMeasurement) -> Any:
    """A `transformers.TrainerCallback` that holds a target: `Trainer(..., callbacks=[HeldCallback(held)])`.

    A callback cannot change `Trainer.compute_loss`. This one puts a forward hook on the model while it is trained:
    where a forward pass in training mode returns a loss, the term of `held` is added to it. The loss must therefore be
    the model's own, as it is where the data have labels and neither label smoothing nor `compute_loss_func` replaces
    it; else the first step says so. Where gradients are accumulated, each batch is measured, and the terms are shared
    out over the step as the losses are. Price and running error go into the Trainer's log, and the state into its
    checkpoints, from which `resume_from_checkpoint` takes it up.

    >>> from softequiv import C
    >>> from softequiv.actions import Moves, Pictures
    >>> callback = HeldCallback(HeldByMeasurement(Moves(Pictures(), C(4)), target=0.1))
    """
    try:
        from transformers import TrainerCallback
    except ImportError as missing:
        raise ImportError("HeldCallback needs transformers: pip install 'softequiv[transformers]'") from missing

    class Holding(TrainerCallback):  # type: ignore[misc, unused-ignore]
        hook: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            stored = state.stateful_callbacks.get(PLACE) if state.global_step else None
            if stored is not None:
                held.load_state_dict({name: torch.tensor(value) for name, value in stored.items()})
            if self.hook is not None:  # of a training that broke off
                self.hook.remove()
            self.hook = of["model"].register_forward_hook(self.priced, with_kwargs=True)
            self.calls = held.calls

        def priced(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> Any:
            # asked again without labels, for the error, the model returns no loss and the hook stops here
            if model.training and getattr(result, "loss", None) is not None:
                x = args[0] if args else named[str(getattr(model, "main_input_name", "pixel_values"))]
                result["loss"] = result.loss + share_of_step(named) * held.term(model, x)
            return result

        def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            if held.calls == self.calls:
                raise SoftEquivError(
                    "the model returned no loss of its own in this step, so nothing held its target; give it labels, "
                    "without label smoothing or compute_loss_func"
                )
            self.calls = held.calls
            state.stateful_callbacks[PLACE] = {name: float(value) for name, value in held.state_dict().items()}

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **of: Any) -> None:
            told = {"price": held.price, "held_error": held.error}
            state.log_history[-1].update(told)
            if logs is not None:  # what later callbacks report
                logs.update(told)

        def on_train_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            self.hook.remove()

    return Holding()


def share_of_step(named: Mapping[str, Any]) -> Any:
    """Which part of a step's loss a batch is to carry itself, given what the Trainer passes to the model with it.

    Where it passes the number of labels in all batches of the step, it adds up their losses; else it takes their mean.

    >>> share_of_step({"labels": torch.tensor([4, 2, -100]), "num_items_in_batch": 8})
    tensor(0.2500)
    """
    items = named.get("num_items_in_batch")
    return 1 if items is None else (named["labels"] != IGNORED).sum() / items
