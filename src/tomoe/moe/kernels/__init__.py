"""Faster ways to run the experts, entered into the modeling file on import."""

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
enter("choosing product", native=Way(inputs.product, inputs.suits, inputs.obstacle))
