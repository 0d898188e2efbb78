"""Faster ways to run the experts, entered into the modeling file on import."""

from tomoe.moe import modeling_tomoe
from tomoe.moe.kernels import gpu, native, router
from tomoe.moe.modeling_tomoe import BACKEND_CHOICES, EXPERT_BACKENDS


def register() -> None:
    """Enter `native`, `few` and `grouped` into the modelling file's backends, and let `auto` take them where they are fast.

    A router's logits, and the search for the largest, take the place of PyTorch's.
    """
    EXPERT_BACKENDS.update(native=native.run_native, few=gpu.run_few, grouped=gpu.run_grouped)
    for choose in (native.choose_native, gpu.choose_gpu):
        if choose not in BACKEND_CHOICES:
            BACKEND_CHOICES.append(choose)
    modeling_tomoe.router_logits, modeling_tomoe.largest = router.logits, router.largest


register()
