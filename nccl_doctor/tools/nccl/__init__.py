"""NCCL's library, its settings, and the interfaces that it would choose."""
