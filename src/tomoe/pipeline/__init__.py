"""Dense model -> plan -> converted folder: `convert`, and the commands that run some of its steps (train, plan, apply).

recipe -> RUN (recipe, corpus, metrics, masks/step-N) -> PLAN (plan.json, plan.safetensors) -> OUT (a Hugging Face folder)
"""
