"""Environment variables of NCCL, torch, gloo, UCX and others, as tables."""
