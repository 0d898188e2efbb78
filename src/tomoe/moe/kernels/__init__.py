"""Faster ways to run the experts, entered into the modeling file on import."""

from torch import nn

from tomoe.moe.kernels import gpu, inputs, linear, native, router
from tomoe.moe.modeling_tomoe import Way, enter

enter(
    "experts",
    native=Way(native.run_native, native.suits, native.obstacle),
    few=Way(gpu.run_few, gpu.few_suits),
    grouped=Way(gpu.run_grouped, gpu.grouped_suits),
)
enter(
    "router logits",
    native=Way(router.native_logits, router.native_suits),
    precise=Way(router.precise_logits, router.precise_suits),
)
enter("largest logits", native=Way(router.largest, router.finds_largest))
enter("logits", native=Way(linear.product, linear.suits))
enter("largest inputs", native=Way(inputs.largest, inputs.finds_largest, inputs.obstacle))


def prepare(model: nn.Module) -> None:
    """Have the linear layers of a loaded model that is to decode on a CPU run in kernels, where they can: as `tomoe.load` does.

    Projections whose tokens choose inputs get other memory, in which `weight` is not contiguous; beside experts, projections of
    attention run in a kernel. Call it after quantizers, adapters and hooks: layers with these stay as they are.
    """
    inputs.prepare_(model)
    linear.prepare_(model)
