"""What NVIDIA's management library and the kernel log say of the GPUs of a host."""
