"""`convert`, the verbs that run some of its steps (train, plan, apply), and the steps themselves.

recipe -> RUN (recipe, corpus, metrics, masks/step-N) -> PLAN (plan.json, plan.safetensors) -> OUT (a Hugging Face folder)
"""
