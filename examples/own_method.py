"""A method of one's own: neurons that work hardest on the same texts form an expert.

tomoe convert smollm2-135m --method examples/own_method.py:ByText --active 0.7 -o by-text
"""

import torch

import tomoe


class ByText(tomoe.Method):
    """Experts hold neurons whose energy peaks on the same texts; the neurons with most energy are shared."""

    class Config(tomoe.MethodConfig):
        share_busiest: bool = True
        """Whether the shared neurons are those with most energy, or those with least."""

    def experts(self, seen: tomoe.Activations, room: tomoe.Room) -> tomoe.Experts:
        # what each neuron adds to the output of each token, [T, F], summed over the tokens of each text
        energy = seen.energy_TF()
        by_text = energy.new_zeros(int(seen.sequence_T.max()) + 1, energy.shape[1])
        by_text.index_add_(0, seen.sequence_T, energy)
        order = by_text.sum(0).argsort(descending=self.config.share_busiest, stable=True)
        shared, routed = order[: room.shared], order[room.shared :]
        # neurons with their peak on the same text stand side by side, and are cut into experts of one size
        routed = routed[by_text[:, routed].argmax(0).argsort(stable=True)]
        expert_of_neuron = torch.empty_like(order)
        expert_of_neuron[shared] = -1
        expert_of_neuron[routed] = torch.arange(len(routed), device=order.device) // room.expert_size
        return tomoe.Experts(expert_of_neuron)
