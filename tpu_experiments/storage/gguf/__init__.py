"""GGUF files as models to start from, and as llama.cpp reads them."""
