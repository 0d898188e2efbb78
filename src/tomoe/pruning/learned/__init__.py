"""The paper's method, which the default does without: learned masks, overlapping experts, pruned attention."""
