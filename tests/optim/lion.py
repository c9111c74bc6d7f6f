"""Lion (arXiv 2302.06675), as a user adds an optimizer: this file, and conf/optim/lion.yaml beside it."""

import torch


class Lion:
    """Sign of an interpolation of gradient and momentum, with decoupled weight decay."""

    def __init__(self, *, betas):
        self.of_update, self.of_momentum = betas

    def init(self, parameters):
        state = {name: {"momentum": torch.zeros_like(p, dtype=torch.float32)} for name, p in parameters.items()}
        return {"": {"count": torch.zeros(1)}, **state}

    def update(self, parameters, grads, state, *, lr, decay):
        moved, made = {}, {"": {"count": state[""]["count"] + 1}}
        for name, p in parameters.items():
            g, m = grads[name], state[name]["momentum"]
            step = (self.of_update * m + (1 - self.of_update) * g).sign()
            moved[name] = p - lr * (step + decay[name] * p)
            made[name] = {"momentum": self.of_momentum * m + (1 - self.of_momentum) * g}
        return moved, made
