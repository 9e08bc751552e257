"""GPUs without CUDA: how many, which, and what their library says."""
