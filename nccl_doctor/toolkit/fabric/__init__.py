"""RDMA devices, ports, rails, and which of them NCCL would use."""
