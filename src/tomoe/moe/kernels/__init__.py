"""Faster backends, registered in the modeling file on import."""

from torch import nn

from tomoe.moe.kernels import gpu, inputs, linear, native, router
from tomoe.moe.modeling_tomoe import Backend, register

register(
    "experts",
    native=Backend(native.run_native, native.supports, native.obstacle),
    few=Backend(gpu.run_few, gpu.supports_few),
    grouped=Backend(gpu.run_grouped, gpu.supports_grouped),
)
register(
    "router logits",
    native=Backend(router.native_logits, router.supports_native),
    precise=Backend(router.precise_logits, router.supports_precise),
)
register("largest logits", native=Backend(router.largest, router.finds_largest))
register("logits", native=Backend(linear.product, linear.supports))
register("largest inputs", native=Backend(inputs.largest, inputs.finds_largest, inputs.obstacle))


def prepare(model: nn.Module) -> None:
    """Run the linear layers of a loaded model in kernels, where possible, for decoding on a CPU; `tomoe.load` calls it.

    Projections whose tokens choose inputs get other memory, in which `weight` is not contiguous; beside experts, projections of
    attention run in a kernel. Call it after quantizers, adapters and hooks: layers with these stay as they are.
    """
    inputs.prepare_(model)
    linear.prepare_(model)
