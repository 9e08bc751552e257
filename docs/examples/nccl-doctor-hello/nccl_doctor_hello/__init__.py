"""A plug-in for nccl-doctor."""
