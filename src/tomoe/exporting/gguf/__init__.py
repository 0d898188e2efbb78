"""A GGUF file for llama.cpp: its architectures, its tensors and tokenizer, and its comparison by llama.cpp itself."""
