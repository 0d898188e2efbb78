"""The paper's method: learned masks, overlapping experts, pruned attention; the default does without.

`method.py` begins with the class of the method.
"""

from tomoe.methods.tomoe.method import ToMoE as ToMoE
