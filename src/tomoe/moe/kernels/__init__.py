"""Faster ways to run the experts than the modelling file has: importing this package enters them there."""

from tomoe.moe import modeling_tomoe
from tomoe.moe.kernels import native, router
from tomoe.moe.modeling_tomoe import BACKEND_CHOICES, EXPERT_BACKENDS


def register() -> None:
    """Enter `native` into the modelling file's backends, and let `auto` take it wherever it can run.

    A router's logits, and the search for the largest, take the place of PyTorch's.
    """
    EXPERT_BACKENDS["native"] = native.run_native
    if native.choose_native not in BACKEND_CHOICES:
        BACKEND_CHOICES.append(native.choose_native)
    modeling_tomoe.router_logits, modeling_tomoe.largest = router.logits, router.largest


register()
